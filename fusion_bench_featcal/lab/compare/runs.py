"""Runs the cells of one or several grids. Finished cells are not run again."""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fusion_bench_featcal.lab.compare.cells import CellMaker, Failure, Outcome
from fusion_bench_featcal.lab.compare.grid import NONE, Grid
from fusion_bench_featcal.lab.compare.jobs import Job, Workers
from fusion_bench_featcal.lab.compare.keys import Cell
from fusion_bench_featcal.lab.compare.points import Point
from fusion_bench_featcal.lab.compare.store import CellResult
from fusion_bench_featcal.plurals import counted
from fusion_bench_featcal.results.summary import FailedCell

log = logging.getLogger(__name__)

BUSY_SECONDS = 5


@dataclass
class GridRun:
    """One pass over the grid of a point."""

    point: Point
    grid: Grid
    cells: list[Cell]
    maker: CellMaker
    notes: dict[str, str]  # merger or cell -> footnote
    config: str = ""  # JSON of the program's config, for workers
    outcomes: dict[str, CellResult | Failure] = field(default_factory=dict)  # by title

    @property
    def results(self) -> dict[tuple[str | None, str], CellResult]:
        """Results by merger, None for references, and cell."""
        pairs = ((cell, self.outcomes.get(cell.title)) for cell in self.cells)
        return {(c.owner, c.name): result for c, result in pairs if isinstance(result, CellResult)}

    @property
    def failed(self) -> list[FailedCell]:
        """Cells that failed, in the order of the grid."""
        pairs = ((cell, self.outcomes.get(cell.title)) for cell in self.cells)
        return [
            self.point.failed(c.owner, c.name, e.reason) for c, e in pairs if isinstance(e, Failure)
        ]

    def merger_failure(self, cell: Cell) -> Failure | None:
        """Return a failure for a cell whose merger failed, or None."""
        merged = self.outcomes.get(f"{cell.owner}--{NONE}") if cell.is_over_merger else None
        return Failure(f"not merged: {merged.reason}") if isinstance(merged, Failure) else None


def run_grids(runs: Sequence[GridRun], workers: Workers) -> None:
    """Run unfinished cells. A failing cell is recorded and does not stop the others.

    References and mergers come first. Equal cells of several grids run once.

    Args:
        runs: The grids, whose outcomes are filled.
        workers: The processes for running cells.
    """
    for is_over_merger in (False, True):
        pending: dict[tuple[str, str], list[tuple[GridRun, Cell]]] = {}
        for run in runs:
            for cell in run.cells:
                if cell.is_over_merger != is_over_merger:
                    continue
                if failure := run.merger_failure(cell):
                    run.outcomes[cell.title] = failure
                else:
                    pending.setdefault((cell.title, cell.key), []).append((run, cell))
        while pending:
            outcomes = _outcomes([users[0] for users in pending.values()], workers)
            for name, outcome in zip(list(pending), outcomes, strict=True):
                if outcome is not None:
                    for run, cell in pending.pop(name):
                        run.outcomes[cell.title] = outcome
            if pending:
                cells = counted(len(pending), "cell")
                log.info("waiting for %s that other processes run", cells)
                time.sleep(BUSY_SECONDS)


def _outcomes(cells: Sequence[tuple[GridRun, Cell]], workers: Workers) -> Iterable[Outcome]:
    if not workers.are_apart:
        for number, (run, cell) in enumerate(cells, 1):
            log.info("cell %d of %d: %s", number, len(cells), cell.title)
            yield _logged(cell, run.maker.run(cell, workers.run))
        return
    finished = [run.maker.store.result(cell.title, cell.key) for run, cell in cells]
    missing = [pair for pair, result in zip(cells, finished, strict=True) if result is None]
    jobs = [Job.of(cell, run.maker, run.config, workers.run) for run, cell in missing]
    outcomes = iter(workers.outcomes(jobs))
    for (_, cell), result in zip(cells, finished, strict=True):
        yield _logged(cell, next(outcomes)) if result is None else result


def _logged(cell: Cell, outcome: Outcome) -> Outcome:
    if isinstance(outcome, Failure):
        log.error("cell %s failed: %s\n%s", cell.title, outcome.reason, outcome.trace)
    return outcome
