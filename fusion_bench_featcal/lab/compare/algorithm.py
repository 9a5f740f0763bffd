"""`method=compare`: upstream mergers and post-merging methods side by side on one model pool."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
from fusion_bench import BaseAlgorithm, BaseModelPool
from fusion_bench.mixins import LightningFabricMixin
from fusion_bench.taskpool.dummy import DummyTaskPool
from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_class
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
from fusion_bench_featcal.lab.compare.cells import CellMaker
from fusion_bench_featcal.lab.compare.grid import Grid, GridChoices, make_grid
from fusion_bench_featcal.lab.compare.jobs import BACKENDS, Workers
from fusion_bench_featcal.lab.compare.keys import CellKeys
from fusion_bench_featcal.lab.compare.points import unresolved
from fusion_bench_featcal.lab.compare.reports import check_places, write_reports
from fusion_bench_featcal.lab.compare.runs import GridRun, run_grids
from fusion_bench_featcal.lab.compare.store import ResultStore
from fusion_bench_featcal.method_inputs import MethodInputs
from fusion_bench_featcal.plurals import counted
from fusion_bench_featcal.results import Report
from fusion_bench_featcal.results.remarks import closing_lines_of_a_comparison
from fusion_bench_featcal.results.summary import Summary
from fusion_bench_featcal.results.views import show
from fusion_bench_featcal.setting_fields import Settings, same_as, setting
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings


@dataclass(frozen=True, kw_only=True)
class ComparisonSettings(Settings):
    """Settings of `method=compare` beside those of its grid."""

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


class ComparisonAlgorithm(LightningFabricMixin, BaseAlgorithm):
    """Runs a grid of upstream mergers and post-merging methods, and compares the results.

    Run by `fusion_bench method=compare modelpool=...`. Every cell that is finished is kept in
    `results_dir`, under a fingerprint of all that it depends on; when the command is repeated, only
    what is missing is run.
    """

    name = "compare"
    setting_kinds: tuple[type, ...] = (GridChoices, ComparisonSettings)
    _config_mapping = BaseAlgorithm._config_mapping | {n: n for n in names_of(setting_kinds)}

    def __init__(self, **keys: Any) -> None:
        """Keep the choices, which are checked together with the model pool's in `run`.

        Args:
            **keys: Fields of the dataclasses in `setting_kinds`.

        Raises:
            ValueError: If a key is unknown or a value is not accepted.
        """
        meta = take_fusion_bench_keys(keys)
        *more, self.choices, self.settings = read_settings(
            keys, self.setting_kinds, str(keys.get("study", self.name))
        )
        self.design = more[0] if more else None
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
        workers, suite = self.workers(), suite_name(modelpool)
        inputs = self.inputs(modelpool, getattr(self._program, "taskpool", None))
        check_cells(grid, inputs)
        config = program_config(self._program) if workers.are_apart else None
        store = ResultStore(self.settings.results_dir or Path("outputs") / "comparison" / suite)
        folder = self.report_folder(store)
        check_places(folder, grid)
        with self.continuing(store):
            run = self.grid_run(grid, CellKeys(inputs), store, config)
            run_grids([run], workers)
        self._report(suite, run, folder)

    def workers(self) -> Workers:
        """Return the workers that the settings choose; raises as `Workers`."""
        settings = self.settings
        return Workers(settings.jobs, settings.backend, settings.backend_options)

    def grid(self, pool_config: Mapping[str, Any]) -> Grid:
        """Return the grid, whose names and settings are checked.

        Args:
            pool_config: The model pool's config; its key `featcal` has presets and exceptions.

        Raises:
            ValueError: If the grid is empty or names something unknown.
        """
        return make_grid(self.choices, plain(pool_config.get("featcal")) or {})

    def inputs(self, modelpool: BaseModelPool, taskpool: Any) -> MethodInputs:
        """Return the inputs that all cells on a pair of pools share.

        Raises:
            CalibrationError: If there is no task pool, or the command asks for a model or for
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

    def maker(self, grid: Grid, pools: Any, store: ResultStore, log_dir: Path | None) -> CellMaker:
        """Return the maker of a grid's cells in a worker, on the pools that it has made."""
        inputs = self.inputs(*pools)
        return CellMaker(grid.cells, inputs, store, self.settings.seed, self._program, log_dir)

    def grid_run(
        self, grid: Grid, keys: CellKeys, store: ResultStore, config: DictConfig | None
    ) -> GridRun:
        """Return one pass over a grid with this comparison's seed.

        Args:
            grid: The grid.
            keys: Fingerprints on the pools.
            store: Where cells are kept.
            config: The program's config, with which workers make their pools; None: there are none.
        """
        log_dir = None if self.log_dir is None else Path(self.log_dir)
        content = None if config is None else {**plain(config), "print_config": False}
        return GridRun(grid, keys, store, self.settings.seed, self._program, log_dir, content)

    def report_folder(self, store: ResultStore) -> Path:
        """Return the folder of the reports."""
        return store.folder if self.log_dir is None else Path(self.log_dir)

    @contextmanager
    def continuing(self, store: ResultStore) -> Iterator[None]:
        """Context in which an interruption ends with a line on how to continue."""
        line = f"Interrupted. Finished cells are in {store.folder}. To continue, repeat the command"
        with ending_cleanly(self._program, lambda: line):
            yield

    def _report(self, suite: str, run: GridRun, folder: Path) -> None:
        """Write, log and print the reports; then fail if cells failed."""
        summary = write_reports(folder, suite, run, self.settings.notes or {})
        if summary is not None:
            runs = [(Report.load(run), Path(run)) for run in summary.runs]
            log_results(self.fabric, runs)
            at_the_end(partial(_show, summary, folder))
        if run.failed:
            cells = "; ".join(
                f"{cell.upstream or 'reference'}, {cell.name}: {cell.reason}" for cell in run.failed
            )
            raise CalibrationError(
                f"{len(run.failed)} of {counted(len(run.cells), 'cell')} failed; the others are "
                f"finished and stay so when the command is repeated. {cells}"
            )


def check_cells(grid: Grid, inputs: MethodInputs) -> None:
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
            kind = CalibrationError if isinstance(error, CalibrationError) else ValueError
            raise kind(f"method.post_merging_methods.{name}: {error}") from error
    check_experts(inputs.models)


def program_config(program: Any) -> DictConfig:
    """Return the program's config with its interpolations and the task pool that it evaluates on.

    FusionBench resolves the config before it makes the program. The command's words are composed
    again where there is a command.

    Raises:
        CalibrationError: If the program has no config.
    """
    if HydraConfig.initialized() and GlobalHydra.instance().is_initialized():
        job = HydraConfig.get()
        config = compose(job.job.config_name, list(job.overrides.task))
    elif getattr(program, "config", None) is None:
        raise CalibrationError(
            "pools that were made in Python cannot be sent to other processes: set method.jobs=1 "
            "and method.backend=null, or use the command fusion_bench"
        )
    else:
        config = OmegaConf.create(unresolved(program.config))
    default = config.modelpool.get("default_taskpool")
    named = OmegaConf.select(config, "taskpool._target_")
    if default is not None and (named is None or get_class(named) is DummyTaskPool):
        OmegaConf.update(config, "taskpool", OmegaConf.to_container(default), merge=False)
    return config


def _show(summary: Summary, folder: Path) -> None:
    show(summary)
    for line in closing_lines_of_a_comparison(folder):
        print(line)
