"""RegMean, RegMean++, LOT Merging and FeatCal's anchor alone, as FusionBench methods."""

from collections.abc import Callable, Mapping
from typing import Any

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
from fusion_bench import BaseAlgorithm, BaseModelPool
from fusion_bench.mixins import LightningFabricMixin
from torch import nn

from fusion_bench_featcal.baselines.anchor_only import anchor_only
from fusion_bench_featcal.baselines.blockwise import LeastSquares
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
from fusion_bench_featcal.calibration_data import samples_used
from fusion_bench_featcal.fusionbench.ending import ends_cleanly
from fusion_bench_featcal.fusionbench.options import check_merger, plain
from fusion_bench_featcal.fusionbench.pool_checks import check_pool_models
from fusion_bench_featcal.fusionbench.pool_models import BASE_MODEL, pool_source
from fusion_bench_featcal.fusionbench.program import check_upstream, prepare_run
from fusion_bench_featcal.fusionbench.standalone import Row, run_merging, run_post_merging
from fusion_bench_featcal.settings import FeatCalSettings

_REGMEAN_KEYS = {name: name for name in (*MERGER_SETTINGS, "off_diagonal", "task_weights")}

_REGRESSION = ("off_diagonal", "task_weights")


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
        LeastSquares(
            stream="expert", anchor="mean", off_diagonal=off_diagonal, task_weights=task_weights
        )
        self.off_diagonal, self.task_weights = off_diagonal, task_weights
        super().__init__(**take_settings(self, keys, MERGER_SETTINGS, _REGRESSION))

    def on_run_start(self) -> None:
        """Take the suite's own task pool where none was named; check the log directory."""
        prepare_run(self._program, self.log_dir)

    def run(self, modelpool: BaseModelPool) -> nn.Module:  # type: ignore[override]
        """Merge the pool's experts; see `merge_pool`."""
        options = {"off_diagonal": self.off_diagonal, "task_weights": self.task_weights}
        return _merge(self, "regmean", regmean, modelpool, options)


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
        LeastSquares(
            stream="merged", anchor="mean", off_diagonal=off_diagonal, task_weights=task_weights
        )
        self.off_diagonal, self.task_weights = off_diagonal, task_weights
        super().__init__(**take_settings(self, keys, MERGER_SETTINGS, _REGRESSION))

    def on_run_start(self) -> None:
        """Take the suite's own task pool where none was named; check the log directory."""
        prepare_run(self._program, self.log_dir)

    def run(self, modelpool: BaseModelPool) -> nn.Module:  # type: ignore[override]
        """Merge the pool's experts; see `merge_pool`."""
        options = {"off_diagonal": self.off_diagonal, "task_weights": self.task_weights}
        return _merge(self, "regmean_plusplus", regmean_plusplus, modelpool, options)


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
        """Take the suite's own task pool where none was named; check the log directory."""
        prepare_run(self._program, self.log_dir)

    def run(self, modelpool: BaseModelPool) -> nn.Module:  # type: ignore[override]
        """Merge the pool's experts; see `merge_pool`."""
        return _merge(self, "lot", lot, modelpool, {})


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
        super().__init__(**take_settings(self, keys, ANCHOR_SETTINGS, ("base_method",)))

    def on_run_start(self) -> None:
        """Take the suite's own task pool where none was named; check the log directory."""
        prepare_run(self._program, self.log_dir)

    @ends_cleanly
    def run(self, modelpool: BaseModelPool) -> nn.Module:  # type: ignore[override]
        """Merge, then move to the anchor.

        Args:
            modelpool: The pool with the base and what the upstream merger needs.

        Returns:
            The model.

        Raises:
            CalibrationError: If base or merged model are missing or do not fit.
        """
        check_upstream(self.base_method, modelpool)
        check_base(modelpool)
        check_pool_models(modelpool, self.fabric)
        base = pool_source(modelpool, BASE_MODEL, stream_experts="auto")
        settings = {name: getattr(self.settings, name) for name in ANCHOR_SETTINGS}
        row = Row(name="anchor_only", settings=settings, seed=None, samples=lambda model: {})
        return run_post_merging(
            self, modelpool, row, lambda merged: anchor_only(merged, base, self.settings)
        )


@ends_cleanly
def _merge(
    algorithm: Any,
    name: str,
    merge: Callable[..., nn.Module],
    modelpool: BaseModelPool,
    options: Mapping[str, Any],
) -> nn.Module:
    """Merge the pool's experts, and report where the program runs this method itself."""
    settings: FeatCalSettings = algorithm.settings
    drawn = settings.samples_per_task, settings.calibration_split
    row = Row(
        name=name,
        # As `method=compare` notes them for a merger.
        settings=plain(getattr(algorithm._program, "_method", None)) or {},
        seed=settings.seed,
        samples=lambda model: samples_used(modelpool, modelpool.model_names, *drawn),
    )
    return run_merging(
        algorithm,
        modelpool,
        row,
        lambda: merge_pool(merge, modelpool, settings, algorithm.fabric, **options),
    )
