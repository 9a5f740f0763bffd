"""`method=study/<name>`: comparisons at several points, in one table with figures."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fusion_bench import BaseModelPool
from omegaconf import DictConfig, OmegaConf

from fusion_bench_featcal.fusionbench.console import at_the_end
from fusion_bench_featcal.fusionbench.options import names_of, plain
from fusion_bench_featcal.fusionbench.run_results import suite_name
from fusion_bench_featcal.lab.compare.algorithm import (
    ComparisonAlgorithm,
    check_cells,
    program_config,
)
from fusion_bench_featcal.lab.compare.axes import Design
from fusion_bench_featcal.lab.compare.grid import Grid
from fusion_bench_featcal.lab.compare.keys import CellKeys
from fusion_bench_featcal.lab.compare.points import POOLS, Point
from fusion_bench_featcal.lab.compare.reports import check_places, write_merger_reports
from fusion_bench_featcal.lab.compare.runs import GridRun, run_grids
from fusion_bench_featcal.lab.compare.store import ResultStore
from fusion_bench_featcal.lab.report.study import Study, label_text
from fusion_bench_featcal.method_inputs import MethodInputs
from fusion_bench_featcal.plurals import counted
from fusion_bench_featcal.results.find import FailedCell
from fusion_bench_featcal.results.remarks import next_lines
from fusion_bench_featcal.results.views import failures
from fusion_bench_featcal.settings import CalibrationError

log = logging.getLogger(__name__)

_COMPARISON = "fusion_bench_featcal.lab.compare.ComparisonAlgorithm"


@dataclass(frozen=True)
class PointComparison:
    """The comparison at a point."""

    point: Point
    config: DictConfig  # the program's, with the point's changes and its method a comparison
    method: ComparisonAlgorithm
    grid: Grid

    @property
    def pools(self) -> str:
        """Text that is equal for points on the same pools."""
        return json.dumps([plain(self.config.get(pool)) for pool in POOLS], sort_keys=True)


class StudyAlgorithm(ComparisonAlgorithm):
    """Runs comparisons along axes and puts them side by side.

    Run by `fusion_bench method=study/<name> modelpool=...`. Cells are those of `method=compare` and
    kept where it keeps them, so that an interrupted study goes on and studies share what they have
    in common.
    """

    name = "study"
    setting_kinds = (Design, *ComparisonAlgorithm.setting_kinds)
    _config_mapping = ComparisonAlgorithm._config_mapping | {n: n for n in names_of([Design])}
    design: Design

    def run(self, modelpool: BaseModelPool) -> None:  # type: ignore[override]
        """Run all points, report them, and return no model.

        Args:
            modelpool: The pool with base, experts and data.

        Raises:
            ValueError: If an axis, a label or a name is unknown; before anything is loaded.
            CalibrationError: If the pools do not fit; or, when all is reported, if cells failed.
        """
        config, suite = program_config(self._program), suite_name(modelpool)
        comparisons = [self._at(point, config) for point in self.design.points(config)]
        self._check_labels(comparisons)
        workers = self.workers()
        inputs: dict[str, MethodInputs] = {}
        for each in comparisons:
            if each.pools not in inputs:
                inputs[each.pools] = self._inputs_at(each, modelpool)
                check_cells(each.grid, inputs[each.pools])
        store = ResultStore(self.settings.results_dir or Path("outputs") / "comparison" / suite)
        folder = self.report_folder(store)
        check_places(folder, comparisons[0].grid)
        with self.continuing(store):
            runs, failed = self._begun(comparisons, inputs, store, workers.are_apart)
            log.info("%s: %s", self.design.study, size_of(comparisons))
            run_grids([run for _, run in runs], workers)
        written = []
        for each, run in runs:
            point, notes = each.point, each.method.settings.notes or {}
            name, place = point.pool_name(suite), folder / "points" / point.folder
            written += write_merger_reports(place, name, run, notes, point.labels)
            failed += [replace(cell, point=label_text(point.labels)) for cell in run.failed]
        self._end(suite, written, failed, folder)

    def _at(self, point: Point, config: DictConfig) -> PointComparison:
        """Return the comparison at a point, whose settings and grid are checked."""
        changed = point.changed(config)
        keys = {key: v for key, v in changed.method.items() if key not in names_of([Design])}
        keys["_target_"] = _COMPARISON
        OmegaConf.update(changed, "method", keys, merge=False)
        try:
            settings = {key: changed.method[key] for key in keys if key != "_target_"}
            method: Any = ComparisonAlgorithm(**settings)
            grid = method.grid(changed.modelpool)
        except ValueError as error:
            raise ValueError(f"{error} (at the point {point})") from error
        method._program, method._fabric_instance = self._program, self.fabric
        return PointComparison(point, changed, method, grid)

    def _check_labels(self, comparisons: Sequence[PointComparison]) -> None:
        labels = {name for each in comparisons for name in each.point.labels}
        for name in set(self.design.over) - labels:
            raise ValueError(
                f"method.over: {name!r} is no label of this study's points: "
                f"{', '.join(sorted(labels)) or 'they have none'}"
            )

    def _inputs_at(self, each: PointComparison, modelpool: BaseModelPool) -> MethodInputs:
        """Return the inputs on a point's pools: the program's, or others that are made here."""
        program: Any = self._program
        pools = [modelpool, program.taskpool]
        if each.point.changes_pools:
            configs = (OmegaConf.create(plain(each.config[pool])) for pool in POOLS)
            pools = [program._instantiate_and_setup(config) for config in configs]
        return self.inputs(*pools)

    def _begun(
        self,
        comparisons: Sequence[PointComparison],
        inputs: dict[str, MethodInputs],
        store: ResultStore,
        are_apart: bool,
    ) -> tuple[list[tuple[PointComparison, GridRun]], list[FailedCell]]:
        """Return the points' runs with their cells' fingerprints, and failures."""
        keys: dict[str, CellKeys] = {}
        runs, failed = [], []
        for each in comparisons:
            try:
                check_cells(each.grid, inputs[each.pools])
                if each.pools not in keys:
                    keys[each.pools] = CellKeys(inputs[each.pools])
                config = each.config if are_apart else None
                run = each.method.grid_run(each.grid, keys[each.pools], store, config)
                runs.append((each, run))
            # Whatever one point's pools or methods raise, the other points are worth having.
            except Exception as error:
                trace = not isinstance(error, (CalibrationError, ValueError))
                log.error("the point %s failed: %s", each.point, error, exc_info=trace)
                reason, point = str(error).strip() or type(error).__name__, each.point
                cell = FailedCell(upstream=None, name="the point", reason=reason, seed=point.seed)
                failed.append(replace(cell, point=label_text(point.labels)))
        return runs, failed

    def _end(self, suite: str, runs: list[Path], failed: list[FailedCell], folder: Path) -> None:
        """Write and show the study, and fail if something of it failed."""
        design = self.design
        study = Study(
            name=design.study,
            suite=suite,
            runs=runs,
            failed=failed,
            over=list(design.over),
            against=design.against or {},
            columns=list(design.columns),
        )
        study.write(folder)
        at_the_end(lambda: _show(study, folder))
        if failed:
            raise CalibrationError(
                f"{counted(len(failed), 'cell')} of the study failed; the others are "
                f"finished and stay so when the command is repeated. "
                f"{'; '.join(failures(failed)[:5])}"
            )


def size_of(comparisons: Sequence[PointComparison]) -> str:
    """Return a phrase with the numbers of points, seeds and cells."""
    points = [each.point for each in comparisons]
    labels = {json.dumps(point.labels, sort_keys=True, default=str) for point in points}
    cells = sum(len(each.grid) for each in comparisons)
    size = f"points: {len(labels)}, seeds: {len({p.seed for p in points})}, cells: {cells}"
    return f"{size}; finished cells, and those that points share, are not run again"


def _show(study: Study, folder: Path) -> None:
    study.show()
    for line in next_lines(folder):
        print(line)
