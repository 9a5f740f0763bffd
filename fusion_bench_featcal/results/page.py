"""One self-contained HTML page of results: tables, figures and notes."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from fusion_bench_featcal.errors import ReportError
from fusion_bench_featcal.files import prepare_directory, write_atomic

from .figures import figures_of, svg
from .frame import Frame
from .joining import Results
from .names import REFERENCES
from .sentences import sentences, single_repair, verdicts
from .show import tables_of
from .tables import ABSENT, Table, without_codes

_SUFFIXES = (".html", ".htm")
_FIGURE_WIDTH = 10  # inches, which a browser scales to the page


class _Part(NamedTuple):
    """A table of the page.

    The first `references` lines are base and experts, which readers do not sort. `examples` are the
    numbers of test examples of the last columns.
    """

    table: Table
    references: int = 0
    examples: Sequence[str] = ()


def write_page(path: Path, frame: Frame, results: Results, setting: str = "--html") -> Path:
    """Write the page of results atomically and return its path.

    Args:
        path: The file. Links to the runs' files are relative to its folder.
        frame: The frame.
        results: The results in the frame.
        setting: The setting that chose `path`, for messages.

    Raises:
        ReportError: If the path is a folder, has another suffix, or cannot be written.
    """
    if path.is_dir() or path.suffix.lower() not in _SUFFIXES:
        near = path / "report.html" if path.is_dir() else path.with_name(f"{path.name}.html")
        raise ReportError(f"{setting} names a file that ends in .html, such as {near}, not {path}")
    path = prepare_directory(path.parent, setting) / path.name
    return write_atomic(path, page_text(frame, results, path.parent.resolve()), setting)


def page_text(frame: Frame, results: Results, folder: Path) -> str:
    """Return the page for a folder as one document. Values from users appear as plain text."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["svg"] = svg
    template = files(__package__ or "").joinpath("page.html").read_text(encoding="utf-8")
    pairs = ((run.device | run.versions).items() for run in results.runs.values())
    machines = (", ".join(f"{key} {value}" for key, value in run_pairs) for run_pairs in pairs)
    links = {
        str(run_folder): {
            path.name: quote(Path(os.path.relpath(path.resolve(), folder)).as_posix())
            for path in sorted(run_folder.iterdir())
            if path.is_file() and not path.name.startswith(".")
        }
        for run_folder in results.runs
    }
    text = environment.from_string(template).render(
        title=", ".join(dict.fromkeys(run.suite for run in results.runs.values())),
        parts=list(_parts(frame)),
        figures=figures_of(frame, _FIGURE_WIDTH),
        narrow_figures=figures_of(frame),  # for phones
        verdicts=verdicts(frame),
        lines=sentences(frame),
        machines=list(dict.fromkeys(machines)),
        links=links,
    )
    return without_codes(text.strip()) + "\n"


def _parts(frame: Frame) -> Iterator[_Part]:
    """Yield the tables of each suite. A table of models is divided into a summary and tasks."""
    for suite, suite_frame in frame.by_suite().items():
        for table in tables_of(suite_frame):
            if single_repair(suite_frame) or not suite_frame.tasks:
                yield _Part(table)
                continue
            references = sum(line.first.name in REFERENCES for line in suite_frame.lines)
            summary, tasks = _with_mergers(table).split_tasks(len(suite_frame.tasks))
            start = f"{suite}: {frame.metric}"
            title = f"{start} by task{table.title.removeprefix(start)}"
            yield _Part(summary, references)
            yield _Part(replace(tasks, title=title), references, _test_examples(suite_frame))


def _test_examples(frame: Frame) -> list[str]:
    """Return the number of test examples of each task, or nothing if no task's is known."""
    flags = [row.correct for line in frame.lines for row in line.rows if row.correct]
    sizes = [{len(correct[task]) for correct in flags if task in correct} for task in frame.tasks]
    return [" or ".join(map(str, sorted(size))) or ABSENT for size in sizes] if flags else []


def _with_mergers(table: Table) -> Table:
    """Return a table whose heads include the merger, because readers can sort its lines."""
    lines, merger = [], ""
    for head, cells in table.lines:
        is_below = head.startswith("+ ") and merger
        merger = merger if is_below else head
        lines.append((f"{merger} {head}" if is_below else head, cells))
    return replace(table, lines=lines)
