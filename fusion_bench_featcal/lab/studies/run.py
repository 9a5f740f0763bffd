"""Running the points of a study, one after another, with what they share made once."""

import hashlib
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fusion_bench import BaseModelPool
from omegaconf import DictConfig, OmegaConf
from rich.progress import track

from fusion_bench_featcal.fusionbench.options import plain
from fusion_bench_featcal.lab.compare.algorithm import ComparisonAlgorithm, shared_inputs
from fusion_bench_featcal.lab.compare.cells import Conditions
from fusion_bench_featcal.lab.compare.grid import Grid
from fusion_bench_featcal.lab.compare.reports import write_merger_reports
from fusion_bench_featcal.lab.compare.store import ResultStore
from fusion_bench_featcal.lab.report.study import Study, label_text
from fusion_bench_featcal.lab.studies.points import Point
from fusion_bench_featcal.method_inputs import MethodInputs
from fusion_bench_featcal.results.find import FailedCell
from fusion_bench_featcal.settings import CalibrationError

log = logging.getLogger(__name__)

_LONGEST = 150  # characters of a point's folder
_POOLS = ("modelpool", "taskpool")


@dataclass(frozen=True)
class Task:
    """A point, ready to run."""

    point: Point
    config: DictConfig  # the program's, with the point's changes
    comparison: ComparisonAlgorithm
    grid: Grid

    @property
    def pools(self) -> str:
        """Text that is equal for points on the same pools."""
        return json.dumps([plain(self.config.get(pool)) for pool in _POOLS], sort_keys=True)


@dataclass
class StudyRun:
    """One pass over a study's points."""

    algorithm: Any  # the study: program, Fabric and keys
    modelpool: BaseModelPool  # the program's, for points that do not change it
    tasks: Sequence[Task]
    runs: list[Path] = field(default_factory=list)  # folders with reports
    failed: list[FailedCell] = field(default_factory=list)
    _pools: str = ""  # of the inputs below; others are made anew
    _inputs: MethodInputs | None = None
    _conditions: Conditions | None = None
    _taskpool: Any = None  # the program's, likewise

    def check(self) -> None:
        """Check labels, words of commands and the first point on each pair of pools.

        Nothing is loaded yet.

        Raises:
            ValueError: If a setting does not fit.
            CalibrationError: If the pools do not fit.
        """
        labels = {name for task in self.tasks for name in task.point.labels}
        for name in set(self.algorithm.over) - labels:
            raise ValueError(
                f"method.over: {name!r} is no label of this study's points: "
                f"{', '.join(sorted(labels)) or 'they have none'}"
            )
        if self.algorithm.process_per_cell:
            for task in self.tasks:
                task.point.check_words()
        first = {task.pools: task for task in reversed(self.tasks)}
        for task in first.values():
            task.comparison.check_cells(task.grid, self._inputs_of(task))

    @property
    def size(self) -> str:
        """A phrase with the numbers of points and of their cells."""
        labels = {json.dumps(task.point.labels, sort_keys=True, default=str) for task in self.tasks}
        seeds = {task.point.seed for task in self.tasks}
        cells = sum(len(task.grid) for task in self.tasks)
        size = f"points: {len(labels)}, seeds: {len(seeds)}, cells: {cells}"
        return f"{size}; finished cells, and those that points share, are not run again"

    def run(self, store: ResultStore, folder: Path, suite: str) -> None:
        """Run what is not finished, and write each point's reports below `folder`."""
        log.info("%s: %s", self.algorithm.study, self.size)
        for task in track(self.tasks, "points"):
            log.info("point %s", task.point)
            runs: list[Path] = []
            failed: list[FailedCell] = []
            try:
                runs, failed = self._run_point(task, store, folder, suite)
            # Whatever one point's pools or methods raise, the other points are worth having.
            except Exception as error:
                trace = not isinstance(error, (CalibrationError, ValueError))
                log.error("the point %s failed: %s", task.point, error, exc_info=trace)
                reason = str(error).strip() or type(error).__name__
                seed = task.point.seed
                failed = [FailedCell(upstream=None, name="the point", reason=reason, seed=seed)]
            self.runs += runs
            text = label_text(task.point.labels)
            self.failed += [replace(cell, point=text) for cell in failed]

    def study(self, suite: str) -> Study:
        """Return the study's results, which are read from the runs."""
        algorithm = self.algorithm
        return Study(
            name=algorithm.study,
            suite=suite,
            runs=self.runs,
            failed=self.failed,
            over=algorithm.over,
            against=algorithm.against,
            columns=algorithm.columns,
        )

    def _run_point(
        self, task: Task, store: ResultStore, folder: Path, suite: str
    ) -> tuple[list[Path], list[FailedCell]]:
        inputs = self._inputs_of(task)
        task.comparison.check_cells(task.grid, inputs)
        words: list[str] = []
        if task.comparison.process_per_cell:  # a study of one point, which is this one
            words = [*task.point.words, *(f"method.{key}=null" for key in ("axes", "seeds"))]
            words += [f"method.{key}=[]" for key in ("pairs", "over")]
        run = task.comparison.grid_run(
            task.grid,
            inputs,
            store,
            words=words,
            conditions=self._conditions,
        )
        self._conditions = run.conditions
        run.run()
        place = folder / folder_name(task.point)
        name, labels = pool_name(suite, task.point), task.point.labels
        runs = write_merger_reports(place, name, run, task.comparison.notes, labels)
        return runs, run.failed

    def _inputs_of(self, task: Task) -> MethodInputs:
        """The point's pools: those of the point before where they are the same."""
        if self._inputs is None or task.pools != self._pools:
            program: Any = self.algorithm._program
            self._conditions = None
            if self._taskpool is None:
                self._taskpool = program.taskpool
            pools = [self.modelpool, self._taskpool]
            if _changes_pools(task.point):
                configs = (OmegaConf.create(plain(task.config[pool])) for pool in _POOLS)
                pools = [program._instantiate_and_setup(config) for config in configs]
            self._inputs, self._pools = shared_inputs(self.algorithm, *pools), task.pools
            # Mergers and checks may ask the program for its task pool.
            program.modelpool, program.taskpool = pools
        return self._inputs


def _changes_pools(point: Point) -> bool:
    return any(key.split(".")[0] in _POOLS for key in point.changes)


def pool_name(suite: str, point: Point) -> str:
    """Name of a point's pools in its reports; others than the suite's must not share its name."""
    labels = ", ".join(f"{key}={value}" for key, value in point.labels.items())
    return f"{suite} ({labels})" if _changes_pools(point) else suite


def folder_name(point: Point) -> str:
    """Name of a point's folder."""
    text = "_".join(f"{k}-{v}" for k, v in {**point.labels, "seed": point.seed}.items())
    name = re.sub(r"[^\w.+-]", "_", text)
    if name == text and len(name) <= _LONGEST:
        return name
    # Other labels must not have the same name.
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{name[:_LONGEST]}-{digest}"
