"""The inputs that methods share: pools, device, base, experts and calibration batches."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fusion_bench import BaseModelPool
from torch import nn

from fusion_bench_featcal.calibration_data import calibration_batches, check_tasks_have_data
from fusion_bench_featcal.experts import ExpertSource
from fusion_bench_featcal.fusionbench.own_data import with_own_data
from fusion_bench_featcal.fusionbench.pool_checks import check_read_budget
from fusion_bench_featcal.fusionbench.pool_configs import check_pool_settings
from fusion_bench_featcal.fusionbench.pool_models import BASE_MODEL, ExpertSources, PoolModels
from fusion_bench_featcal.fusionbench.processors import load_input_processor
from fusion_bench_featcal.rules import rule_of
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings
from fusion_bench_featcal.streams.augmentation import change_of


@dataclass
class MethodInputs:
    """Inputs of methods: the pools, the device, and what several methods share.

    Attributes:
        modelpool: The pool with base, experts and data.
        taskpool: The task pool that evaluates; None: there is none.
        fabric: Lightning Fabric: the device and the precision.
        program: FusionBench's running program, which mergers need; None: there is none.
    """

    modelpool: BaseModelPool
    taskpool: Any
    fabric: Any
    program: Any = None

    @cached_property
    def models(self) -> PoolModels:
        """The pool's models, whose files are looked at once."""
        return PoolModels(self.modelpool)

    @cached_property
    def processor(self) -> Any:
        """The pool's processor or tokenizer, loaded when first asked for.

        Raises:
            CalibrationError: If there is none or it cannot be loaded.
        """
        return load_input_processor(self.modelpool)

    def base(self, settings: FeatCalSettings) -> nn.Module | ExpertSource | None:
        """The base as calibration reads it; None where the pool has none."""
        base = self.models.base
        return None if base is None else base.source(settings.stream_experts)

    def experts(self, settings: FeatCalSettings) -> ExpertSources:
        """Task -> expert as calibration reads it."""
        return ExpertSources(self.models, settings.stream_experts)

    def batches(self, settings: FeatCalSettings) -> dict[str, Any]:
        """Task -> calibration batches that the settings draw; nothing is read yet.

        Raises:
            CalibrationError: If a task lacks data.
        """
        pool = with_own_data(self.modelpool, settings)
        # Before a tokenizer or processor is looked for, which may have to be downloaded.
        check_tasks_have_data(pool, pool.model_names, settings.calibration_split)
        return calibration_batches(
            pool, pool.model_names, settings, self.processor, device=self.fabric.device
        )

    def require_base(self, purpose: str, instead: str = "") -> None:
        """Refuse a pool without a base model.

        Args:
            purpose: End of `which ...` in the message, such as `anchors need`.
            instead: Alternative to naming one, for the message.

        Raises:
            CalibrationError: If there is none, naming the setting.
        """
        if self.models.base is None:
            raise CalibrationError(
                f"the pool has no base model (modelpool.models.{BASE_MODEL}), which {purpose}: "
                f"name it{instead}"
            )


def check_calibration(settings: FeatCalSettings, inputs: MethodInputs) -> dict[str, Any]:
    """Refuse a calibration that cannot work, before a model is loaded.

    Returns:
        Task -> calibration batches, of opened datasets.

    Raises:
        CalibrationError: If data or base are missing, a model does not fit or a read budget
            cannot be kept.
        ValueError: If the family does not know the models.
    """
    if settings.needs_base:
        inputs.require_base("anchors need", ", or set method.anchor_rho to 1")
    change_of(settings.augment)
    rule_of(settings)
    check_pool_settings(inputs.models, settings)
    check_read_budget(inputs.models, settings)
    return inputs.batches(settings)
