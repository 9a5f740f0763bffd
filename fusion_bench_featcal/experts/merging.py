"""Upstream mergers that work tensor by tensor, fused with the calibration's own reads."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.core.finite import all_finite
from fusion_bench_featcal.experts.expert_model import names_under
from fusion_bench_featcal.experts.reading import BASE, Reads, stage_place
from fusion_bench_featcal.settings import CalibrationError


@dataclass(frozen=True)
class UpstreamMerge:
    """A merger whose every tensor depends on the models' tensors of that name only.

    The model that is to become the merged one begins with the weights of one of them: `own`. Under
    a read budget that is the base, whose tensors take the place of those that are not read.

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

    What it reads of the experts stays in memory for the visit, so that nothing is read twice. A
    module that a budget leaves out adds no step from the base to the merged model.

    Attributes:
        upstream: The merger.
        places: Place -> names of the tensors that are merged there.
    """

    def __init__(
        self,
        upstream: UpstreamMerge,
        merged: Mapping[str, Tensor],
        model: nn.Module,
        blocks: Iterable[str],
        reads: Reads,
    ) -> None:
        """Prepare the merge; nothing is read yet.

        Args:
            upstream: The merger.
            merged: Tensors of the model that becomes the merged one, in place.
            model: The calibrated model, which gets the same weights.
            blocks: Names of its blocks.
            reads: Reads of the calibration.
        """
        self.upstream = upstream
        self._merged = merged
        self._model = model.state_dict()
        self._reads = reads
        self.places = merged_at(model, blocks)

    @torch.no_grad()
    def __call__(self, place: str) -> None:
        """Merge what a place needs; let go of what the last one needed."""
        reads, experts = self._reads, self._reads.experts
        for task in experts:
            reads.sources[task].held.clear()
        needed = set(reads.visits[place])
        for name in self.places.get(place, []):
            own = self._merged[name]
            if self.upstream.own is not None:
                self._take_own(self.upstream.own, name, own)
            keys = {task: expert.keys[name] for task, expert in experts.items()}
            unread = [t for t, key in keys.items() if key in reads.sources[t].stand_ins]
            tensors = {
                task: own if task in unread else expert.stored(name).to(own.dtype)
                for task, expert in experts.items()
            }
            try:
                value = self.upstream.merge(own, list(tensors.values()))
            except (TypeError, ValueError, RuntimeError):
                if own.is_floating_point():
                    raise
                value = own  # a count, as of the batches that BatchNorm has seen, is no weight
            if value.is_floating_point() and not all_finite(value):
                raise self._not_finite(name, own)
            own.copy_(value)
            self._model[name].copy_(own)
            for task, tensor in tensors.items():
                held = reads.sources[task].held
                held.pop(keys[task], None)
                if name in needed and task not in unread:
                    held[keys[task]] = tensor

    def _not_finite(self, name: str, own: Tensor) -> CalibrationError:
        if all_finite(own):  # and so are the experts' tensors, which are checked as they are read
            return CalibrationError(
                f"the merged tensor {name!r} is NaN or infinite, while base and experts are "
                "finite: it overflows. Check method.base_method"
            )
        source = self.upstream.own or BASE
        return CalibrationError(
            f"model {source!r}: tensor {name!r} has NaN or infinite values. Check "
            f"modelpool.models.{source}"
        )

    def _take_own(self, task: str, name: str, own: Tensor) -> None:
        """Count a tensor of an expert that was loaded whole, which is not read again."""
        source, key = self._reads.sources[task], self._reads.experts[task].keys[name]
        source.held[key] = own.clone()
        source.count(key, own)


def merged_at(model: nn.Module, blocks: Iterable[str]) -> dict[str, list[str]]:
    """Place -> names of the tensors that are merged there: every one, and tied ones once."""
    tensors = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(tensors.items())}
    names = [name for name, tensor in tensors.items() if first[id(tensor)] == name]
    inside = {block: names_under(names, [block]) for block in blocks}
    rest = set(names).difference(*inside.values())
    return {stage_place(0): [name for name in names if name in rest], **inside}
