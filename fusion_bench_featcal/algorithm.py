"""FeatCal as a FusionBench method: where pools, task pools and mergers meet the loop."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
from fusion_bench import BaseAlgorithm, BaseModelPool
from fusion_bench.mixins import LightningFabricMixin
from torch import nn

from fusion_bench_featcal.calibration import CalibrationResult
from fusion_bench_featcal.calibration_data import calibration_batches, image_counts
from fusion_bench_featcal.checkpoints import check_checkpoints
from fusion_bench_featcal.data.image_cache import ImageCache
from fusion_bench_featcal.engine.processes import OneProcess, Processes
from fusion_bench_featcal.experts.merging import UpstreamMerge
from fusion_bench_featcal.families import check_family
from fusion_bench_featcal.fusionbench.ending import ending_cleanly
from fusion_bench_featcal.fusionbench.fusing import (
    check_merger_budget,
    checked_fusing,
    start_upstream,
)
from fusion_bench_featcal.fusionbench.model_card import CardFacts
from fusion_bench_featcal.fusionbench.options import (
    MERGED,
    Choices,
    check_merger,
    checked_choices,
    checked_settings,
    plain,
    take_fusion_bench_keys,
)
from fusion_bench_featcal.fusionbench.pool_calibration import calibrate_pool
from fusion_bench_featcal.fusionbench.pool_checks import check_experts, check_pool_models
from fusion_bench_featcal.fusionbench.pool_configs import check_pool_settings
from fusion_bench_featcal.fusionbench.pool_models import BASE_MODEL
from fusion_bench_featcal.fusionbench.processors import load_input_processor
from fusion_bench_featcal.fusionbench.program import check_upstream, prepare_run
from fusion_bench_featcal.fusionbench.program_processes import (
    announcing,
    join_processes,
    share_model,
)
from fusion_bench_featcal.fusionbench.reads import (
    BY_ITSELF,
    EARLIER,
    FUSED,
    add_upstream,
    budget_beside_merger,
    check_read_budgets,
)
from fusion_bench_featcal.fusionbench.run_results import (
    RunResults,
    log_reports,
    method_name,
    suite_name,
)
from fusion_bench_featcal.fusionbench.saving import RowSaver, skip_saving
from fusion_bench_featcal.results import (
    FEATCAL,
    UNAVAILABLE,
    Cost,
    prepare_directory,
)
from fusion_bench_featcal.settings import (
    SETTINGS_OF_THE_RUN,
    CalibrationError,
    FeatCalSettings,
)

log = logging.getLogger(__name__)

_PRESET = f"{FEATCAL}:"


class FeatCalAlgorithm(LightningFabricMixin, BaseAlgorithm):
    """Merges with any FusionBench method, calibrates, and evaluates what is asked for beside it.

    Run by `fusion_bench method=featcal modelpool=...`; in Python, `run(modelpool)` returns the
    calibrated model. Every key but the five named below is a `FeatCalSettings` field.
    """

    _config_mapping = BaseAlgorithm._config_mapping | {
        name: name
        for name in (
            *FeatCalSettings.names(),
            "base_method",
            "presets",
            "compare_with",
            "fuse_merge",
            "save",
        )
    }

    def __init__(
        self,
        *,
        base_method: Any = None,
        presets: Mapping[str, Mapping[str, Any]] | None = None,
        compare_with: Sequence[str] | None = None,
        fuse_merge: bool | str = "auto",
        save: str = FEATCAL,
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
            save: The row that is saved and returned: `featcal`, `featcal:<preset>` or `merged`.
            **settings: Fields of `FeatCalSettings`.

        Raises:
            ValueError: If a key is unknown or a value out of range.
        """
        meta = take_fusion_bench_keys(settings)
        self.settings = checked_settings(settings)
        check_family(self.settings.family)
        check_merger(base_method)
        self.base_method = base_method
        self.presets = plain(presets)
        self.compare_with = plain(compare_with)
        self.fuse_merge = checked_fusing(fuse_merge)
        self.save = save
        # A preset's name may be one that the model pool brings.
        row = save if self.presets is not None or not str(save).startswith(_PRESET) else FEATCAL
        checked_choices(self.settings, self.presets, self.compare_with, {}, row)
        for name, value in self.settings.as_dict().items():
            setattr(self, name, value)
        self._processes: Processes = OneProcess()
        self._saver: RowSaver | None = None
        super().__init__(**meta)

    def on_run_start(self) -> None:
        """Take the suite's own task pool where none was named; check the log directory."""
        program = self._program
        self._processes = join_processes(self)
        if program is None or self._processes.rank > 0:
            return
        with announcing(self._processes):
            prepare_run(program, self.log_dir)

    def run(self, modelpool: BaseModelPool) -> nn.Module:  # type: ignore[override]
        """Merge, calibrate, evaluate and report.

        Args:
            modelpool: The pool with the base (`_pretrained_`), the experts, their calibration data
                and, without `base_method`, the `_merged_` model.

        Returns:
            The model of the row `save`: the calibrated one, made with the method's own settings.

        Raises:
            CalibrationError: If the run cannot go on; nothing half-written is left behind.
        """
        if self._processes.size == 1:  # it was not started by a program
            self._processes = join_processes(self)
        self._saver = None
        with (
            ending_cleanly(self._program, self._how_to_go_on),
            announcing(self._processes),
        ):
            return self._run(modelpool, first=self._processes.rank == 0)

    def _run(self, modelpool: BaseModelPool, *, first: bool) -> nn.Module:
        """Run in one of several processes; all but the first only help to calibrate."""
        choices, runs = self._chosen()
        self._check(modelpool, [*runs.values()])
        processor = load_input_processor(modelpool)
        # Data sets are opened before a merger that may take hours.
        shared = self.settings.pixel_cache_mb if choices.presets else 0
        images = ImageCache(shared, self.settings.cache_dir)
        device, tasks = self.fabric.device, modelpool.model_names
        batches = {
            name: calibration_batches(
                modelpool, tasks, settings, processor, device=device, images=images
            )
            for name, settings in runs.items()
        }
        results = self._start_results(modelpool)
        saver = RowSaver(self._program if first else None, modelpool, processor, choices.save)
        self._saver = saver
        merged, merging = self._merge(modelpool, results, first=first)
        upstream = CardFacts(MERGED, self.base_method)
        if merging is None:
            saver.offer(merged, upstream)
        for name, settings in runs.items():
            result, cost = self._calibrate(name, settings, modelpool, merged, batches, merging)
            if merging is not None:
                saver.offer(merged, upstream)
                merging = None  # the merged model is complete: presets are calibrated on it
            saver.offer(result.model, self._facts(name, settings, result))
            results.add_calibrated(name, result, settings, cost, tasks)
            del result  # one model less in memory
        images.close()
        self._processes.doing = "evaluations of references and the report"
        if first:
            if MERGED in (*choices.compare_with, choices.save):
                results.add_reference(results.upstream, merged, plain(self.base_method))
            del merged
            results.add_base_and_experts(modelpool, choices.compare_with)
            results.finish(self._program, saver.model, choices.save, saver.folder)
            saver.finish(results.report)
            log_reports(self.fabric, [results.report])
        self._processes.gather(None)  # none ends well while the first one still fails
        skip_saving(self._program, saver.model)
        return saver.model

    def _chosen(self) -> tuple[Choices, dict[str, FeatCalSettings]]:
        """Return the choices of method and model pool, and the settings of each calibrated row."""
        suite = plain(getattr(self._program, "_modelpool", {}).get("featcal")) or {}
        choices = checked_choices(self.settings, self.presets, self.compare_with, suite, self.save)
        presets = {f"{_PRESET}{name}": value for name, value in choices.presets.items()}
        return choices, {FEATCAL: self.settings, **presets}

    def _check(self, modelpool: BaseModelPool, runs: Sequence[FeatCalSettings]) -> None:
        """Refuse what cannot work before anything is loaded or merged."""
        for settings in runs:
            check_checkpoints(settings, self._processes)
            if settings.activations_dir is not None:
                prepare_directory(settings.activations_dir, "method.activations_dir")
        check_upstream(self.base_method, modelpool)
        if not modelpool.has_pretrained and any(settings.anchor_rho != 1 for settings in runs):
            raise CalibrationError(
                f"the pool has no base model (modelpool.models.{BASE_MODEL}), which anchors need: "
                "name it, or set method.anchor_rho to 1"
            )
        check_pool_models(modelpool, self.fabric)
        for settings in runs:
            check_pool_settings(modelpool, settings)
        check_read_budgets(modelpool, runs)
        check_merger_budget(
            self.base_method, modelpool, self.settings, self.fuse_merge, self._processes.size
        )

    def _start_results(self, modelpool: BaseModelPool) -> RunResults:
        return RunResults(
            getattr(self._program, "taskpool", None),
            self.log_dir,
            suite=suite_name(modelpool),
            upstream=MERGED if self.base_method is None else method_name(self.base_method),
            device=self.fabric.device,
            linear_kernel=self.settings.linear_kernel,
        )

    def _merge(
        self, modelpool: BaseModelPool, results: RunResults, *, first: bool
    ) -> tuple[nn.Module, UpstreamMerge | None]:
        """Return the merged model; or the one that is to become it, and the merger."""
        merged = merging = None
        self._processes.doing = "the upstream merger (method.base_method)"
        if first:
            results.add_notes(check_experts(modelpool))
            merged, merging = start_upstream(
                self._program,
                self.base_method,
                modelpool,
                self.settings,
                fuse=self.fuse_merge,
                processes=self._processes.size,
            )
        merged = share_model(merged, self._processes, self.fabric.device, "method.base_method")
        return merged, merging

    def _calibrate(
        self,
        name: str,
        settings: FeatCalSettings,
        modelpool: BaseModelPool,
        merged: nn.Module,
        batches: Mapping[str, Mapping[str, Iterable[Any]]],
        merging: UpstreamMerge | None,
    ) -> tuple[CalibrationResult, Cost]:
        """Calibrate one row, and add to its reads those of the upstream merger."""
        log.info("calibrating %s: %s", name, settings.described())
        limited, how = settings, EARLIER
        if name == FEATCAL:  # the upstream merger's reads count among those of the first row
            how = BY_ITSELF if merging is None else FUSED
            budget = budget_beside_merger(
                modelpool, self.base_method, settings, fused=merging is not None
            )
            limited = settings.replace(expert_read_budget=budget)
        result, cost = calibrate_pool(
            modelpool,
            merged,
            batches[name],
            limited,
            fabric=self.fabric,
            merging=merging,
            merges=name == FEATCAL and self.base_method is not None,
            processes=self._processes,
        )
        cost.more |= image_counts(batches[name])
        result.reads["budget"] = settings.expert_read_budget
        add_upstream(result.reads, modelpool, self.base_method, how)
        totals = result.reads["totals"]
        read, planned = totals["all_experts_read"], totals["experts_planned"]
        cost.more["expert_bytes"] = UNAVAILABLE if read is None else read
        if planned is not None:
            cost.more["expert_bytes_planned"] = planned
        log.info("calibrated %s in %.1f s", name, cost.seconds)
        return result, cost

    def _facts(self, name: str, settings: FeatCalSettings, result: CalibrationResult) -> CardFacts:
        samples = {task["task"]: task["samples"] for task in result.log.of_kind("task")}
        values = settings.as_dict()
        own = {key: values[key] for key in values if key not in SETTINGS_OF_THE_RUN}
        return CardFacts(name, self.base_method, own, samples)

    def _how_to_go_on(self) -> str:
        """Return what a run that is stopped says last."""
        saved = self._saver is not None and self._saver.folder
        done = f"the model of row {self.save} is saved in {saved}; " if saved else ""
        folder = self.settings.checkpoint_dir
        if folder is None:
            return (
                f"ended before it was done: {done}no blocks are kept. Set method.checkpoint_dir to "
                "be able to go on after an interruption"
            )
        return (
            f"ended before it was done: {done}finished blocks are in {folder}. To go on, repeat "
            "the command with method.resume=true"
        )
