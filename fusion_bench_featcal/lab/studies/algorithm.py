"""`method=study/<name>`: comparisons at several points, in one table with figures."""

import logging
from collections.abc import Mapping
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
from fusion_bench_featcal.fusionbench.options import names_of, plain, take_fusion_bench_keys
from fusion_bench_featcal.fusionbench.program import prepare_run
from fusion_bench_featcal.fusionbench.run_results import suite_name
from fusion_bench_featcal.lab.compare.algorithm import ComparisonAlgorithm, default_folder
from fusion_bench_featcal.lab.compare.cell_process import check_command
from fusion_bench_featcal.lab.compare.reports import check_places
from fusion_bench_featcal.lab.compare.store import ResultStore
from fusion_bench_featcal.lab.report.study import Study
from fusion_bench_featcal.lab.studies.axes import unresolved
from fusion_bench_featcal.lab.studies.points import Design, Point
from fusion_bench_featcal.lab.studies.run import StudyRun, Task
from fusion_bench_featcal.nearest_names import refuse_unknown_settings
from fusion_bench_featcal.plurals import counted
from fusion_bench_featcal.results.remarks import next_lines
from fusion_bench_featcal.results.views import failures
from fusion_bench_featcal.settings import CalibrationError

log = logging.getLogger(__name__)

_DESIGN = tuple(Design.__dataclass_fields__)
_OWN = ("study", *_DESIGN, "over", "subsets", "against", "columns")


class StudyAlgorithm(LightningFabricMixin, BaseAlgorithm):
    """Runs comparisons along axes and puts them side by side.

    Run by `fusion_bench method=study/<name> modelpool=...`. Cells are those of `method=compare` and
    kept where it keeps them, so that an interrupted study goes on and studies share what they have
    in common.
    """

    name = "study"
    _KEYS = (*_OWN, *names_of(ComparisonAlgorithm.setting_kinds))
    _config_mapping = BaseAlgorithm._config_mapping | {key: key for key in _KEYS}

    def __init__(
        self,
        *,
        study: str = "study",
        over: Any = (),
        subsets: int | None = None,
        against: Mapping[str, Any] | None = None,
        columns: Any = (),
        **choices: Any,
    ) -> None:
        """Keep the choices; they are checked with the pools' configs in `run`.

        Args:
            study: Name of the study, for titles.
            over: Labels that are averaged over, as seeds are.
            subsets: Most subsets for each number of tasks; None: all.
            against: Row -> rows that are compared with it, where the study has one point.
            columns: Columns of a comparison that get a table by point, such as `seconds`.
            **choices: Fields of `Design`, and the keys of `method=compare`.

        Raises:
            ValueError: If a key is unknown, or its value is none that it can have.
        """
        self._meta = take_fusion_bench_keys(choices)
        unknown = [key for key in choices if key not in self._KEYS]
        refuse_unknown_settings(unknown, self._KEYS, owner=study)
        over, self.against = plain(over) or [], plain(against) or {}
        _check_names("method.over", over)
        self.study, self.over = study, list(over)
        self.columns = list(plain(columns) or [])
        _check_names("method.columns", self.columns)
        _check_rows(self.against)
        self.design = Design(**{key: plain(choices[key]) for key in _DESIGN if key in choices})
        comparison = self._comparison({k: v for k, v in choices.items() if k not in _DESIGN})
        self.results_dir, self.process_per_cell = (
            comparison.results_dir,
            comparison.process_per_cell,
        )
        super().__init__(**self._meta)

    def on_run_start(self) -> None:
        """Take the suite's own task pool where none was named; check the log directory."""
        prepare_run(self._program, self.log_dir)

    def run(self, modelpool: BaseModelPool) -> None:  # type: ignore[override]
        """Run all points, report them, and return no model.

        Args:
            modelpool: The pool with base, experts and data.

        Raises:
            ValueError: If an axis, a label or a name is unknown; before anything is loaded.
            CalibrationError: If the pools do not fit; or, when all is reported, if cells failed.
        """
        config, suite = program_config(self._program), suite_name(modelpool)
        tasks = [self._task(point, config) for point in self.design.points(config)]
        if self.process_per_cell:
            check_command()
        run = StudyRun(self, modelpool, tasks)
        run.check()
        store = ResultStore(self.results_dir or default_folder(suite))
        folder = store.folder if self.log_dir is None else Path(self.log_dir)
        check_places(folder, tasks[0].grid)
        go_on = f"Interrupted. Finished cells are in {store.folder}. To continue, repeat"
        with ending_cleanly(self._program, lambda: f"{go_on} the command"):
            run.run(store, folder / "points", suite)
        study = run.study(suite)
        study.write(folder)
        self._end(study, folder, run)

    def _task(self, point: Point, config: DictConfig) -> Task:
        """A point with its own config, its comparison and its grid, all checked."""
        changed = point.changed(config)
        method = {key: changed.method[key] for key in changed.method if key not in _OWN}
        try:
            comparison = self._comparison({k: v for k, v in method.items() if k != "_target_"})
            grid = comparison.grid(changed.modelpool)
        except ValueError as error:
            raise ValueError(f"{error} (at the point {point})") from error
        return Task(point, changed, comparison, grid)

    def _comparison(self, keys: Mapping[str, Any]) -> ComparisonAlgorithm:
        comparison: Any = ComparisonAlgorithm(**{str(key): value for key, value in keys.items()})
        comparison._program = getattr(self, "_program", None)
        comparison._fabric_instance = getattr(self, "_fabric_instance", None)
        return comparison

    def _end(self, study: Study, folder: Path, run: StudyRun) -> None:
        """Show the study, and fail if something of it failed."""
        at_the_end(lambda: _show(study, folder))
        failed = failures(run.failed)
        if failed:
            raise CalibrationError(
                f"{counted(len(failed), 'cell')} of the study failed; the others are "
                f"finished and stay so when the command is repeated. {'; '.join(failed[:5])}"
            )


def _show(study: Study, folder: Path) -> None:
    study.show()
    for line in next_lines(folder):
        print(line)


def _check_names(key: str, names: Any) -> None:
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{key} must be a list of names, got {names!r}")


def _check_rows(against: Any) -> None:
    if not isinstance(against, dict):
        raise ValueError(
            "method.against must map a row to the rows that are compared with it, as in "
            f"{{featcal: ['featcal:plus']}}, got {against!r}"
        )
    for row, others in against.items():
        _check_names(f"method.against.{row}", others)


def program_config(program: Any) -> DictConfig:
    """The program's config with its interpolations, and with the task pool that it evaluates on.

    FusionBench resolves the config before it makes the program; so the command's words are composed
    again where there is a command.
    """
    if HydraConfig.initialized() and GlobalHydra.instance().is_initialized():
        job = HydraConfig.get()
        config = compose(job.job.config_name, list(job.overrides.task))
    else:
        config = OmegaConf.create(unresolved(program.config))
    default = config.modelpool.get("default_taskpool")
    named = OmegaConf.select(config, "taskpool._target_")
    if default is not None and (named is None or get_class(named) is DummyTaskPool):
        OmegaConf.update(config, "taskpool", OmegaConf.to_container(default), merge=False)
    return config
