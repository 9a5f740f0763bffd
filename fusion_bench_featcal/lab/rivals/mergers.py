"""RegMean, RegMean++ and LOT Merging on the experts and samples of a model pool."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from fusion_bench_featcal.calibration_data import samples_used
from fusion_bench_featcal.fusionbench.pool_configs import check_pool_settings
from fusion_bench_featcal.fusionbench.pool_models import BASE_MODEL, load_pool_model
from fusion_bench_featcal.lab.rivals.blockwise import merge_blockwise
from fusion_bench_featcal.lab.rivals.prodistill import ProDistilling, merge_by_training
from fusion_bench_featcal.lab.rivals.registry import ModelSettings, SampleSettings, method
from fusion_bench_featcal.method_inputs import MethodInputs
from fusion_bench_featcal.rules import lot, regmean
from fusion_bench_featcal.setting_fields import same_as, shared_part
from fusion_bench_featcal.settings import FeatCalSettings


@dataclass(frozen=True, kw_only=True, eq=False)
class Merger(ModelSettings, SampleSettings):
    """A merger that starts from the pool's experts, on FeatCal's samples, for any model family.

    A subclass declares the settings of `rule` that it takes as `same_as` them.
    """

    rule: ClassVar[type]
    fixed: ClassVar[Mapping[str, Any]] = {}  # settings of the rule that are not the method's
    merge_models: ClassVar[Any] = staticmethod(merge_blockwise)

    modules: Sequence[str] | None = same_as(
        FeatCalSettings,
        "modules",
        help="Patterns of the modules to solve: a name or its end, `*` for anything, `!` in front "
        "to exclude. Null: all that the method solves.",
        group="models",
    )
    stream_experts: bool | str = same_as(FeatCalSettings, "stream_experts")

    def check(self, inputs: MethodInputs) -> None:
        """Refuse a pool without a base, and models that the settings do not fit.

        Raises:
            CalibrationError: If there is no base, or a model is of another kind than the others.
        """
        inputs.require_base("is needed for its structure")
        check_pool_settings(inputs.models, self.calibration_settings)

    def merge(self, inputs: MethodInputs) -> nn.Module:
        """Merge the pool's experts.

        Raises:
            CalibrationError: If models or data are missing, or the merging cannot go on.
        """
        batches = inputs.batches(self.calibration_settings)
        return self.merge_models(
            load_pool_model(inputs.modelpool, BASE_MODEL),
            inputs.experts(self.calibration_settings),
            batches,
            self.calibration_settings,
            shared_part(self, self.rule, **self.fixed),
            device=inputs.fabric.device,
            autocast=inputs.fabric.autocast,
        )

    def samples(self, inputs: MethodInputs, tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Task -> {"samples": number, "split": name} of the data that merging uses."""
        number, split = self.samples_per_task, self.calibration_split
        return samples_used(inputs.modelpool, tasks, number, split)


@method("featcal_baselines/regmean", source="Jin et al., ICLR 2023")
class RegMean(Merger):
    """RegMean: linear weights by regression on the experts' own features.

    All other parameters are the experts' mean. Same solution as regmean/clip_regmean, for any model
    family.
    """

    rule = regmean.RegMean
    off_diagonal: float = same_as(regmean.RegMean, "off_diagonal")
    task_weights: str = same_as(regmean.RegMean, "task_weights")


@method("featcal_baselines/regmean_plusplus", source="Nguyen et al., TMLR 2026")
class RegMeanPlusPlus(RegMean):
    """RegMean++: RegMean block by block, on features of the blocks merged so far.

    Parameters after the last block are the experts' mean; regmean_plusplus/* keeps the base's.
    """

    fixed = {"features": "merged"}  # noqa: RUF012 (a ClassVar of the base)


@method("featcal_baselines/lot", source="Sun et al., NeurIPS 2025, arXiv 2505.23859")
class Lot(Merger):
    """LOT Merging: the task vector that fits all experts best, block by block.

    It is found by regression on the experts' own features. Directions without samples keep the
    base's weights.
    """

    rule = lot.Lot
    scale: float = same_as(lot.Lot, "scale")
    cutoff: float = same_as(lot.Lot, "cutoff")
    outside: bool = same_as(lot.Lot, "outside")


@method("featcal_baselines/prodistill", source="Xu et al., ICML 2025, arXiv 2502.12706")
class ProDistill(Merger):
    """ProDistill: coefficients of the experts' task vectors, trained by gradients.

    There is one for each entry of every parameter. They are trained block by block towards the
    experts' features.
    """

    rule = ProDistilling
    merge_models = staticmethod(merge_by_training)
    coefficient: float = same_as(ProDistilling, "coefficient")
    learning_rate: float = same_as(ProDistilling, "learning_rate")
    epochs: int = same_as(ProDistilling, "epochs")
    batches_per_step: int = same_as(ProDistilling, "batches_per_step")
    modules: Sequence[str] | None = same_as(
        FeatCalSettings,
        "modules",
        help="Has no effect: all parameters of the blocks are trained.",
        group="models",
    )
