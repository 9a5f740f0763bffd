"""RegMean, RegMean++ and LOT Merging on the experts and samples of a model pool."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar

from torch import nn

from fusion_bench_featcal.calibration_data import samples_used
from fusion_bench_featcal.families import check_family
from fusion_bench_featcal.fusionbench.options import checked_settings
from fusion_bench_featcal.fusionbench.pool_configs import check_pool_settings
from fusion_bench_featcal.fusionbench.pool_models import BASE_MODEL, load_pool_model
from fusion_bench_featcal.methods.blockwise import (
    LOT,
    REGMEAN,
    REGMEAN_PLUSPLUS,
    merge_blockwise,
)
from fusion_bench_featcal.methods.interface import MethodInputs
from fusion_bench_featcal.methods.prodistill import ProDistilling, merge_by_training
from fusion_bench_featcal.settings import FeatCalSettings

MERGER_SETTINGS = (
    "samples_per_task",
    "batch_size",
    "seed",
    "calibration_split",
    "modules",
    "family",
    "ignore_config",
    "stream_experts",
)
"""Fields of `FeatCalSettings` that the mergers have too, with the same meaning."""


class Merger:
    """A merger that starts from the pool's experts, on FeatCal's samples, for any model family.

    Its settings are `MERGER_SETTINGS` and, of its choices, `options`.
    """

    name: ClassVar[str]
    choices: ClassVar[Any]  # a rule
    merge_models: ClassVar[Any] = staticmethod(merge_blockwise)
    options: ClassVar[tuple[str, ...]] = ()
    _config_mapping: ClassVar[dict[str, str]]

    def __init_subclass__(cls) -> None:
        cls._config_mapping = {name: name for name in (*cls.options, *MERGER_SETTINGS)}

    def __init__(self, **keys: Any) -> None:
        """Check the settings.

        Raises:
            ValueError: If one is unknown or out of range.
        """
        chosen = {name: keys.pop(name) for name in self.options if name in keys}
        self._choices = replace(self.choices, **chosen)
        self._settings: FeatCalSettings = checked_settings(
            keys, names=MERGER_SETTINGS, others=self.options, owner=self.name
        )
        check_family(self._settings.family)

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, defaults included."""
        values = self._settings.as_dict() | asdict(self._choices)
        return {name: values[name] for name in self._config_mapping}

    def check(self, inputs: MethodInputs) -> None:
        """Refuse a pool without a base, and models that the settings do not fit.

        Raises:
            CalibrationError: If there is no base, or a model is of another kind than the others.
        """
        inputs.require_base("is needed for its structure")
        check_pool_settings(inputs.models, self._settings)

    def merge(self, inputs: MethodInputs) -> nn.Module:
        """Merge the pool's experts.

        Raises:
            CalibrationError: If models or data are missing, or the merging cannot go on.
        """
        batches = inputs.batches(self._settings)
        return type(self).merge_models(
            load_pool_model(inputs.modelpool, BASE_MODEL),
            inputs.experts(self._settings),
            batches,
            self._settings,
            self._choices,
            device=inputs.fabric.device,
            autocast=inputs.fabric.autocast,
        )

    def samples(self, inputs: MethodInputs, tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Task -> {"samples": number, "split": name} of the data that merging uses."""
        number, split = self._settings.samples_per_task, self._settings.calibration_split
        return samples_used(inputs.modelpool, tasks, number, split)


class RegMean(Merger):
    """RegMean (Jin et al., ICLR 2023)."""

    name = "regmean"
    choices = REGMEAN
    options = ("off_diagonal", "task_weights")


class RegMeanPlusPlus(RegMean):
    """RegMean++ (Nguyen et al., TMLR 2026)."""

    name = "regmean_plusplus"
    choices = REGMEAN_PLUSPLUS


class ProDistill(Merger):
    """ProDistill (Xu et al., ICML 2025): a reference by gradient steps."""

    name = "prodistill"
    choices = ProDistilling()
    merge_models = staticmethod(merge_by_training)
    options = ("coefficient", "learning_rate", "epochs", "batches_per_step")


class Lot(Merger):
    """LOT Merging (Sun et al., NeurIPS 2025)."""

    name = "lot"
    choices = LOT
    options = ("scale", "cutoff", "outside")
