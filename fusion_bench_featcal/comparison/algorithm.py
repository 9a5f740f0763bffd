"""`method=compare`: upstream mergers and post-merging methods side by side on one model pool."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
from fusion_bench import BaseAlgorithm, BaseModelPool
from fusion_bench.mixins import LightningFabricMixin

from fusion_bench_featcal.boundary.loggers import log_reports
from fusion_bench_featcal.boundary.options import FUSION_BENCH_KEYS, checked_settings, plain
from fusion_bench_featcal.boundary.pool_models import (
    BASE_MODEL,
    check_pool_experts,
    check_pool_models,
    load_pool_model,
)
from fusion_bench_featcal.boundary.program import prepare_run
from fusion_bench_featcal.boundary.results import suite_name
from fusion_bench_featcal.compare import Report
from fusion_bench_featcal.compare.side_by_side_report import show_side_by_side
from fusion_bench_featcal.comparison.cells import GridRun
from fusion_bench_featcal.comparison.fingerprint import (
    describe,
    describe_pool,
    describe_software,
)
from fusion_bench_featcal.comparison.grid import Grid, GridChoices, for_pool, make_grid
from fusion_bench_featcal.comparison.methods import CellInputs
from fusion_bench_featcal.comparison.reports import write_reports
from fusion_bench_featcal.comparison.store import ResultStore
from fusion_bench_featcal.image_cache import ImageCache
from fusion_bench_featcal.settings import CalibrationError


class ComparisonAlgorithm(LightningFabricMixin, BaseAlgorithm):
    """Runs a grid of upstream mergers and post-merging methods, and compares what they give.

    Run by `fusion_bench method=compare modelpool=...`. Every cell that is finished is kept in
    `results_dir`, under a fingerprint of all that it depends on; when the command is repeated, only
    what is missing is run.
    """

    _KEYS = (
        *GridChoices.__dataclass_fields__, "seed", "results_dir", "notes", "pixel_cache_mb",
        "cache_dir",
    )  # fmt: skip
    _config_mapping = BaseAlgorithm._config_mapping | {name: name for name in _KEYS}

    def __init__(
        self,
        *,
        seed: int = 42,
        samples_per_task: int = 256,
        calibration_split: str = "train",
        training_steps: int = 1000,
        results_dir: str | None = None,
        pixel_cache_mb: float = 0,
        cache_dir: str | None = None,
        notes: Mapping[str, str] | None = None,
        **choices: Any,
    ) -> None:
        """Keep the choices; they are checked together with the model pool's in `run`.

        Args:
            seed: Seeds every merger and every method.
            samples_per_task: Not used here: YAML hands it to the methods.
            calibration_split: Likewise.
            training_steps: Likewise.
            results_dir: Where finished cells are kept; None: `outputs/comparison/<model pool>`.
            pixel_cache_mb: Memory for processed images that several cells ask for, in MiB; above 0
                the first of them alone pays for the processing.
            cache_dir: Folder that keeps processed images for other runs, too; None: none are kept.
            notes: Name of a merger or method -> what a reader must know about it.
            **choices: Fields of `GridChoices`.

        Raises:
            ValueError: If the seed is no integer >= 0, a value out of range or a key unknown.
        """
        meta = {key: choices.pop(key) for key in FUSION_BENCH_KEYS if key in choices}
        unknown = sorted(set(choices) - set(GridChoices.__dataclass_fields__))
        if unknown:
            known = (*self._KEYS, "samples_per_task", "calibration_split", "training_steps")
            raise ValueError(f"method.{unknown[0]} is unknown; compare takes {', '.join(known)}")
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ValueError(f"method.seed must be an integer >= 0, got {seed!r}")
        self.choices = GridChoices(**choices)
        self.seed = seed
        self.results_dir = results_dir
        kept = checked_settings({"pixel_cache_mb": pixel_cache_mb, "cache_dir": cache_dir})
        self.pixel_cache_mb, self.cache_dir = kept.pixel_cache_mb, kept.cache_dir
        self.notes = dict(plain(notes) or {})
        super().__init__(**meta)

    def on_run_start(self) -> None:
        """Take the suite's own task pool where none was named; check the log directory."""
        prepare_run(self._program, self.log_dir)

    def run(self, modelpool: BaseModelPool) -> None:  # type: ignore[override]
        """Run the grid, report it, and return no model.

        Args:
            modelpool: The pool with base, experts and data.

        Raises:
            ValueError: If the grid is empty or names something unknown; before anything is loaded.
            CalibrationError: If the pools do not fit; or, when all is reported, if cells failed.
        """
        suite_keys = plain(getattr(self._program, "_modelpool", {}).get("featcal")) or {}
        choices, left_out = for_pool(self.choices, suite_keys.get("compare"))
        grid = make_grid(choices, suite_keys.get("presets") or {}, left_out)
        inputs = self._inputs(modelpool)
        self._check(grid, inputs)
        suite = suite_name(modelpool)
        store = ResultStore(self.results_dir or Path("outputs") / "comparison" / suite)
        run = GridRun(
            grid=grid,
            inputs=inputs,
            store=store,
            conditions=self._conditions(inputs),
            seed=self.seed,
            program=self._program,
            log_dir=None if self.log_dir is None else Path(self.log_dir),
        )
        run.run()
        inputs.images.close()
        self._report(suite, run)

    def _inputs(self, modelpool: BaseModelPool) -> CellInputs:
        taskpool = getattr(self._program, "taskpool", None)
        if taskpool is None:
            raise CalibrationError(
                "compare needs a task pool to evaluate on: the model pool brings none "
                "(default_taskpool), so name one, for example "
                "taskpool=CLIPVisionModelTaskPool/clip-vit-classification_TA8"
            )
        if getattr(self._program, "merged_model_save_path", None) is not None:
            raise CalibrationError(
                "compare returns no model to save: leave merged_model_save_path out, and run "
                "the method that you choose by itself"
            )
        if self.fabric.world_size > 1:
            raise CalibrationError("compare runs on one device: set fabric.devices=1")
        images = ImageCache(self.pixel_cache_mb, self.cache_dir)
        return CellInputs(modelpool, taskpool, self.fabric, images)

    def _check(self, grid: Grid, inputs: CellInputs) -> None:
        """Refuse what cannot work before a model is loaded; experts against the base at once."""
        check_pool_models(inputs.modelpool)
        for name, method in grid.cells.items():
            try:
                method.check(inputs)
            except CalibrationError as error:
                raise CalibrationError(f"method.post_merging_methods.{name}: {error}") from error
        if inputs.modelpool.has_pretrained:
            check_pool_experts(inputs.modelpool, load_pool_model(inputs.modelpool, BASE_MODEL))

    def _conditions(self, inputs: CellInputs) -> dict[str, Any]:
        return {
            "modelpool": describe_pool(inputs.modelpool),
            "taskpool": describe(inputs.taskpool.config),
            "software": describe_software(),
            "device": self.fabric.device.type,
            "precision": str(self.fabric.strategy.precision.precision),
        }

    def _report(self, suite: str, run: GridRun) -> None:
        """Write, log and print the reports; then fail if cells failed."""
        folder = run.log_dir or run.store.folder
        comparison = write_reports(
            folder,
            suite,
            run.grid,
            run.results,
            run.failed,
            seed=self.seed,
            notes=self.notes,
            device=self.fabric.device,
        )
        if comparison is not None:
            log_reports(self.fabric, map(Report.load, comparison.combined.runs))
            show_side_by_side(comparison)
            print(f"report.md, report.csv and report.json: {folder}")
        if run.failed:
            cells = "; ".join(
                f"{cell.upstream or 'reference'}, {cell.name}: {cell.reason}" for cell in run.failed
            )
            raise CalibrationError(
                f"{len(run.failed)} of {len(run.grid)} cells failed; the others are finished and "
                f"stay so when the command is repeated. {cells}"
            )
