"""Reports with known numbers, for the tests of this folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fusion_bench_featcal.results import Report
from fusion_bench_featcal.results.notes import NOTE, Note
from fusion_bench_featcal.results.summary import Summary, SummaryRow

SIX = ("mini_mnist", "mini_fashion_mnist", "mini_notmnist", "mini_optdigits", "mini_latin",
       "mini_greek")  # fmt: skip
LEVELS = {"base": 0.3, "experts": 0.9, "task_arithmetic": 0.6, "featcal": 0.75}


def flags(share: float, items: int = 200) -> np.ndarray:
    """The first `share` of the items right, the rest wrong."""
    return np.arange(items) < round(share * items)


def make_report(
    levels: Mapping[str, float] = LEVELS,
    tasks: Sequence[str] = ("cars", "dtd"),
    *,
    seed: int = 42,
    items: bool = True,
    settings: Mapping[str, Any] | None = None,
    notes: Sequence[Note | str] = (),
    **more: Any,
) -> Report:
    """Every task of a row has the row's level; `featcal` rows carry settings, cost and samples."""
    report = Report(**{"suite": "toy", "upstream": "task_arithmetic", **more})
    report.note(*(Note(NOTE, note) if isinstance(note, str) else note for note in notes))
    report.seeds = {"calibration": seed}
    for name, level in levels.items():
        correct = {task: flags(level) for task in tasks}
        calibrated = name.startswith("featcal")
        report.add_row(
            name,
            {task: flag.mean() for task, flag in correct.items()},
            correct=correct if items else None,
            settings={"ridge_lambda": 0.05, "seed": seed, **(settings or {})}
            if calibrated
            else None,
            cost={"seconds": 10.0, "peak_rss_bytes": 2**30} if calibrated else None,
            samples={task: {"samples": 256, "split": "train"} for task in tasks}
            if calibrated
            else None,
        )
    return report


def leave_run(folder: Path, featcal: float = 0.75, **more: Any) -> Path:
    make_report({**LEVELS, "featcal": featcal}, **more).write(folder)
    return folder


def row_of(summary: Summary, name: str, upstream: str | None = None) -> SummaryRow:
    rows = (row for row in summary.rows if row.name == name)
    (row,) = (row for row in rows if upstream in (None, row.upstream))
    return row


def leave_seeds(folder: Path) -> list[Path]:
    """Runs with three calibration seeds: featcal reaches 70, 75 and 80 %."""
    levels = {1: 0.7, 2: 0.75, 3: 0.8}
    return [leave_run(folder / f"seed{s}", level, seed=s) for s, level in levels.items()]
