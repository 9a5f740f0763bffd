"""`method=compare`: upstream mergers and post-merging methods side by side on one model pool."""

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
from fusion_bench import BaseAlgorithm, BaseModelPool
from fusion_bench.mixins import LightningFabricMixin

from fusion_bench_featcal.comparison.cell_process import check_command
from fusion_bench_featcal.comparison.cells import GridRun
from fusion_bench_featcal.comparison.grid import Grid, GridChoices, make_grid
from fusion_bench_featcal.comparison.reports import check_places, write_reports
from fusion_bench_featcal.comparison.store import ResultStore
from fusion_bench_featcal.data.image_cache import ImageCache
from fusion_bench_featcal.ending import ending_cleanly
from fusion_bench_featcal.fusionbench.hydra_job import at_the_end
from fusion_bench_featcal.fusionbench.loggers import log_results
from fusion_bench_featcal.fusionbench.options import checked_settings, plain, take_fusion_bench_keys
from fusion_bench_featcal.fusionbench.pool_checks import check_experts, check_pool_models
from fusion_bench_featcal.fusionbench.program import prepare_run
from fusion_bench_featcal.fusionbench.run_results import suite_name
from fusion_bench_featcal.methods.interface import MethodInputs
from fusion_bench_featcal.nearest_names import refuse_unknown_settings
from fusion_bench_featcal.plurals import counted
from fusion_bench_featcal.results import Report
from fusion_bench_featcal.results.comparison_figures import plot_comparison
from fusion_bench_featcal.results.remarks import closing_lines_of_a_comparison
from fusion_bench_featcal.results.summary import Summary
from fusion_bench_featcal.results.views import show_side_by_side
from fusion_bench_featcal.settings import CalibrationError

log = logging.getLogger(__name__)


class ComparisonAlgorithm(LightningFabricMixin, BaseAlgorithm):
    """Runs a grid of upstream mergers and post-merging methods, and compares the results.

    Run by `fusion_bench method=compare modelpool=...`. Every cell that is finished is kept in
    `results_dir`, under a fingerprint of all that it depends on; when the command is repeated, only
    what is missing is run.
    """

    _KEYS = (
        *GridChoices.__dataclass_fields__, "seed", "results_dir", "notes", "pixel_cache_mb",
        "cache_dir", "process_per_cell",
    )  # fmt: skip
    KEYS = (
        *_KEYS, "samples_per_task", "calibration_split", "steps",
    )  # fmt: skip
    _config_mapping = BaseAlgorithm._config_mapping | {name: name for name in _KEYS}

    def __init__(
        self,
        *,
        seed: int = 42,
        samples_per_task: int = 256,
        calibration_split: str = "train",
        steps: int = 1000,
        results_dir: str | None = None,
        pixel_cache_mb: float = 0,
        cache_dir: str | None = None,
        process_per_cell: bool = False,
        notes: Mapping[str, str] | None = None,
        **choices: Any,
    ) -> None:
        """Keep the choices; they are checked together with the model pool's in `run`.

        Args:
            seed: Seeds every merger and every method.
            samples_per_task: Samples per task of every method that takes any; YAML hands it to
                them.
            calibration_split: Split of those samples: train, val or test; likewise.
            steps: Updates of each task's modules in methods that train; likewise.
            results_dir: Where finished cells are kept; None: `outputs/comparison/<model pool>`.
            pixel_cache_mb: Memory for processed images that several cells ask for, in MiB; above 0
                the first of them alone pays for the processing.
            cache_dir: Folder that keeps processed images for other runs, too; None: none are kept.
            process_per_cell: Whether each cell runs in a process of its own, which starts the
                command again: its memory, energy and seconds are then its own.
            notes: Name of a merger or method -> what a reader must know about it.
            **choices: Fields of `GridChoices`.

        Raises:
            ValueError: If the seed is no integer >= 0, a value out of range or a key unknown.
        """
        meta = take_fusion_bench_keys(choices)
        unknown = [key for key in choices if key not in GridChoices.__dataclass_fields__]
        refuse_unknown_settings(unknown, self.KEYS, owner="compare")
        self.choices = GridChoices(**choices)
        self.seed = seed
        self.results_dir = results_dir
        checked_settings({"seed": seed, "pixel_cache_mb": pixel_cache_mb, "cache_dir": cache_dir})
        self.pixel_cache_mb, self.cache_dir = pixel_cache_mb, cache_dir
        if not isinstance(process_per_cell, bool):
            raise ValueError(f"method.process_per_cell must be a bool, got {process_per_cell!r}")
        self.process_per_cell = process_per_cell
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
        grid = self.grid(getattr(self._program, "_modelpool", {}))
        inputs = shared_inputs(self, modelpool, getattr(self._program, "taskpool", None))
        self.check_cells(grid, inputs)
        suite = suite_name(modelpool)
        store = ResultStore(self.results_dir or default_folder(suite))
        log_dir = None if self.log_dir is None else Path(self.log_dir)
        folder = log_dir or store.folder  # of the reports
        check_places(folder, grid)
        run = self.grid_run(grid, inputs, store)
        go_on = f"ended before it was done: finished cells are in {store.folder}. To go on, repeat"
        with ending_cleanly(self._program, lambda: f"{go_on} the command"):
            run.run()
        inputs.images.close()
        self._report(suite, run, folder)

    def grid(self, pool_config: Mapping[str, Any]) -> Grid:
        """The grid, whose names and settings are checked.

        Args:
            pool_config: The model pool's config; its key `featcal` has presets and exceptions.

        Raises:
            ValueError: If the grid is empty or names something unknown.
        """
        return make_grid(self.choices, plain(pool_config.get("featcal")) or {})

    def check_cells(self, grid: Grid, inputs: MethodInputs) -> None:
        """Refuse what cannot work before a model is loaded; experts against the base at once.

        Raises:
            ValueError: If a setting does not fit the pools.
            CalibrationError: If the pools do not fit.
        """
        check_pool_models(inputs.models, inputs.fabric)
        for name, method in grid.cells.items():
            try:
                method.check(inputs)
            except (CalibrationError, ValueError) as error:
                place = f"method.post_merging_methods.{name}"
                kind = CalibrationError if isinstance(error, CalibrationError) else ValueError
                raise kind(f"{place}: {error}") from error
        check_experts(inputs.models)
        if self.process_per_cell:
            check_command()

    def grid_run(
        self, grid: Grid, inputs: MethodInputs, store: ResultStore, **options: Any
    ) -> GridRun:
        """One pass over a grid with this comparison's seed; `options` are fields of `GridRun`."""
        log_dir = None if self.log_dir is None else Path(self.log_dir)
        apart = self.process_per_cell
        return GridRun(grid, inputs, store, self.seed, self._program, log_dir, apart, **options)

    def _report(self, suite: str, run: GridRun, folder: Path) -> None:
        """Write, log and print the reports; then fail if cells failed."""
        summary = write_reports(folder, suite, run, self.notes)
        if summary is not None:
            runs = [(Report.load(run), Path(run)) for run in summary.runs]
            log_results(self.fabric, runs, folder, plot_comparison)
            show = partial(_show, summary, folder)
            if not at_the_end(show):
                show()
        if run.failed:
            cells = "; ".join(
                f"{cell.upstream or 'reference'}, {cell.name}: {cell.reason}" for cell in run.failed
            )
            raise CalibrationError(
                f"{len(run.failed)} of {counted(len(run.grid), 'cell')} failed; the others are "
                f"finished and stay so when the command is repeated. {cells}"
            )


def default_folder(suite: str) -> Path:
    """Folder of finished cells where `method.results_dir` names none."""
    return Path("outputs") / "comparison" / suite


def shared_inputs(algorithm: Any, modelpool: BaseModelPool, taskpool: Any) -> MethodInputs:
    """Inputs that all cells on a pair of pools share.

    Args:
        algorithm: The running method: `method=compare`, or one that runs comparisons.
        modelpool: The pool with base, experts and data.
        taskpool: The pool that evaluates.

    Raises:
        CalibrationError: If there is no task pool, or what the command asks for cannot be had.
    """
    name = getattr(algorithm, "name", "compare")
    if taskpool is None:
        raise CalibrationError(
            f"{name} needs a task pool to evaluate on: the model pool brings none "
            "(default_taskpool), or taskpool=dummy was asked for. Name one, for example "
            "taskpool=CLIPVisionModelTaskPool/clip-vit-classification_TA8"
        )
    if getattr(algorithm._program, "merged_model_save_path", None) is not None:
        raise CalibrationError(
            f"{name} returns no model to save: leave merged_model_save_path out, and run "
            "the method that you choose by itself"
        )
    if algorithm.fabric.world_size > 1:
        raise CalibrationError(f"{name} runs on one device: set fabric.devices=1")
    images = ImageCache(algorithm.pixel_cache_mb, algorithm.cache_dir)
    return MethodInputs(modelpool, taskpool, algorithm.fabric, images)


def _show(summary: Summary, folder: Path) -> None:
    show_side_by_side(summary)
    for line in closing_lines_of_a_comparison(folder):
        print(line)
