"""Upstream mergers that work tensor by tensor, fused with the calibration's own reads."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.core.finite import all_finite
from fusion_bench_featcal.engine.run import BASE, Run
from fusion_bench_featcal.settings import CalibrationError


@dataclass(frozen=True)
class UpstreamMerge:
    """A merger whose every tensor depends on the models' tensors of that name only.

    The model that is to become the merged one begins with the weights of one of them: `own`.

    Attributes:
        merge: `own` and every expert's tensor -> the merged tensor.
        own: The expert whose weights `own` are; None: the base's.
        description: What it is, fit for JSON: the merged weights depend on it.
    """

    merge: Callable[[Tensor, Sequence[Tensor]], Tensor]
    own: str | None
    description: Mapping[str, Any]


class FusedMerge:
    """Completes the merged model place by place, just before the calibration gets there.

    What it reads of the experts stays in memory for the visit, so that nothing is read twice.
    """

    def __init__(
        self,
        upstream: UpstreamMerge,
        merged: nn.Module,
        run: Run,
    ) -> None:
        """Prepare the merge; nothing is read yet.

        Args:
            upstream: The merger.
            merged: The model that becomes the merged one, in place.
            run: The run, whose model gets the same weights.
        """
        self._upstream = upstream
        self._run = run
        self._sources = {task: run.sources[task] for task in run.experts}
        self._merged = merged.state_dict()
        self._model = run.model.state_dict()
        self._places = run.merged_at()

    @torch.no_grad()
    def __call__(self, place: str) -> None:
        """Merge what a place needs; let go of what the last one needed."""
        for source in self._sources.values():
            source.release()
        needed = set(self._run.needed_at(place))
        for name in self._places.get(place, []):
            own = self._merged[name]
            if self._upstream.own is not None:
                self._take_own(self._upstream.own, name, own)
            theirs = {
                task: expert.stored(name).to(own.dtype)
                for task, expert in self._run.experts.items()
            }
            value = self._upstream.merge(own, list(theirs.values()))
            if value.is_floating_point() and not all_finite(value):
                raise self._not_finite(name, own)
            own.copy_(value)
            self._model[name].copy_(own)
            for task, tensor in theirs.items():
                key = self._run.experts[task].keys[name]
                if name in needed:
                    self._sources[task].hold(key, tensor)
                else:
                    self._sources[task].release(key)

    def _not_finite(self, name: str, own: Tensor) -> CalibrationError:
        if all_finite(own):  # and so are the experts' tensors, which are checked as they are read
            return CalibrationError(
                f"the merged tensor {name!r} is NaN or infinite, while base and experts are "
                "finite: it overflows. Check method.base_method"
            )
        source = self._upstream.own or BASE
        return CalibrationError(
            f"model {source!r}: tensor {name!r} has NaN or infinite values. Check "
            f"modelpool.models.{source}"
        )

    def _take_own(self, task: str, name: str, own: Tensor) -> None:
        """An expert that was loaded whole is not read again."""
        self._sources[task].take(self._run.experts[task].keys[name], own.clone())
