"""Runs with known numbers, and the command `featcal` in this process."""

import contextlib
import io
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fusion_bench_featcal.results import Run, join_folders, summary, write_run

LEVELS = {"base": 0.3, "experts": 0.9, "task_arithmetic": 0.6, "featcal": 0.75}


class Done(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


def featcal(*words: object) -> Done:
    """Run the command `featcal` in this process."""
    (command,) = entry_points(group="console_scripts", name="featcal")
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code: Any = command.load()([str(word) for word in words])
        except SystemExit as end:
            code = end.code
    return Done(int(code or 0), out.getvalue(), err.getvalue())


def error_of(*words: object) -> str:
    """Return the message of a command that fails: one line on stderr."""
    done = featcal(*words)
    lines = done.err.splitlines()
    assert (done.code, len(lines)) == (2, 1), done.err
    assert lines[0].startswith("featcal: error: ")
    return lines[0].removeprefix("featcal: error: ")


def flags(share: float, items: int = 200) -> np.ndarray:
    """The first `share` of the items right, the rest wrong."""
    return np.arange(items) < round(share * items)


def make_run(
    levels: Mapping[str, float] = LEVELS,
    tasks: Sequence[str] = ("cars", "dtd"),
    *,
    seed: int = 42,
    items: bool = True,
    **more: Any,
) -> Run:
    """Every task of a row has the row's level. Rows of `featcal` have settings and cost, too."""
    run = Run(**{"suite": "toy", "merger": "task_arithmetic", **more})
    for name, level in levels.items():
        correct = {task: flags(level) for task in tasks}
        facts: dict[str, Any] = {"seed": None if name in ("base", "experts") else seed}
        if name.startswith("featcal"):
            facts |= {
                "settings": {"ridge_lambda": 0.05, "seed": seed},
                "cost": {"seconds": 10.0, "peak_rss_bytes": 2**30},
                "samples": {task: {"samples": 256, "split": "train"} for task in tasks},
            }
        accuracy = {task: float(flag.mean()) for task, flag in correct.items()}
        run.add_row(name, {"accuracy": accuracy}, correct=correct if items else None, **facts)
    return run


def leave_run(
    folder: Path, levels: Mapping[str, float] = LEVELS, *more: Any, **changes: Any
) -> Path:
    """Write a run and return its folder."""
    return write_run(folder, make_run(levels, *more, **changes))


def leave_seeds(folder: Path) -> Path:
    """Write runs with three calibration seeds: featcal reaches 70, 75 and 80 %."""
    for seed, level in {1: 0.7, 2: 0.75, 3: 0.8}.items():
        leave_run(folder / f"seed{seed}", LEVELS | {"featcal": level}, seed=seed)
    return folder


def leave_rows(folder: Path, rows: Mapping[str, Any], **facts: Any) -> Path:
    """Write a run of `ties`: row -> its level on both tasks, or task -> accuracy or flags."""
    run = Run(suite="toy", merger="ties")
    for name, values in rows.items():
        task_row: Any = (
            values if isinstance(values, Mapping) else dict.fromkeys(("cars", "dtd"), values)
        )
        accuracy = {task: float(np.mean(value)) for task, value in task_row.items()}
        has_flags = any(isinstance(value, np.ndarray) for value in task_row.values())
        run.add_row(name, {"accuracy": accuracy}, correct=task_row if has_flags else None, **facts)
    return write_run(folder, run)


def leave_cells(folder: Path) -> Path:
    """Write cells of a comparison with two numbers of samples and three seeds."""
    leave_rows(folder / "merged", {"experts": 0.9, "ties": 0.5})
    for samples in (8, 64):
        for seed in (1, 2, 3):
            settings = {"samples_per_task": samples, "seed": seed}
            rows = {"featcal": 0.6 + samples / 1000 + seed / 100}
            leave_rows(folder / f"featcal-{samples}-{seed}", rows, settings=settings, seed=seed)
    return folder


def rows_of(*paths: Path, metric: str = "accuracy") -> dict[str, dict[str, Any]]:
    """Return the rows of `summary` by name: a merger's and references' alone, others below it."""
    rows = summary(join_folders(paths), metric).to_dict("records")
    alone = ("base", "experts")
    return {
        row["row"]
        if row["row"] in (*alone, row["merger"])
        else f"{row['merger']}/{row['row']}": row
        for row in rows
    }


def drawn_points(figure: Any) -> dict[str, Any]:
    """Return row -> its points `[n, 2]` in the first panel of a figure."""
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    lines = [container.lines[0] for container in figure.axes[0].containers]
    return {name: line.get_xydata() for name, line in zip(names, lines, strict=True)}
