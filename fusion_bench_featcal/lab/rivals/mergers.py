"""RegMean, RegMean++ and LOT Merging, block by block in the loop of calibration."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fusion_bench_featcal.calibration import calibrate
from fusion_bench_featcal.experts import ExpertModel, ExpertSource, names_under, source_of
from fusion_bench_featcal.fusionbench.pool_models import BASE_MODEL, load_pool_model
from fusion_bench_featcal.fusionbench.program import counting_in
from fusion_bench_featcal.lab.rivals.registry import SampleSettings, method
from fusion_bench_featcal.method_inputs import MethodInputs
from fusion_bench_featcal.module_copies import copied_module
from fusion_bench_featcal.modules.groups import Group
from fusion_bench_featcal.modules.hooks import record
from fusion_bench_featcal.modules.models import device_of
from fusion_bench_featcal.rules import lot, regmean
from fusion_bench_featcal.rules.merging import MergingRule
from fusion_bench_featcal.run.problem import Autocast
from fusion_bench_featcal.setting_fields import same_as
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.streams.batch import Batch
from fusion_bench_featcal.streams.samples import check_inputs
from fusion_bench_featcal.streams.streams import Streams


@dataclass(frozen=True, kw_only=True, eq=False)
class Merger(MergingRule, SampleSettings):
    """A merger for any model family on FeatCal's samples.

    It is a rule of calibration. A subclass also inherits a rule such as `rules.regmean.RegMean`.
    """

    modules: Sequence[str] | None = same_as(
        FeatCalSettings,
        "modules",
        help="Patterns of the modules to solve: a name or its end, `*` for anything, `!` in front "
        "to exclude. Null: all that the method solves.",
        group="models",
    )
    family: Any = same_as(FeatCalSettings, "family")

    def check(self, inputs: MethodInputs) -> None:
        """Refuse a pool without a base, without data, or with models of several kinds."""
        inputs.require_base("is needed for its structure")
        super().check(inputs)

    def merge(self, inputs: MethodInputs) -> nn.Module:
        """Merge a pool's experts. Raises as `merge_models`."""
        settings = self.calibration_settings
        batches = inputs.batches(settings)
        return self.merge_models(
            load_base(inputs),
            inputs.experts(),
            batches,
            device=inputs.fabric.device,
            autocast=inputs.fabric.autocast,
        )

    @torch.no_grad()
    def merge_models(
        self,
        base: nn.Module,
        experts: Mapping[str, nn.Module | ExpertSource],
        batches: Mapping[str, Iterable[Any]],
        *,
        device: torch.device | str | None = None,
        autocast: Autocast | None = None,
    ) -> nn.Module:
        """Merge experts block by block in forward order.

        Arguments and errors are those of `calibrate`. The result has the structure, dtype and
        device of the base, which is not changed.
        """
        settings = self.calibration_settings
        check_inputs(base, experts, batches, settings)
        home = device_of(base)
        start = copied_module(base).to(device or home)
        load_means(start, experts, self.start_scale(len(experts)))
        result = calibrate(
            start,
            base,
            experts,
            batches,
            settings.replace(rule=self),
            device=device,
            autocast=autocast,
            streams_type=self.streams_type(base),
        )
        self.note_samples(result.log)
        return result.model.to(home)

    def streams_type(self, base: nn.Module) -> Callable[..., Streams]:
        """Return the class of the streams of samples, or a function that creates them."""
        return ExpertStreams


@method("featcal_baselines/regmean", source="Jin et al., ICLR 2023", without=["features"])
class RegMean(regmean.RegMean, Merger):
    """RegMean: linear weights by regression on the experts' features.

    All other parameters are the experts' mean. Same solution as regmean/clip_regmean, for any model
    family.
    """


@method("featcal_baselines/regmean_plusplus", source="Nguyen et al., TMLR 2026")
class RegMeanPlusPlus(RegMean):
    """RegMean++: RegMean block by block, on features of the blocks merged so far.

    Parameters after the last block are the experts' mean, in regmean_plusplus/* the base's.
    """

    features = "merged"


@method("featcal_baselines/lot", source="Sun et al., NeurIPS 2025, arXiv 2505.23859")
class Lot(lot.Lot, Merger):
    """LOT Merging: the task vector that fits all experts best, block by block.

    It is computed by regression on the experts' features. Directions without samples keep the
    base's weights.
    """


def load_base(inputs: MethodInputs) -> nn.Module:
    """Load the pool's base, with whole numbers as in the experts' files."""
    return counting_in(torch.int64, load_pool_model(inputs.modelpool, BASE_MODEL))


def load_means(
    model: nn.Module, experts: Mapping[str, nn.Module | ExpertSource], scale: float
) -> list[ExpertModel]:
    """Set every floating-point tensor of a model, the base, to the experts' mean.

    A parameter's step from the base is scaled. Buffers, such as running variances, become means.
    Returns the experts as sources of the model's tensors.
    """
    tensors = model.state_dict(keep_vars=True)
    weights = [ExpertModel(task, source_of(expert), model) for task, expert in experts.items()]
    for tensor, name in {id(t): (t.data, name) for name, t in tensors.items()}.values():
        if tensor.is_floating_point():
            wide = torch.promote_types(tensor.dtype, torch.float32)
            mean = sum(e.tensor(name).to(wide) for e in weights) / len(weights)
            is_scaled = scale != 1 and isinstance(tensors[name], nn.Parameter)
            tensor.copy_(tensor + scale * (mean - tensor) if is_scaled else mean)
    return weights


class ExpertStreams(Streams):
    """Streams that sum over the inputs of each expert's modules.

    With the rule's `features=merged` an expert's block runs on the output of the preceding merged
    blocks, else on the expert's features.
    """

    @property
    def behind_merged(self) -> bool:
        """Return True if experts run on the output of the merged blocks."""
        rule: Any = self.rule
        return rule.features == "merged"

    @property
    def runs_experts(self) -> bool:
        """Return True, because the inputs of experts are summed."""
        return True

    def tensors_of(self, block: str) -> list[str]:
        """Return the names of an expert's tensors for running its block."""
        if self.behind_merged:
            return names_under(self.model.state_dict(), [block])
        return super().tensors_of(block)

    def follow(
        self, task: str, batch: Batch, block: str, expert: nn.Module, groups: Iterable[Group]
    ) -> None:
        """Run a batch through the expert's block and note the inputs of its modules."""
        names = [group.name for group in groups]
        if self.behind_merged:
            tensors = expert.get_submodule(block).state_dict(prefix=f"{block}.")
            step = BlockStep(self, self.model, block)
            run = partial(step.run_with, tensors, batch.cal)
            batch.noted = record(self.model, names, run).inputs
        else:
            run = partial(self.step, expert, block, batch.exp)
            recorded = record(expert, names, run)
            batch.noted, batch.exp = recorded.inputs, recorded.result

    def inputs_of(
        self, task: str, batch: Batch, block: str, groups: Sequence[Group], *, watched: bool = False
    ) -> dict[str, Tensor]:
        """Return the inputs of the expert's modules."""
        return {group.name: batch.noted.pop(group.name) for group in groups}

    def advance(self, block: str) -> None:
        """Run batches through a merged block."""
        if self.behind_merged:
            return super().advance(block)
        # Its features only serve to group modules, for which one batch is enough.
        first = next(iter(self.tasks.values()))[0]
        with self.storage.loaded(first):
            first.cal = self.step(self.model, block, first.cal)


class BlockStep(nn.Module):
    """One block of a model as a module. Its parameters can be replaced in a call."""

    def __init__(self, streams: Streams, model: nn.Module, block: str) -> None:
        super().__init__()
        self.model = model
        self._step = lambda call: streams.step(model, block, call).hidden

    def forward(self, call: Any) -> Tensor:
        """Run the block and return its hidden output."""
        return self._step(call)

    def run_with(self, tensors: Mapping[str, Tensor], call: Any) -> Tensor:
        """Return the block's hidden output with other tensors, by their names in the model."""
        stored = self.model.state_dict()
        replaced = {f"model.{name}": t.to(stored[name].dtype) for name, t in tensors.items()}
        return functional_call(self, replaced, (call,))
