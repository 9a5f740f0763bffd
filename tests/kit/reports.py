"""Reports with known numbers, outputs of the command `featcal`, and its pages read as text."""

import contextlib
import csv
import io
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from html.parser import HTMLParser
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from fusion_bench_featcal.results import Report
from fusion_bench_featcal.results.cells import SUFFIX, CellResult, save_cell

GOLDEN = Path(__file__).parents[1] / "golden" / "data" / "runs"
LEVELS = {"base": 0.3, "experts": 0.9, "task_arithmetic": 0.6, "featcal": 0.75}
COLUMNS = ("suite", "merger", "row", "task", "block", "class", "seed", "metric", "value")


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


def make_report(
    levels: Mapping[str, float] = LEVELS,
    tasks: Sequence[str] = ("cars", "dtd"),
    *,
    seed: int = 42,
    items: bool = True,
    settings: Mapping[str, Any] | None = None,
    **more: Any,
) -> Report:
    """Every task of a row has the row's level. Rows of `featcal` have settings and cost."""
    report = Report(**{"suite": "toy", "upstream": "task_arithmetic", **more})
    report.seeds = {"calibration": seed}
    for name, level in levels.items():
        correct = {task: flags(level) for task in tasks}
        calibrated = name.startswith("featcal")
        facts: dict[str, Any] = {
            "settings": {"ridge_lambda": 0.05, "seed": seed, **(settings or {})},
            "cost": {"seconds": 10.0, "peak_rss_bytes": 2**30},
            "samples": {task: {"samples": 256, "split": "train"} for task in tasks},
        }
        accuracy = {task: flag.mean() for task, flag in correct.items()}
        report.add_row(
            name, accuracy, correct=correct if items else None, **(facts if calibrated else {})
        )
    return report


def leave_run(
    folder: Path,
    levels: Mapping[str, float] = LEVELS,
    *more: Any,
    notes: Iterable[Mapping[str, str]] = (),
    **changes: Any,
) -> Path:
    """Write a report, with notes of given kinds and texts, and return its folder."""
    make_report(levels, *more, **changes).write(folder)
    if notes:
        empty = {"kind": "note", "text": "", "row": "", "task": "", "merger": ""}
        patch(folder, notes=[empty | dict(note) for note in notes])
        Report.load(folder).write(folder)
    return folder


def leave_seeds(folder: Path) -> list[Path]:
    """Runs with three calibration seeds: featcal reaches 70, 75 and 80 %."""
    levels = {1: 0.7, 2: 0.75, 3: 0.8}
    return [
        leave_run(folder / f"seed{seed}", LEVELS | {"featcal": level}, seed=seed)
        for seed, level in levels.items()
    ]


def leave_flags(folder: Path, rows: Mapping[str, Mapping[str, np.ndarray]], **more: Any) -> Path:
    """Write a run of the merger `ties` with flags per item of its rows' tasks."""
    report = Report(**{"suite": "toy", "upstream": "ties", **more})
    for name, tasks in rows.items():
        accuracy = {task: flag.mean() for task, flag in tasks.items()}
        report.add_row(name, accuracy, correct=tasks)
    return report.write(folder).parent


def leave_cells(folder: Path) -> Path:
    """Write cells of a comparison with two numbers of samples and two seeds."""
    folder.mkdir(parents=True)
    for row, level in (("experts", 0.9), ("ties", 0.5)):
        leave_cell(folder, row, level, merger="" if row == "experts" else "ties")
    for samples in (8, 64):
        for seed in (1, 2):
            settings = {"samples_per_task": samples, "seed": seed}
            level = 0.6 + samples / 1000 + seed / 100
            leave_cell(folder, "featcal", level, settings=settings, seed=seed)
    return folder


def leave_cell(folder: Path, row: str, level: float, **more: Any) -> None:
    """Write one cell, with the same accuracy on every task."""
    accuracy: dict[str, float] = {"cars": level, "dtd": level}
    name = "-".join(map(str, (row, *(more.get("settings") or {}).values())))
    fields: dict[str, Any] = {"suite": "toy", "merger": "ties"} | more
    save_cell(folder / f"{name}{SUFFIX}", CellResult(row=row, accuracy=accuracy, **fields))


def leave_lines(folder: Path, lines: Iterable[Mapping[str, Any]]) -> Path:
    """Write the long table `lines.csv` of a run."""
    with (folder / "lines.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(cast(Any, lines))
    return folder


def content_of(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's `report.json`."""
    return json.loads((folder / "report.json").read_text())


def patch(folder: Path, **changes: Any) -> Path:
    """Change values of a folder's `report.json`."""
    (folder / "report.json").write_text(json.dumps(content_of(folder) | changes))
    return folder


def summary(*paths: Path) -> dict[str, dict[str, Any]]:
    """Return the rows of `featcal report --out`. A repair is called `merger/row`."""
    with tempfile.TemporaryDirectory() as out:
        done = featcal("report", *paths, "--out", out)
        assert done.code == 0, done.err
        rows = content_of(Path(out))["rows"]
    alone = ("base", "experts")
    return {
        name if (name := row["name"]) in (*alone, row["upstream"]) else f"{row['upstream']}/{name}":
        row for row in rows
    }  # fmt: skip


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
