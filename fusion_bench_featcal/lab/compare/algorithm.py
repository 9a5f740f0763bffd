"""`method=compare`: upstream mergers and post-merging methods side by side on one model pool."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
from fusion_bench import BaseAlgorithm, BaseModelPool
from fusion_bench.mixins import LightningFabricMixin
from omegaconf import DictConfig, OmegaConf

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
from fusion_bench_featcal.lab.compare.cells import CellMaker, Failure
from fusion_bench_featcal.lab.compare.grid import Grid, GridChoices, make_grid
from fusion_bench_featcal.lab.compare.jobs import BACKENDS, Workers
from fusion_bench_featcal.lab.compare.keys import CellKeys
from fusion_bench_featcal.lab.compare.points import POOLS, Point, as_text, program_config
from fusion_bench_featcal.lab.compare.reports import check_places, write_reports
from fusion_bench_featcal.lab.compare.runs import GridRun, run_grids
from fusion_bench_featcal.lab.compare.store import ResultStore
from fusion_bench_featcal.lab.report.views import show, write
from fusion_bench_featcal.method_inputs import MethodInputs
from fusion_bench_featcal.plurals import counted
from fusion_bench_featcal.results import Report
from fusion_bench_featcal.results.remarks import closing_lines_of_a_comparison
from fusion_bench_featcal.results.report import summarise
from fusion_bench_featcal.results.summary import FailedCell
from fusion_bench_featcal.setting_fields import Settings, same_as, setting
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings

log = logging.getLogger(__name__)

STAYS = "the others are finished and stay so when the command is repeated"


@dataclass(frozen=True, kw_only=True)
class ComparisonSettings(Settings):
    """Settings of `method=compare` in addition to those of its grid."""

    seed: int = same_as(FeatCalSettings, "seed", group="shared settings")
    samples_per_task: int = same_as(FeatCalSettings, "samples_per_task")
    calibration_split: str = same_as(FeatCalSettings, "calibration_split", group="")
    steps: int = setting(1000, "Updates of each task's modules in trained methods.", ge=1)
    jobs: int = setting(
        1,
        "Cells that run at the same time on this machine. 1: in this process. More: each in a "
        "process, which takes seconds to start.",
        ge=1,
        group="how it runs",
    )
    backend: str | None = setting(
        None,
        "Workers of the cells. Null: this process, or loky with several jobs. loky: a process for "
        "each cell, whose costs are then its own. dask, ray: a cluster.",
        choices=BACKENDS,
    )
    backend_options: Mapping[str, Any] | None = setting(
        None,
        "Arguments of dask.distributed.Client or ray.init, such as {address: ...}.",
        accepts="a mapping of names to values",
        check=lambda value: isinstance(value, Mapping),
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


@dataclass(frozen=True)
class PlannedPoint:
    """A point with checked settings and grid."""

    point: Point
    settings: ComparisonSettings
    grid: Grid
    config: DictConfig | None = None  # the program's at this point, if it is needed
    pools: str = ""  # equal for points with the same pools


class ComparisonAlgorithm(LightningFabricMixin, BaseAlgorithm):
    """Runs a grid of upstream mergers and post-merging methods, and compares the results.

    Run by `fusion_bench method=compare modelpool=...`. Every finished cell is stored in
    `results_dir`, under a fingerprint of all its inputs. When the command is repeated, only missing
    cells run.
    """

    name = "compare"
    setting_kinds: tuple[type, ...] = (GridChoices, ComparisonSettings)
    _config_mapping = BaseAlgorithm._config_mapping | {n: n for n in names_of(setting_kinds)}

    def __init__(self, **keys: Any) -> None:
        """Store the choices. `run` checks them together with the choices of the model pool.

        Args:
            **keys: Fields of the dataclasses in `setting_kinds`.

        Raises:
            ValueError: If a key is unknown or a value is not accepted.
        """
        meta = take_fusion_bench_keys(keys)
        self._read(read_settings(keys, self.setting_kinds, str(keys.get("study", self.name))))
        super().__init__(**meta)

    def _read(self, settings: Sequence[Any]) -> None:
        self.choices, self.settings = settings

    def on_run_start(self) -> None:
        """Use the suite's task pool if none was named, and check the log directory."""
        prepare_run(self._program, self.log_dir)

    def run(self, modelpool: BaseModelPool) -> None:  # type: ignore[override]
        """Run all cells, report them, and return no model.

        Args:
            modelpool: The pool with base, experts and data.

        Raises:
            ValueError: If a name or setting is unknown, before anything is loaded.
            CalibrationError: If the pools do not fit or, after all reports, if cells failed.
        """
        settings, suite = self.settings, suite_name(modelpool)
        workers = Workers(settings.jobs, settings.backend, settings.backend_options)
        planned = self.planned(workers.are_apart)
        inputs: dict[str, MethodInputs] = {}
        for planned_point in planned:
            if planned_point.pools not in inputs:
                inputs[planned_point.pools] = self.inputs(*self._pools(planned_point, modelpool))
                check_cells(planned_point.grid, inputs[planned_point.pools])
        store = ResultStore(settings.results_dir or Path("outputs") / "comparison" / suite)
        folder = store.folder if self.log_dir is None else Path(self.log_dir)
        check_places(folder, planned[0].grid)
        go_on = f"Interrupted. Finished cells are in {store.folder}. To continue, repeat"
        with ending_cleanly(self._program, lambda: f"{go_on} the command"):
            runs, failed = self._begun(planned, inputs, store, workers.are_apart)
            run_grids(runs, workers)
        self.report(suite, runs, failed, folder)

    def planned(self, are_apart: bool) -> list[PlannedPoint]:
        """Return all points, checked. Nothing is loaded.

        Args:
            are_apart: True if cells run in other processes, which receive the program's config.

        Raises:
            ValueError: If a name or setting is unknown.
        """
        grid = self.grid(getattr(self._program, "_modelpool", {}))
        config = program_config(self._program) if are_apart else None
        return [PlannedPoint(Point(seed=self.settings.seed), self.settings, grid, config)]

    def report(
        self, suite: str, runs: Sequence[GridRun], failed: list[FailedCell], folder: Path
    ) -> None:
        """Write, log and print the reports. Raises at the end if cells failed.

        Args:
            suite: Name of the model pool.
            runs: All points' cells.
            failed: Points that failed as a whole.
            folder: Folder for the reports.
        """
        (run,) = runs
        written = write_reports(folder, suite, run)
        if written:
            summary = summarise(written, run.failed)
            write(summary, folder)
            log_results(self.fabric, [(Report.load(run), Path(run)) for run in summary.runs])
            lines = closing_lines_of_a_comparison(folder)
            at_the_end(lambda: show_with(partial(show, summary), lines))
        if run.failed:
            cells = "; ".join(
                f"{cell.upstream or 'reference'}, {cell.name}: {cell.reason}" for cell in run.failed
            )
            raise CalibrationError(
                f"{len(run.failed)} of {counted(len(run.cells), 'cell')} failed; {STAYS}. {cells}"
            )

    def grid(self, pool_config: Mapping[str, Any]) -> Grid:
        """Return the grid with checked names and settings.

        Args:
            pool_config: The model pool's config. Its key `featcal` has presets and exceptions.

        Raises:
            ValueError: If the grid is empty or contains an unknown name.
        """
        return make_grid(self.choices, plain(pool_config.get("featcal")) or {})

    def inputs(self, modelpool: BaseModelPool, taskpool: Any) -> MethodInputs:
        """Return the inputs that all cells with the same pools share.

        Raises:
            CalibrationError: If there is no task pool, or the command requests a saved model or
                several devices.
        """
        if taskpool is None:
            raise CalibrationError(
                f"{self.name} needs a task pool to evaluate on: the model pool brings none "
                "(default_taskpool), or taskpool=dummy was asked for. Name one, for example "
                "taskpool=CLIPVisionModelTaskPool/clip-vit-classification_TA8"
            )
        if getattr(self._program, "merged_model_save_path", None) is not None:
            raise CalibrationError(
                f"{self.name} returns no model to save: leave merged_model_save_path out, and run "
                "the method that you choose by itself"
            )
        if self.fabric.world_size > 1:
            raise CalibrationError(f"{self.name} runs on one device: set fabric.devices=1")
        return MethodInputs(modelpool, taskpool, self.fabric)

    def _pools(self, planned_point: PlannedPoint, modelpool: BaseModelPool) -> list[Any]:
        """Return a point's pools, which are the program's pools or are created here."""
        program: Any = self._program
        if planned_point.config is None or not planned_point.point.changes_pools:
            return [modelpool, getattr(program, "taskpool", None)]
        configs = (OmegaConf.create(plain(planned_point.config[pool])) for pool in POOLS)
        return [program._instantiate_and_setup(config) for config in configs]

    def _begun(
        self,
        planned: Sequence[PlannedPoint],
        inputs: dict[str, MethodInputs],
        store: ResultStore,
        are_apart: bool,
    ) -> tuple[list[GridRun], list[FailedCell]]:
        """Return the points' cells with their fingerprints, and points that failed."""
        log_dir = None if self.log_dir is None else Path(self.log_dir)
        keys: dict[str, CellKeys] = {}
        runs, failed = [], []
        for planned_point in planned:
            shared, point, grid = (
                inputs[planned_point.pools],
                planned_point.point,
                planned_point.grid,
            )
            maker = CellMaker(grid.cells, shared, store, point.seed, self._program, log_dir)
            try:
                if planned_point.pools in keys:
                    check_cells(grid, shared)
                else:  # the first point with these pools, checked by `run`
                    keys[planned_point.pools] = CellKeys(shared)
                cells = keys[planned_point.pools].cells(grid, point.seed)
                notes = dict(planned_point.settings.notes or {})
                config = as_text(planned_point.config) if are_apart else ""
                runs.append(GridRun(point, grid, cells, maker, notes, config))
            # If one point's pools or methods raise, the other points continue.
            except Exception as error:
                if len(planned) == 1:
                    raise
                failure = Failure.of(error)
                log.error("the point %s failed: %s\n%s", point, failure.reason, failure.trace)
                failed.append(point.failed(None, "the point", failure.reason))
        return runs, failed


def check_cells(grid: Grid, inputs: MethodInputs) -> None:
    """Refuse settings and pools that do not fit before a model is loaded.

    Raises:
        ValueError: If a setting does not fit the pools.
        CalibrationError: If the pools do not fit.
    """
    check_pool_models(inputs.models, inputs.fabric)
    for name, method in grid.cells.items():
        try:
            method.check(inputs)
        except (CalibrationError, ValueError) as error:
            kind = CalibrationError if isinstance(error, CalibrationError) else ValueError
            raise kind(f"method.post_merging_methods.{name}: {error}") from error
    check_experts(inputs.models)


def show_with(show: Callable[[], object], lines: Sequence[str]) -> None:
    """Show results, then the last lines of a run."""
    show()
    print("\n".join(lines))
