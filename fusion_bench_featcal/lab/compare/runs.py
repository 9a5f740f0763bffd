"""The cells of one or several grids, run where the settings say; finished cells stay finished."""

import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fusion_bench_featcal.lab.compare.cells import CellMaker, Failure, Outcome
from fusion_bench_featcal.lab.compare.grid import Grid
from fusion_bench_featcal.lab.compare.jobs import Job, Workers
from fusion_bench_featcal.lab.compare.keys import Cell, CellKeys
from fusion_bench_featcal.lab.compare.store import CellResult, ResultStore
from fusion_bench_featcal.results.find import FailedCell

log = logging.getLogger(__name__)

BUSY_SECONDS = 5


@dataclass
class GridRun:
    """One pass over a grid.

    Attributes:
        grid: Mergers, methods and their cells.
        keys: Fingerprints on the pools of the cells.
        store: Finished results and merged models.
        seed: Seed of mergers and methods.
        program: FusionBench's program.
        log_dir: Folder for the reports that FusionBench's task pools leave.
        config: The program's config as workers need it; None: cells run in this process.
    """

    grid: Grid
    keys: CellKeys
    store: ResultStore
    seed: int
    program: Any = None
    log_dir: Path | None = None
    config: Mapping[str, Any] | None = None
    outcomes: dict[str, CellResult | Failure] = field(default_factory=dict)  # by title

    def __post_init__(self) -> None:
        self.cells = self.keys.cells(self.grid, self.seed)
        self.maker = CellMaker(
            self.grid.cells, self.keys.inputs, self.store, self.seed, self.program, self.log_dir
        )

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
            FailedCell(upstream=cell.owner, name=cell.name, reason=failure.reason, seed=self.seed)
            for cell, failure in pairs
            if isinstance(failure, Failure)
        ]

    def job(self, cell: Cell, run: str) -> Job:
        """Return a cell as a job for workers.

        Args:
            cell: The cell.
            run: Name of the driver's run.
        """
        return Job.of(cell, self.maker, self._config_text, run)

    @cached_property
    def _config_text(self) -> str:
        return json.dumps(self.config)

    def merger_failure(self, cell: Cell) -> Failure | None:
        """Return the failure of a cell whose merger failed."""
        merged = self.outcomes.get(f"{cell.owner}--none") if cell.is_over_merger else None
        return Failure(f"not merged: {merged.reason}") if isinstance(merged, Failure) else None


def run_grids(runs: Sequence[GridRun], workers: Workers) -> None:
    """Run what is not finished; a failing cell is noted and does not stop the others.

    References and mergers come first. Equal cells of several grids run once.

    Args:
        runs: The grids; their outcomes are filled.
        workers: Where cells run.
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
        _run_pending(pending, workers)


def _run_pending(
    pending: dict[tuple[str, str], list[tuple[GridRun, Cell]]], workers: Workers
) -> None:
    while pending:
        first = [users[0] for users in pending.values()]
        busy = {}
        for users, outcome in zip(pending.items(), _outcomes(first, workers), strict=True):
            if outcome is None:
                busy[users[0]] = users[1]
                continue
            for run, cell in users[1]:
                run.outcomes[cell.title] = outcome
        pending = busy
        if pending:
            log.info("waiting for cells that other processes run: %s", len(pending))
            time.sleep(BUSY_SECONDS)


def _outcomes(cells: Sequence[tuple[GridRun, Cell]], workers: Workers) -> Iterable[Outcome]:
    if not workers.are_apart:
        for number, (run, cell) in enumerate(cells, 1):
            log.info("cell %d of %d: %s", number, len(cells), cell.title)
            yield _logged(cell, run.maker.run(cell, workers.run))
        return
    finished = [run.store.result(cell.title, cell.key) for run, cell in cells]
    missing = [each for each, result in zip(cells, finished, strict=True) if result is None]
    made = iter(workers.outcomes([run.job(cell, workers.run) for run, cell in missing]))
    for (_, cell), result in zip(cells, finished, strict=True):
        yield _logged(cell, next(made)) if result is None else result


def _logged(cell: Cell, outcome: Outcome) -> Outcome:
    if isinstance(outcome, Failure):
        log.error("cell %s failed: %s\n%s", cell.title, outcome.reason, outcome.trace)
    return outcome
