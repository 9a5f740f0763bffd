"""One self-contained HTML page of results: tables, figures and notes."""

import os
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from urllib.parse import quote

from fusion_bench_featcal.errors import ReportError
from fusion_bench_featcal.files import prepare_directory, write_atomic

from .figures import figures_of, svg
from .frame import Frame
from .joining import Results
from .sentences import sentences, verdicts
from .show import tables_of
from .tables import Table, without_codes

_SUFFIXES = (".html", ".htm")


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
        tables=[_with_mergers(table) for table in tables_of(frame)],
        figures=figures_of(frame),
        verdicts=verdicts(frame),
        lines=sentences(frame),
        machines=list(dict.fromkeys(machines)),
        links=links,
    )
    return without_codes(text.strip()) + "\n"


def _with_mergers(table: Table) -> Table:
    """Return a table whose heads include the merger, because readers can sort its lines."""
    lines, merger = [], ""
    for head, cells in table.lines:
        is_below = head.startswith("+ ") and merger
        merger = merger if is_below else head
        lines.append((f"{merger} {head}" if is_below else head, cells))
    return replace(table, lines=lines)
