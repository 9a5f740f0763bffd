"""RegMean, RegMean++, LOT Merging and FeatCal's anchor alone, as FusionBench methods."""

from typing import Any

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
from fusion_bench import BaseAlgorithm, BaseModelPool
from fusion_bench.mixins import LightningFabricMixin
from torch import nn

from fusion_bench_featcal.baselines.anchor_only import anchor_only
from fusion_bench_featcal.baselines.blockwise import Rule
from fusion_bench_featcal.baselines.lot import lot
from fusion_bench_featcal.baselines.pool_merging import (
    ANCHOR_SETTINGS,
    MERGER_SETTINGS,
    check_base,
    merge_pool,
    take_settings,
)
from fusion_bench_featcal.baselines.regmean import regmean
from fusion_bench_featcal.baselines.regmean_plusplus import regmean_plusplus
from fusion_bench_featcal.boundary.options import check_merger
from fusion_bench_featcal.boundary.pool_models import (
    BASE_MODEL,
    MERGED_MODEL,
    check_pool_models,
    load_pool_model,
    pool_source,
)
from fusion_bench_featcal.boundary.program import run_merger, take_default_taskpool
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings

_REGMEAN_KEYS = {name: name for name in (*MERGER_SETTINGS, "off_diagonal", "task_weights")}


class RegMeanAlgorithm(LightningFabricMixin, BaseAlgorithm):
    """RegMean on FeatCal's samples, for any model family.

    Keys: `off_diagonal` and `task_weights`, as `regmean` takes them, and `MERGER_SETTINGS`.
    """

    settings: FeatCalSettings
    _config_mapping = BaseAlgorithm._config_mapping | _REGMEAN_KEYS

    def __init__(
        self, *, off_diagonal: float = 0.95, task_weights: Any = "equal", **keys: Any
    ) -> None:
        """Check the settings.

        Raises:
            ValueError: If a key is unknown or a value out of range.
        """
        Rule(stream="expert", anchor="mean", off_diagonal=off_diagonal, task_weights=task_weights)
        self.off_diagonal, self.task_weights = off_diagonal, task_weights
        super().__init__(**take_settings(self, keys, MERGER_SETTINGS))

    def on_run_start(self) -> None:
        """Take the suite's own task pool where none was named."""
        if self._program is not None:
            take_default_taskpool(self._program)

    def run(self, modelpool: BaseModelPool) -> nn.Module:  # type: ignore[override]
        """Merge the pool's experts; see `merge_pool`."""
        options = {"off_diagonal": self.off_diagonal, "task_weights": self.task_weights}
        return merge_pool(regmean, modelpool, self.settings, self.fabric, **options)


class RegMeanPlusPlusAlgorithm(LightningFabricMixin, BaseAlgorithm):
    """RegMean++ on FeatCal's samples, for any model family.

    Keys: `off_diagonal` and `task_weights`, as `regmean_plusplus` takes them, and
    `MERGER_SETTINGS`.
    """

    settings: FeatCalSettings
    _config_mapping = BaseAlgorithm._config_mapping | _REGMEAN_KEYS

    def __init__(
        self, *, off_diagonal: float = 0.95, task_weights: Any = "equal", **keys: Any
    ) -> None:
        """Check the settings.

        Raises:
            ValueError: If a key is unknown or a value out of range.
        """
        Rule(stream="merged", anchor="mean", off_diagonal=off_diagonal, task_weights=task_weights)
        self.off_diagonal, self.task_weights = off_diagonal, task_weights
        super().__init__(**take_settings(self, keys, MERGER_SETTINGS))

    def on_run_start(self) -> None:
        """Take the suite's own task pool where none was named."""
        if self._program is not None:
            take_default_taskpool(self._program)

    def run(self, modelpool: BaseModelPool) -> nn.Module:  # type: ignore[override]
        """Merge the pool's experts; see `merge_pool`."""
        options = {"off_diagonal": self.off_diagonal, "task_weights": self.task_weights}
        return merge_pool(regmean_plusplus, modelpool, self.settings, self.fabric, **options)


class LotAlgorithm(LightningFabricMixin, BaseAlgorithm):
    """LOT Merging on FeatCal's samples, for any model family. Keys: `MERGER_SETTINGS`."""

    settings: FeatCalSettings
    _config_mapping = BaseAlgorithm._config_mapping | {name: name for name in MERGER_SETTINGS}

    def __init__(self, **keys: Any) -> None:
        """Check the settings.

        Raises:
            ValueError: If a key is unknown or a value out of range.
        """
        super().__init__(**take_settings(self, keys, MERGER_SETTINGS))

    def on_run_start(self) -> None:
        """Take the suite's own task pool where none was named."""
        if self._program is not None:
            take_default_taskpool(self._program)

    def run(self, modelpool: BaseModelPool) -> nn.Module:  # type: ignore[override]
        """Merge the pool's experts; see `merge_pool`."""
        return merge_pool(lot, modelpool, self.settings, self.fabric)


class AnchorOnlyAlgorithm(LightningFabricMixin, BaseAlgorithm):
    """FeatCal's anchor alone, over any upstream merger.

    Keys: `base_method` (config of the upstream merger; None takes the pool's `_merged_`) and
    `ANCHOR_SETTINGS`.
    """

    settings: FeatCalSettings
    base_method: Any
    _config_mapping = BaseAlgorithm._config_mapping | {
        name: name for name in (*ANCHOR_SETTINGS, "base_method")
    }

    def __init__(self, *, base_method: Any = None, **keys: Any) -> None:
        """Check the settings.

        Raises:
            ValueError: If a key is unknown or a value out of range.
        """
        check_merger(base_method)
        self.base_method = base_method
        super().__init__(**take_settings(self, keys, ANCHOR_SETTINGS))

    def on_run_start(self) -> None:
        """Take the suite's own task pool where none was named."""
        if self._program is not None:
            take_default_taskpool(self._program)

    def run(self, modelpool: BaseModelPool) -> nn.Module:  # type: ignore[override]
        """Merge, then move to the anchor.

        Args:
            modelpool: The pool with the base and what the upstream merger needs.

        Returns:
            The model.

        Raises:
            CalibrationError: If base or merged model are missing or do not fit.
        """
        if self.base_method is None and not modelpool.has_merged:
            raise CalibrationError(
                "method.base_method is null, but the pool has no merged model: name one as "
                f"modelpool.models.{MERGED_MODEL}, or choose a merger "
                "(method@method.base_method=task_arithmetic)"
            )
        check_base(modelpool)
        check_pool_models(modelpool)
        if self.base_method is None:
            merged = load_pool_model(modelpool, MERGED_MODEL)
        else:
            merged = run_merger(self._program, self.base_method, modelpool, "method.base_method")
        base = pool_source(modelpool, BASE_MODEL, stream_experts="auto")
        return anchor_only(merged, base, self.settings)
