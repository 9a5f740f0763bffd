"""`method=study/<name>`: comparisons at several points, in one table with figures."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fusion_bench_featcal.fusionbench.console import at_the_end
from fusion_bench_featcal.fusionbench.options import names_of, plain
from fusion_bench_featcal.lab.compare.algorithm import (
    STAYS,
    ComparisonAlgorithm,
    PlannedPoint,
    show_with,
)
from fusion_bench_featcal.lab.compare.axes import Design
from fusion_bench_featcal.lab.compare.points import POOLS, Point, program_config
from fusion_bench_featcal.lab.compare.reports import write_reports
from fusion_bench_featcal.lab.compare.runs import GridRun
from fusion_bench_featcal.lab.report.study import Study
from fusion_bench_featcal.lab.report.views import failures
from fusion_bench_featcal.plurals import counted
from fusion_bench_featcal.results.remarks import next_lines
from fusion_bench_featcal.results.summary import FailedCell
from fusion_bench_featcal.settings import CalibrationError

log = logging.getLogger(__name__)

_COMPARISON = "fusion_bench_featcal.lab.compare.ComparisonAlgorithm"


class StudyAlgorithm(ComparisonAlgorithm):
    """Runs comparisons along axes and combines their results.

    Run by `fusion_bench method=study/<name> modelpool=...`. Cells are those of `method=compare` in
    the same store, so that an interrupted study can be resumed and studies share common cells.
    """

    name = "study"
    setting_kinds = (Design, *ComparisonAlgorithm.setting_kinds)
    _config_mapping = ComparisonAlgorithm._config_mapping | {n: n for n in names_of([Design])}

    def _read(self, settings: Sequence[Any]) -> None:
        self.design: Design = settings[0]
        super()._read(settings[1:])

    def planned(self, are_apart: bool) -> list[PlannedPoint]:
        """Return the points of all axes, like `ComparisonAlgorithm.planned`."""
        config, design = program_config(self._program), self.design
        planned = [self._at(point, config) for point in design.points(config)]
        labels = {name for planned_point in planned for name in planned_point.point.labels}
        for name in set(design.over) - labels:
            raise ValueError(
                f"method.over: {name!r} is no label of this study's points: "
                f"{', '.join(sorted(labels)) or 'they have none'}"
            )
        texts = {
            json.dumps(planned_point.point.labels, sort_keys=True, default=str)
            for planned_point in planned
        }
        seeds, cells = (
            {planned_point.point.seed for planned_point in planned},
            sum(len(planned_point.grid) for planned_point in planned),
        )
        size = f"points: {len(texts)}, seeds: {len(seeds)}, cells: {cells}"
        shared = "finished cells, and those that points share, are not run again"
        log.info("%s: %s; %s", design.study, size, shared)
        return planned

    def _at(self, point: Point, config: DictConfig) -> PlannedPoint:
        """Return a point with its comparison, the method in its config."""
        changed = point.changed(config)
        keys = {key: v for key, v in changed.method.items() if key not in names_of([Design])}
        OmegaConf.update(changed, "method", {**keys, "_target_": _COMPARISON}, merge=False)
        settings = {key: changed.method[key] for key in keys if key != "_target_"}
        try:
            method = ComparisonAlgorithm(**settings)
            grid = method.grid(changed.modelpool)
        except ValueError as error:
            raise ValueError(f"{error} (at the point {point})") from error
        pools = json.dumps([plain(changed.get(pool)) for pool in POOLS], sort_keys=True)
        return PlannedPoint(point, method.settings, grid, changed, pools)

    def report(
        self, suite: str, runs: Sequence[GridRun], failed: list[FailedCell], folder: Path
    ) -> None:
        """Write and show the study, like `ComparisonAlgorithm.report`."""
        design, written = self.design, []
        for run in runs:
            written += write_reports(folder / "points" / run.point.folder, suite, run)
            failed = failed + run.failed
        study = Study(
            name=design.study,
            suite=suite,
            runs=written,
            failed=failed,
            over=list(design.over),
            against=design.against or {},
            columns=list(design.columns),
        )
        study.write(folder)
        at_the_end(lambda: show_with(study.show, next_lines(folder)))
        if failed:
            cells, lines = counted(len(failed), "cell"), failures(failed)[:5]
            raise CalibrationError(f"{cells} of the study failed; {STAYS}. {'; '.join(lines)}")
