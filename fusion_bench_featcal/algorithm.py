"""FeatCal as a FusionBench method: where pools, task pools and mergers meet the loop."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
from fusion_bench import BaseAlgorithm, BaseModelPool
from fusion_bench.mixins import LightningFabricMixin
from torch import nn

from fusion_bench_featcal.boundary.evaluation import Evaluation
from fusion_bench_featcal.boundary.fusing import checked_fusing, start_upstream
from fusion_bench_featcal.boundary.loggers import log_reports
from fusion_bench_featcal.boundary.options import (
    FUSION_BENCH_KEYS,
    MERGED,
    check_merger,
    checked_choices,
    checked_settings,
    plain,
)
from fusion_bench_featcal.boundary.plan_run import log_plan, stored_itemsize
from fusion_bench_featcal.boundary.pool_models import (
    BASE_MODEL,
    PoolSources,
    check_pool_experts,
    check_pool_models,
    load_input_processor,
    load_pool_model,
    pool_source,
)
from fusion_bench_featcal.boundary.processes import (
    announcing,
    join_processes,
    share_model,
    share_saving,
)
from fusion_bench_featcal.boundary.program import check_upstream, prepare_run
from fusion_bench_featcal.boundary.reads import (
    BY_ITSELF,
    EARLIER,
    FUSED,
    check_read_budgets,
    upstream_reads,
)
from fusion_bench_featcal.boundary.results import RunResults, method_name, suite_name
from fusion_bench_featcal.boundary.saving import CompleteSaver
from fusion_bench_featcal.calibration import CalibrationResult, calibrate
from fusion_bench_featcal.calibration_data import calibration_batches, image_counts
from fusion_bench_featcal.checkpoints import check_checkpoints
from fusion_bench_featcal.compare import BASE, EXPERTS, FEATCAL, Cost, measure, prepare_directory
from fusion_bench_featcal.engine.merging import UpstreamMerge
from fusion_bench_featcal.engine.processes import OneProcess, Processes
from fusion_bench_featcal.families import check_family
from fusion_bench_featcal.image_cache import ImageCache
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings

log = logging.getLogger(__name__)


class FeatCalAlgorithm(LightningFabricMixin, BaseAlgorithm):
    """Merges with any FusionBench method, calibrates, and evaluates what is asked for beside it.

    Run by `fusion_bench method=featcal modelpool=...`; in Python, `run(modelpool)` returns the
    calibrated model. Every key but the four named below is a `FeatCalSettings` field.
    """

    _config_mapping = BaseAlgorithm._config_mapping | {
        name: name
        for name in (
            *FeatCalSettings.names(),
            "base_method",
            "presets",
            "compare_with",
            "fuse_merge",
        )
    }

    def __init__(
        self,
        *,
        base_method: Any = None,
        presets: Mapping[str, Mapping[str, Any]] | None = None,
        compare_with: Sequence[str] | None = None,
        fuse_merge: bool | str = "auto",
        **settings: Any,
    ) -> None:
        """Check everything that can be checked before a model is loaded.

        Args:
            base_method: Config of the upstream merger; None takes the pool's `_merged_` model.
            presets: Name -> settings that differ, calibrated on the same merged model; None: what
                the model pool brings, else none.
            compare_with: References to evaluate: `base`, `experts`, `merged`; None: what the model
                pool brings, else `merged`.
            fuse_merge: `auto`: FusionBench's simple average and task arithmetic, where base and
                experts lie in files, share the calibration's reads; False: mergers run by
                themselves.
            **settings: Fields of `FeatCalSettings`.

        Raises:
            ValueError: If a key is unknown or a value out of range.
        """
        meta = {key: settings.pop(key) for key in FUSION_BENCH_KEYS if key in settings}
        self.settings = checked_settings(settings)
        check_family(self.settings.family)
        check_merger(base_method)
        self.base_method = base_method
        self.presets = plain(presets)
        self.compare_with = plain(compare_with)
        self.fuse_merge = checked_fusing(fuse_merge)
        self._how = BY_ITSELF
        checked_choices(self.settings, self.presets, self.compare_with, {})
        for name, value in self.settings.as_dict().items():
            setattr(self, name, value)
        self._processes: Processes = OneProcess()
        super().__init__(**meta)

    def on_run_start(self) -> None:
        """Take the suite's own task pool where none was named; check the log directory."""
        program = self._program
        self._processes = join_processes(self)
        if program is None or self._processes.rank > 0:
            return
        with announcing(self._processes):
            prepare_run(program, self.log_dir)
            if program.merged_model_save_path is not None:
                path = Path(program.merged_model_save_path.replace("{log_dir}", str(self.log_dir)))
                prepare_directory(path.parent, "merged_model_save_path")

    def run(self, modelpool: BaseModelPool) -> nn.Module:  # type: ignore[override]
        """Merge, calibrate, evaluate and report.

        Args:
            modelpool: The pool with the base (`_pretrained_`), the experts, their calibration data
                and, without `base_method`, the `_merged_` model.

        Returns:
            The calibrated model, made with the method's own settings.

        Raises:
            CalibrationError: If the run cannot go on; nothing half-written is left behind.
        """
        if self._processes.size == 1:  # it was not started by a program
            self._processes = join_processes(self)
        with announcing(self._processes):
            return self._run(modelpool, first=self._processes.rank == 0)

    def _run(self, modelpool: BaseModelPool, *, first: bool) -> nn.Module:
        """Run in one of several processes; all but the first only help to calibrate."""
        suite = plain(getattr(self._program, "_modelpool", {}).get("featcal")) or {}
        choices = checked_choices(self.settings, self.presets, self.compare_with, suite)
        presets = {f"{FEATCAL}:{name}": value for name, value in choices.presets.items()}
        for settings in (self.settings, *presets.values()):
            check_checkpoints(settings, self._processes)
        self._check_pool(modelpool, [self.settings, *presets.values()])
        processor = load_input_processor(modelpool)
        # Data sets are opened before a merger that may take hours.
        shared = self.settings.pixel_cache_mb if presets else 0
        images = ImageCache(shared, self.settings.cache_dir)
        batches = {
            name: calibration_batches(
                modelpool,
                modelpool.model_names,
                settings,
                processor,
                device=self.fabric.device,
                images=images,
            )
            for name, settings in {FEATCAL: self.settings, **presets}.items()
        }
        results = self._start_results(modelpool)
        merged = merging = None
        if first:
            self._add_base_and_experts(results, modelpool, choices.compare_with)
            merged, merging = start_upstream(
                self._program,
                self.base_method,
                modelpool,
                self.settings,
                fuse=self.fuse_merge,
                processes=self._processes.size,
            )
        merged = share_model(merged, self._processes, self.fabric.device, "method.base_method")

        def add_merged() -> None:
            if first and MERGED in choices.compare_with:
                results.add_reference(results.upstream, merged, plain(self.base_method))

        self._how = BY_ITSELF if merging is None else EARLIER
        if merging is None:
            add_merged()
        model, evaluation = self._add_calibrated(
            FEATCAL, self.settings, modelpool, merged, batches[FEATCAL], results,
            fused=merging, merged_is_done=add_merged,
        )  # fmt: skip
        for name, settings in presets.items():
            self._add_calibrated(name, settings, modelpool, merged, batches[name], results)
        images.close()
        share_saving(self._program, self._processes)
        if first:
            results.finish(self._program, model, evaluation)
            log_reports(self.fabric, [results.report])
        modelpool.save_model = CompleteSaver(modelpool, processor)  # type: ignore[method-assign]
        return model

    def _check_pool(self, modelpool: BaseModelPool, runs: Sequence[FeatCalSettings]) -> None:
        """Refuse what cannot work before anything is loaded or merged."""
        check_upstream(self.base_method, modelpool)
        if not modelpool.has_pretrained and any(settings.anchor_rho != 1 for settings in runs):
            raise CalibrationError(
                f"the pool has no base model (modelpool.models.{BASE_MODEL}), which anchors need: "
                "name it, or set method.anchor_rho to 1"
            )
        check_pool_models(modelpool)
        check_read_budgets(modelpool, runs)

    def _start_results(self, modelpool: BaseModelPool) -> RunResults:
        return RunResults(
            getattr(self._program, "taskpool", None),
            self.log_dir,
            suite=suite_name(modelpool),
            upstream=MERGED if self.base_method is None else method_name(self.base_method),
            device=self.fabric.device,
        )

    def _add_base_and_experts(
        self, results: RunResults, modelpool: BaseModelPool, references: Sequence[str]
    ) -> None:
        """Check the experts against the base; evaluate them where asked, one at a time."""
        if modelpool.has_pretrained:
            base = load_pool_model(modelpool, BASE_MODEL)
            check_pool_experts(modelpool, base)
            if BASE in references:
                results.add_reference(BASE, base)
            del base
        if EXPERTS in references:
            results.add_experts(modelpool)

    def _add_calibrated(
        self,
        name: str,
        settings: FeatCalSettings,
        modelpool: BaseModelPool,
        merged: nn.Module,
        batches: Mapping[str, Iterable[Any]],
        results: RunResults,
        fused: UpstreamMerge | None = None,
        merged_is_done: Callable[[], None] | None = None,
    ) -> tuple[nn.Module, Evaluation | None]:
        """Calibrate, measure and report one row; a fused merger is done in between."""
        result, cost = self._calibrate(settings, modelpool, merged, batches, fused)
        if fused is not None and merged_is_done is not None:
            merged_is_done()
        evaluation = results.add_calibrated(name, result, settings, cost, modelpool.model_names)
        return result.model, evaluation

    def _calibrate(
        self,
        settings: FeatCalSettings,
        modelpool: BaseModelPool,
        merged: nn.Module,
        batches: Mapping[str, Iterable[Any]],
        fused: UpstreamMerge | None = None,
    ) -> tuple[CalibrationResult, Cost]:
        """Calibrate the merged model with some settings, and measure it."""
        log.info("calibrating with %s", settings.as_dict())
        tasks, stream = modelpool.model_names, settings.stream_experts
        with measure() as cost:
            base = None
            if modelpool.has_pretrained:
                base = pool_source(modelpool, BASE_MODEL, stream_experts=stream)
            experts = PoolSources(modelpool, tasks, stream_experts=stream)
            base_held = isinstance(base, nn.Module)
            log_plan(
                merged,
                settings,
                len(tasks),
                self.fabric.device,
                held=experts.held(),
                base_held=base_held,
                loaded=1 + base_held,
                itemsize=stored_itemsize(base),
                fused=fused is not None,
                processes=self._processes.size,
                neighbours=self._processes.neighbours,
            )
            exchanged = self._processes.exchanged_bytes
            result = calibrate(
                merged,
                base,
                experts,
                batches,
                settings,
                device=self.fabric.device,
                autocast=self.fabric.autocast,
                merging=fused,
                processes=self._processes,
            )
        cost.more |= image_counts(batches)
        how = self._how if fused is None else FUSED
        result.reads["upstream"] = upstream_reads(modelpool, self.base_method, how)
        cost.more["expert_bytes"] = result.reads["totals"]["experts_read"]
        planned = result.reads["totals"]["experts_planned"]
        if planned is not None:
            cost.more["expert_bytes_planned"] = planned
        if self._processes.size > 1:
            cost.more["processes"] = self._processes.size
            cost.more["exchanged_bytes"] = self._processes.exchanged_bytes - exchanged
        for record in result.log.of_kind("resumed"):
            cost.more["restored_blocks"] = record["blocks"]
        return result, cost
