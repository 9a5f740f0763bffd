"""The interface of post-merging methods and of mergers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from torch import nn

from fusion_bench_featcal.log import CalibrationLog
from fusion_bench_featcal.method_inputs import MethodInputs
from fusion_bench_featcal.settings import FeatCalSettings


@dataclass(frozen=True)
class Choice:
    """Choice of the settings that made a model, which it may carry as `choice`.

    Attributes:
        tried: Number of settings that were compared on calibration samples, >= 1.
        chosen: What was changed of the settings as given, such as `rank=4`; or `as given`.
    """

    tried: int
    chosen: str

    @classmethod
    def of(cls, tried: int, change: Mapping[str, Any]) -> "Choice":
        """Describe a change of settings."""
        return cls(tried, ", ".join(f"{k}={v}" for k, v in change.items()) or "as given")


class PostMerging(Protocol):
    """One way to improve a merged model; a YAML entry names it by `_target_`."""

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, defaults included, fit for JSON."""
        ...

    def check(self, inputs: MethodInputs) -> None:
        """Refuse what cannot work, before a model is loaded."""
        ...

    def post_merge(self, merged: nn.Module, inputs: MethodInputs) -> nn.Module:
        """Return the improved model; `merged` is this call's own.

        A model that was trained may carry `curves`, task -> list of (step, loss), and one whose
        settings were chosen `choice`: they are kept.
        """
        ...

    def samples(self, model: nn.Module, tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Task -> {"samples": number, "split": name} of the data that made the model."""
        ...

    def added(self, model: nn.Module) -> dict[str, int]:
        """Module -> parameters, for what an improved model carries besides the merged one's."""
        ...


class WeightsOnly:
    """Part of methods that make other weights for the merged model from calibration samples."""

    @property
    def calibration_settings(self) -> FeatCalSettings:
        """The settings of the draw; of a `Method`, its own property."""
        raise NotImplementedError

    @cached_property
    def drawn(self) -> dict[str, int]:
        """Numbers of samples by task, of the last call of `post_merge`."""
        return {}

    def note_samples(self, log: CalibrationLog) -> None:
        """Note the numbers of samples that a calibration has used."""
        self.drawn.clear()
        self.drawn.update({record["task"]: record["samples"] for record in log.of_kind("task")})

    def samples(self, model: nn.Module, tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
        """The samples of the last call of `post_merge`."""
        split = self.calibration_settings.calibration_split
        numbers = {task: self.drawn[task] for task in tasks if task in self.drawn}
        return {task: {"samples": number, "split": split} for task, number in numbers.items()}

    def added(self, model: nn.Module) -> dict[str, int]:
        """Nothing: new weights take the merged ones' place."""
        return {}


class WithoutData:
    """Part of methods that make other weights for the merged model without any samples."""

    def samples(self, model: nn.Module, tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
        """None."""
        return {}

    def added(self, model: nn.Module) -> dict[str, int]:
        """Nothing: new weights take the merged ones' place."""
        return {}


class Chain:
    """Several methods, each applied to the model that the one before it made."""

    def __init__(self, steps: Mapping[str, PostMerging]) -> None:
        """Keep the steps: name -> method, in the order of application."""
        self._steps = dict(steps)

    @property
    def settings(self) -> dict[str, Any]:
        """Step -> its settings."""
        return {name: step.settings for name, step in self._steps.items()}

    def check(self, inputs: MethodInputs) -> None:
        """Check every step."""
        for step in self._steps.values():
            step.check(inputs)

    def post_merge(self, merged: nn.Module, inputs: MethodInputs) -> nn.Module:
        """Apply the steps in order."""
        for step in self._steps.values():
            merged = step.post_merge(merged, inputs)
        return merged

    def samples(self, model: nn.Module, tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Per task the largest number that a step uses, and all splits."""
        used: dict[str, dict[str, Any]] = {}
        by_step = [step.samples(model, tasks) for step in self._steps.values()]
        for task in tasks:
            entries = [samples[task] for samples in by_step if task in samples]
            if entries:
                splits = sorted({str(entry["split"]) for entry in entries})
                number = max(entry["samples"] for entry in entries)
                used[task] = {"samples": number, "split": " and ".join(splits)}
        return used

    def added(self, model: nn.Module) -> dict[str, int]:
        """Sum of what all steps add."""
        return {
            f"{name}.{module}": count
            for name, step in self._steps.items()
            for module, count in step.added(model).items()
        }


def seed_of(settings: Mapping[str, Any]) -> int | None:
    """The seed in a method's settings, or in those of the first step that has one."""
    seed = settings.get("seed")
    if isinstance(seed, int):
        return seed
    nested = (seed_of(entry) for entry in settings.values() if isinstance(entry, Mapping))
    return next((value for value in nested if value is not None), None)
