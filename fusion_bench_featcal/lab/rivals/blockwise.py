"""Merging block by block in the loop of calibration: RegMean, RegMean++, LOT and ProDistill."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fusion_bench_featcal.calibration import calibrate
from fusion_bench_featcal.experts import ExpertModel, ExpertSource, names_under, source_of
from fusion_bench_featcal.lab.rivals.outside import load_outside
from fusion_bench_featcal.module_copies import copied_module
from fusion_bench_featcal.modules.groups import Group
from fusion_bench_featcal.modules.hooks import record
from fusion_bench_featcal.modules.models import device_of
from fusion_bench_featcal.problem import Autocast
from fusion_bench_featcal.rules.lot import Lot
from fusion_bench_featcal.rules.merging import MergingRule
from fusion_bench_featcal.rules.regmean import RegMean
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.streams.batch import Batch
from fusion_bench_featcal.streams.runner import Runner
from fusion_bench_featcal.streams.samples import check_inputs
from fusion_bench_featcal.streams.streams import Streams

# FusionBench's RegMean++ keeps the base's values behind the last block, ours the experts' mean.
REGMEAN, REGMEAN_PLUSPLUS, LOT = RegMean(), RegMean(features="merged"), Lot()


@torch.no_grad()
def merge_blockwise(
    base: nn.Module,
    experts: Mapping[str, nn.Module | ExpertSource],
    batches: Mapping[str, Iterable[Any]],
    settings: FeatCalSettings,
    rule: MergingRule,
    *,
    device: torch.device | str | None = None,
    autocast: Autocast | None = None,
    streams_type: Callable[..., Streams] | None = None,
) -> nn.Module:
    """Merge experts block by block in forward order.

    Args:
        base: The base model, which gives structure, dtype and device. It is not changed.
        experts: Each task's expert: a module, or a source of its weights.
        batches: Each task's unlabeled model inputs, as `calibrate` takes them.
        settings: `samples_per_task`, `modules`, `family` and `seed` are used.
        rule: `REGMEAN`, `REGMEAN_PLUSPLUS`, `LOT`, or one of those with other settings.
        device: Where to compute; None: where the base is.
        autocast: Makes the context of forward passes. Statistics are never inside it.
        streams_type: Makes the streams; None: `ExpertStreams`.

    Returns:
        The merged model.

    Raises:
        CalibrationError: If the run cannot go on, naming the place and the setting.
        ValueError: If the family is unknown.
    """
    settings = settings.replace(batch_norm="merged", held_out=0, augment=None, log_drift=False)
    check_inputs(base, experts, batches, settings)
    home = device_of(base)
    start = copied_module(base).to(device or home)
    weights = {task: ExpertModel(task, source_of(e), start) for task, e in experts.items()}
    load_means(start, weights, rule.start_scale(len(experts)))
    if rule.outside:
        load_outside(start, base, weights, batches, settings, rule)
    behind_merged = rule.features == "merged"
    sources: Mapping[str, Any] = experts
    return calibrate(
        start,
        base,
        sources,
        batches,
        settings.replace(rule=rule),
        device=device,
        autocast=autocast,
        streams_type=streams_type or partial(ExpertStreams, behind_merged=behind_merged),
    ).model.to(home)


def load_means(model: nn.Module, experts: Mapping[str, ExpertModel], scale: float) -> None:
    """Set every floating tensor of a model, which has the base's values, to the experts' mean.

    Args:
        model: The model.
        experts: The experts by task. One tensor of each is in memory at a time.
        scale: Factor of a parameter's step from the base. Buffers, such as running variances, are
            means.
    """
    tensors = model.state_dict(keep_vars=True)
    for tensor, name in {id(t): (t.data, name) for name, t in tensors.items()}.values():
        if tensor.is_floating_point():
            wide = torch.promote_types(tensor.dtype, torch.float32)
            mean = sum(e.tensor(name).to(wide) for e in experts.values()) / len(experts)
            is_scaled = scale != 1 and isinstance(tensors[name], nn.Parameter)
            tensor.copy_(tensor + scale * (mean - tensor) if is_scaled else mean)


@dataclass(frozen=True)
class ExpertStreams(Streams):
    """Streams in which sums are over what the modules of each expert's blocks receive.

    Attributes:
        behind_merged: Whether an expert's block runs on the features of the merged blocks before
            it; else on the expert's.
    """

    behind_merged: bool = False

    @property
    def runs_experts(self) -> bool:
        """Return True: their inputs are what is summed."""
        return True

    def tensors_of(self, block: str) -> list[str]:
        """Return the names of an expert's tensors that running its block needs."""
        if self.behind_merged:
            return names_under(self.model.state_dict(), [block])
        return super().tensors_of(block)

    def follow(
        self, task: str, batch: Batch, block: str, expert: nn.Module, groups: Iterable[Group]
    ) -> None:
        """Run a batch through the expert's block and note what its modules receive."""
        model, run = expert, partial(self.runner.step, expert, block, batch.exp)
        if self.behind_merged:
            tensors = {
                f"{block}.{n}": t for n, t in expert.get_submodule(block).state_dict().items()
            }
            model, step = self.model, BlockStep(self.runner, self.model, block)
            run = partial(step.run_with, tensors, batch.cal)
        recorded = record(model, [group.name for group in groups], run)
        batch.noted = recorded.inputs
        if not self.behind_merged:
            batch.exp = recorded.result[1]

    def inputs_of(
        self, task: str, batch: Batch, block: str, groups: Sequence[Group], *, watched: bool
    ) -> dict[str, list[Tensor]]:
        """Return what the expert's modules received."""
        return {group.name: batch.noted.pop(group.name) for group in groups}

    def advance(self, block: str) -> None:
        """Run all batches through a merged block, or the first one alone.

        Where experts run on their features, the merged model's only serve to find the groups of
        modules, for which one batch is enough.
        """
        if self.behind_merged:
            return super().advance(block)
        first = next(iter(self.tasks.values()))[0]
        with self.waits_in.at_hand(first):
            _, first.cal = self.runner.step(self.model, block, first.cal)


class BlockStep(nn.Module):
    """One block of a model as a module of its own, whose parameters can be replaced in a call."""

    def __init__(self, runner: Runner, model: nn.Module, block: str) -> None:
        super().__init__()
        self.model = model
        self._step = lambda call: runner.step(model, block, call)[0]

    def forward(self, call: Any) -> Tensor:
        """Run the block; its hidden output."""
        return self._step(call)

    def run_with(self, tensors: Mapping[str, Tensor], call: Any) -> Tensor:
        """Run the block with other tensors, by their names in the model; its hidden output."""
        own = self.model.state_dict()
        replaced = {f"model.{name}": t.to(own[name].dtype) for name, t in tensors.items()}
        return functional_call(self, replaced, (call,))
