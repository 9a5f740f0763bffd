"""Reports with known numbers, outputs of the command `featcal`, and its pages read as text."""

import contextlib
import io
import json
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fusion_bench_featcal.results import Run, join_folders, summary, write_run

GOLDEN = Path(__file__).parents[1] / "golden" / "data" / "runs"
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
    settings: Mapping[str, Any] | None = None,
    merger: str = "task_arithmetic",
    **more: Any,
) -> Run:
    """Every task of a row has the row's level. Rows of `featcal` have settings and cost, too."""
    run = Run(**{"suite": "toy", "merger": merger, **more})
    for name, level in levels.items():
        correct = {task: flags(level) for task in tasks}
        facts: dict[str, Any] = {"seed": None if name in ("base", "experts") else seed}
        if name.startswith("featcal"):
            facts |= {
                "settings": {"ridge_lambda": 0.05, "seed": seed, **(settings or {})},
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


def leave_seeds(folder: Path) -> list[Path]:
    """Runs with three calibration seeds: featcal reaches 70, 75 and 80 %."""
    levels = {1: 0.7, 2: 0.75, 3: 0.8}
    return [
        leave_run(folder / f"seed{seed}", LEVELS | {"featcal": level}, seed=seed)
        for seed, level in levels.items()
    ]


def leave_flags(
    folder: Path, rows: Mapping[str, Mapping[str, np.ndarray]], *, seed: int = 0, **more: Any
) -> Path:
    """Write a run of the merger `ties` with flags per item of its rows' tasks."""
    run = Run(**{"suite": "toy", "merger": "ties", **more})
    for name, tasks in rows.items():
        accuracy = {task: float(flag.mean()) for task, flag in tasks.items()}
        run.add_row(name, {"accuracy": accuracy}, correct=tasks, seed=seed)
    return write_run(folder, run)


def leave_cells(folder: Path) -> Path:
    """Write cells of a comparison with two numbers of samples and three seeds."""
    for row, level in (("experts", 0.9), ("ties", 0.5)):
        leave_cell(folder / row, row, level)
    for samples in (8, 64):
        for seed in (1, 2, 3):
            settings = {"samples_per_task": samples, "seed": seed}
            level = 0.6 + samples / 1000 + seed / 100
            name = f"featcal-{samples}-{seed}"
            leave_cell(folder / name, "featcal", level, settings=settings, seed=seed)
    return folder


def leave_cell(folder: Path, row: str, level: float, **more: Any) -> Path:
    """Write one cell, with the same accuracy on every task."""
    run = Run(suite="toy", merger="ties")
    run.add_row(row, {"accuracy": {"cars": level, "dtd": level}}, **more)
    return write_run(folder, run)


def content_of(folder: Path, name: str = "report.json") -> dict[str, Any]:
    """Return the content of a folder's JSON file."""
    return json.loads((folder / name).read_text())


def rows_of(*paths: Path, metric: str = "accuracy") -> dict[str, dict[str, Any]]:
    """Return the rows of `summary` by `merger/row`, or the name of a reference or merger."""
    frame = summary(join_folders(paths), metric)
    alone = ("base", "experts")
    return {
        row["row"]
        if row["row"] in (*alone, row["merger"])
        else f"{row['merger']}/{row['row']}": row
        for row in frame.to_dict("records")
    }


VOID = {"meta", "input"}
LINES = ("h1", "h2", "h3", "p", "li", "tr", "figcaption", "summary")


class Page(HTMLParser):
    """Elements of a page with their text. Elements that are not closed are refused."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[dict[str, Any]] = []
        self._open: list[dict[str, Any]] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        within = [element["tag"] for element in self._open]
        element = {"tag": tag, "text": "", "within": within, **dict(attrs)}
        self.elements.append(element)
        if tag in ("td", "th"):
            self._add(" | ")
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()["tag"] == tag

    def handle_data(self, data: str) -> None:
        self._add(data)

    def _add(self, text: str) -> None:
        for element in self._open:
            element["text"] += text

    def texts(self, *tags: str) -> list[str]:
        """Texts of all elements of some kinds."""
        return [" ".join(e["text"].split()) for e in self.elements if e["tag"] in tags]

    def lines(self) -> list[str]:
        """The page's headings, sentences and rows of tables, without figures."""
        inside = [e for e in self.elements if e["tag"] in LINES and "svg" not in e["within"]]
        return [" ".join(element["text"].split()).removeprefix("| ") for element in inside]
