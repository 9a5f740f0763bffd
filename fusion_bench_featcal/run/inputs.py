"""Inputs of a calibration, models and samples, and where it runs."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.experts import ExpertSource
from fusion_bench_featcal.families.open_clip import split
from fusion_bench_featcal.run.devices import check_device
from fusion_bench_featcal.run.processes import Processes

Autocast = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Inputs:
    """Models and samples of one calibration, as documented in `calibrate`."""

    merged: nn.Module
    base: nn.Module | ExpertSource | None
    experts: Mapping[str, nn.Module | ExpertSource]
    batches: Mapping[str, Iterable[Any]]
    merged_weights: ExpertSource | None = None

    def with_split_attention(self) -> "Inputs":
        """Return the inputs with the attention of open_clip's models split.

        Raises:
            CalibrationError: If the attention cannot be split, or a model is in files.
        """
        merged = split(self.merged)
        if merged is self.merged:
            return self

        experts, base = dict[str, Any](self.experts), self.base
        models = [*experts.values(), base, self.merged_weights]
        if not all(isinstance(model, nn.Module | None) for model in models):
            raise CalibrationError(
                "an open_clip model must be in memory to be calibrated: load it from its file"
            )
        experts = {task: split(expert) for task, expert in experts.items()}
        base = split(base) if isinstance(base, nn.Module) else None
        return replace(self, merged=merged, base=base, experts=experts)


@dataclass(frozen=True)
class Runtime:
    """Device, precision and processes of a calibration, as documented in `calibrate`."""

    device: torch.device
    autocast: Autocast = nullcontext
    processes: Processes = field(default_factory=Processes)
    progress: bool = True

    @classmethod
    def of(
        cls,
        usual_device: torch.device,
        device: torch.device | str | None,
        autocast: Autocast | None,
        processes: Processes | None,
        progress: bool,
    ) -> Self:
        """Return the runtime for an entry point's arguments. None selects the default.

        Raises:
            ValueError: If torch cannot use the device.
        """
        if device is not None:
            check_device(str(torch.device(device)), f"device={device}")
        chosen = torch.device(device or usual_device)
        return cls(chosen, autocast or nullcontext, processes or Processes(), progress)
