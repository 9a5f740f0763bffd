"""Mixtures of experts: which positions reach which of a block's modules, and their inputs there."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.engine.log import CalibrationLog
from fusion_bench_featcal.engine.mixtures import FEWEST_ROWS, Mixture
from fusion_bench_featcal.engine.modules import BlockModules
from fusion_bench_featcal.engine.recording import Recorder, Recording
from fusion_bench_featcal.engine.rows import CountedRows
from fusion_bench_featcal.settings import CalibrationError


@dataclass(frozen=True)
class RoutedInputs:
    """Notes what the experts of a block's mixtures receive, on both sides of a calibration.

    The calibrated model's router decides which positions an expert's modules are solved from. The
    task's own expert may send them elsewhere: to compare like with like, its module of the same
    name runs once more, on its own features of these positions. Its stream is not touched by that.

    Attributes:
        block: The block, for messages.
        modules: The block's modules.
        autocast: Makes the context of forward passes.
    """

    block: str
    modules: BlockModules
    autocast: Callable[[], AbstractContextManager[Any]]

    @property
    def noted(self) -> list[str]:
        """Modules whose inputs are noted beside the sites', in a pass of the calibrated model."""
        mixtures = self.modules.mixtures
        return [name for mixture in mixtures for name in (mixture.router, *mixture.experts)]

    @property
    def outputs(self) -> Mapping[str, Callable[[Any], Tensor]]:
        """By router: what is kept of its outputs, the experts of every position, `[n, k]`."""
        return {m.router: partial(chosen_experts, count=m.choices) for m in self.modules.mixtures}

    def complete(
        self,
        model: nn.Module,
        cal: Recording,
        expert: nn.Module,
        exp: Recording | None,
        valid: CountedRows | None,
    ) -> None:
        """Complete the notes of a pass: each expert's modules have one input each, if of no row.

        Args:
            model: The calibrated model.
            cal: Its pass, with what `noted` and `outputs` ask for.
            expert: The task's expert, with the block's parameters.
            exp: Its pass, with the routers' inputs; None where its features are not used.
            valid: The positions that count; None: all do.

        Raises:
            CalibrationError: If experts do not receive the positions that the router chose, or
                padding cannot be told.
        """
        if not self.modules.mixtures:
            return
        mask = None if valid is None else valid.mask().reshape(-1)
        for mixture in self.modules.mixtures:
            own = _rows(cal, mixture.router)
            theirs = None if exp is None else _rows(exp, mixture.router)
            if mask is not None and len(mask) != len(own):
                text = f"receives {len(own)} rows, but padding is known for {len(mask)}"
                raise self._error(mixture, text)
            for name, positions in self._routed(mixture, own, cal):
                sites = mixture.sites[name]
                if name not in cal.calls:  # no position of this batch
                    cal.adopt(self._run(model, name, sites, own[positions]))
                if exp is not None and theirs is not None:
                    exp.adopt(self._run(expert, name, sites, theirs[positions]))
                counted = None if mask is None else CountedRows.of_weights(mask[positions])
                cal.routed |= dict.fromkeys(sites, counted)

    def _routed(
        self, mixture: Mixture, rows: Tensor, cal: Recording
    ) -> Iterator[tuple[str, Tensor]]:
        """The positions of every expert, in the order in which it received them."""
        (choices,) = cal.outputs[mixture.router]
        for number, name in enumerate(mixture.experts):
            if not mixture.sites[name]:
                continue
            hit = choices == number
            positions = hit.T.nonzero()[:, 1]
            received = cal.of(name)
            if not received and not len(positions):
                yield name, positions
                continue
            for order in (positions, hit.nonzero()[:, 0]):  # by rank first, or by position
                if len(received) == 1 and _same(received[0], rows[order]):
                    yield name, order
                    break
            else:
                raise self._error(mixture, f"chooses other positions than {name} receives")

    def _run(self, model: nn.Module, name: str, sites: Sequence[str], rows: Tensor) -> Recording:
        module = model.get_submodule(name)
        with self.autocast():
            return Recorder().record(model, sites, lambda: (module(rows), None))

    def _error(self, mixture: Mixture, text: str) -> CalibrationError:
        inner = mixture.experts[0].removeprefix(f"{self.block}.").rpartition(".")[0]
        return CalibrationError(
            f"block {self.block}: the router {mixture.router} {text}. Leave its experts as merged: "
            f"method.modules=['!{inner}.*']"
        )


def chosen_experts(output: Any, count: int) -> Tensor:
    """The experts of every position, `[n, k]`, from what a router gives.

    Args:
        output: The router's output: logits `[n, experts]`, of which the largest `count` are chosen
            by their probabilities; or a tuple with the choices themselves.
        count: Number of experts that a position is sent to.
    """
    parts = output if isinstance(output, tuple) else (output,)
    for part in parts:
        if isinstance(part, Tensor) and not part.is_floating_point():
            return part.reshape(-1, part.shape[-1])
    logits = parts[0].reshape(-1, parts[0].shape[-1])
    return torch.softmax(logits, dim=1, dtype=torch.float).topk(count, dim=-1).indices


def left_experts(modules: Mapping[str, BlockModules], log: CalibrationLog) -> str | None:
    """A line about linear modules of experts that stay as merged; None where none does.

    Args:
        modules: Every block's modules.
        log: The calibration's log.
    """
    unrouted = sum(found.unrouted for found in modules.values())
    if unrouted:
        return (
            f"all {unrouted} linear modules of experts stay as merged: only method.order=block, "
            "method.target=module and method.ridge=fixed calibrate modules that a router chooses"
        )
    every = sum(site.routed for found in modules.values() for site in found.sites)
    left = len(log.of_kind("routed"))
    return (
        None
        if left == 0
        else (
            f"{left} of {every} linear modules of experts stay as merged: fewer than {FEWEST_ROWS} "
            "positions of every task reach them. Raise method.samples_per_task"
        )
    )


def _same(found: Tensor, wanted: Tensor) -> bool:
    """Compare rows; padding may hold NaN."""
    exact = {"rtol": 0.0, "atol": 0.0, "equal_nan": True}
    return found.shape == wanted.shape and torch.allclose(found, wanted, **exact)


def _rows(recording: Recording, router: str) -> Tensor:
    (features,) = recording.of(router)
    return features.flatten(0, -2)
