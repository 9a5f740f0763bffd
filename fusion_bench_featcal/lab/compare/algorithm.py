"""`method=compare`: upstream mergers and post-merging methods side by side on one model pool."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
from fusion_bench import BaseAlgorithm, BaseModelPool
from fusion_bench.mixins import LightningFabricMixin

from fusion_bench_featcal.ending import ending_cleanly
from fusion_bench_featcal.fusionbench.console import at_the_end
from fusion_bench_featcal.fusionbench.loggers import log_results
from fusion_bench_featcal.fusionbench.options import (
    names_of,
    plain,
    read_settings,
    take_fusion_bench_keys,
)
from fusion_bench_featcal.fusionbench.pool_checks import check_experts, check_pool_models
from fusion_bench_featcal.fusionbench.program import prepare_run
from fusion_bench_featcal.fusionbench.run_results import suite_name
from fusion_bench_featcal.lab.compare.cell_process import check_command
from fusion_bench_featcal.lab.compare.cells import GridRun
from fusion_bench_featcal.lab.compare.grid import Grid, GridChoices, make_grid
from fusion_bench_featcal.lab.compare.reports import check_places, write_reports
from fusion_bench_featcal.lab.compare.store import ResultStore
from fusion_bench_featcal.method_inputs import MethodInputs
from fusion_bench_featcal.plurals import counted
from fusion_bench_featcal.results import Report
from fusion_bench_featcal.results.remarks import closing_lines_of_a_comparison
from fusion_bench_featcal.results.summary import Summary
from fusion_bench_featcal.results.views import show
from fusion_bench_featcal.setting_fields import Settings, same_as, setting
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ComparisonSettings(Settings):
    """Settings of `method=compare` beside those of its grid."""

    seed: int = same_as(FeatCalSettings, "seed", group="shared settings")
    samples_per_task: int = same_as(FeatCalSettings, "samples_per_task")
    calibration_split: str = same_as(FeatCalSettings, "calibration_split", group="")
    steps: int = setting(1000, "Updates of each task's modules in trained methods.", ge=1)
    process_per_cell: bool = setting(
        False,
        "Run each cell in a process of its own, so that its costs are its own. Starting one takes "
        "seconds.",
        group="how it runs",
    )
    results_dir: str | None = setting(
        None,
        "Folder for finished cells, which are not run again. Null: outputs/comparison/<model "
        "pool>.",
        accepts="a folder's path",
    )
    notes: Mapping[str, str] | None = setting(
        None,
        "Footnotes of the tables, by merger or method.",
        accepts="a mapping of names to texts",
        check=lambda value: isinstance(value, Mapping),
        group="definitions of the names",
    )


class ComparisonAlgorithm(LightningFabricMixin, BaseAlgorithm):
    """Runs a grid of upstream mergers and post-merging methods, and compares the results.

    Run by `fusion_bench method=compare modelpool=...`. Every cell that is finished is kept in
    `results_dir`, under a fingerprint of all that it depends on; when the command is repeated, only
    what is missing is run.
    """

    setting_kinds = (GridChoices, ComparisonSettings)
    _config_mapping = BaseAlgorithm._config_mapping | {n: n for n in names_of(setting_kinds)}

    def __init__(self, **keys: Any) -> None:
        """Keep the choices, which are checked together with the model pool's in `run`.

        Args:
            **keys: Fields of `GridChoices` and `ComparisonSettings`.

        Raises:
            ValueError: If a key is unknown or a value is not accepted.
        """
        meta = take_fusion_bench_keys(keys)
        self.choices, settings = read_settings(keys, self.setting_kinds, "compare")
        self.seed, self.results_dir = settings.seed, settings.results_dir
        self.process_per_cell = settings.process_per_cell
        self.notes = dict(settings.notes or {})
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
        go_on = f"Interrupted. Finished cells are in {store.folder}. To continue, repeat"
        with ending_cleanly(self._program, lambda: f"{go_on} the command"):
            run.run()
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
            log_results(self.fabric, runs)
            at_the_end(partial(_show, summary, folder))
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
    return MethodInputs(modelpool, taskpool, algorithm.fabric)


def _show(summary: Summary, folder: Path) -> None:
    show(summary)
    for line in closing_lines_of_a_comparison(folder):
        print(line)
