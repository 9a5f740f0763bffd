"""Files of runs: `lines.csv`, `items.npz`, `run.json`, `report.json`, and folders of them."""

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from fusion_bench_featcal.errors import ReportError
from fusion_bench_featcal.errors.masking import masked
from fusion_bench_featcal.files import (
    LOG_DIR_SETTING,
    prepare_directory,
    write_atomic,
)
from fusion_bench_featcal.files.json_files import json_text

from .columns import AVERAGE, COST, DIMENSIONS, VALUE
from .frame import Frame, accuracy_frame
from .joining import Results, join
from .notes import Note
from .rows import Line, Row, check_row
from .run import Run

LINES_FILE, ITEMS_FILE, RUN_FILE, REPORT_FILE = (
    "lines.csv", "items.npz", "run.json", "report.json",
)  # fmt: skip
SCHEMA = 3
"""Version of this layout of files. Files of other versions are refused."""
ROW_COLUMNS = ("suite", "merger", "name", "seed", "settings", "conditions", "samples")
RUN_COLUMNS = ("suite", "merger", "versions", "device")
_LISTS: dict[str, type] = {"rows": Row, "notes": Note}
_NAMES = {*DIMENSIONS} - {"seed"}
"""Columns of texts, which stay texts even if they look like numbers."""


def write_run(
    folder: str | Path, run: Run, setting: str = LOG_DIR_SETTING, frame: Frame | None = None
) -> Path:
    """Write the files of a run and return its folder.

    `read_run` needs `run.json`, which is thus written after its other files. `report.json` repeats
    accuracies and shares for other programs, and comes last.

    Args:
        folder: The folder, which is created.
        run: The run.
        setting: The setting that chose the folder, for messages.
        frame: The run's `accuracy_frame`, if the caller has it already.

    Raises:
        ReportError: If a value has no JSON form, or a file cannot be written.
    """
    content = {key: getattr(run, key) for key in RUN_COLUMNS}
    content["rows"] = [
        {key: getattr(row, key) for key in (*ROW_COLUMNS, "facts")} for row in run.rows
    ]
    content["notes"] = [asdict(note) for note in run.notes]
    texts = {
        LINES_FILE: lines_csv(run.all_lines()),
        RUN_FILE: masked(json_text({"schema": SCHEMA, **content})),
    }
    folder = prepare_directory(folder, setting)
    (folder / RUN_FILE).unlink(missing_ok=True)  # files of an earlier run
    (folder / ITEMS_FILE).unlink(missing_ok=True)
    if any(row.correct for row in run.rows):
        write_atomic(folder / ITEMS_FILE, _pack_flags(run.rows), setting)
    for name, text in texts.items():
        write_atomic(folder / name, text, setting)
    lines = (accuracy_frame(run) if frame is None else frame).lines
    shares = {run.title(line.first): line.share for line in lines if line.first.is_repair}
    report = {"schema": SCHEMA, "rows": run.accuracy, "recovered_gap": shares}
    write_atomic(folder / REPORT_FILE, json_text(report), setting)
    return folder


def read_run(folder: str | Path) -> Run:
    """Read the files of `write_run`.

    Raises:
        ReportError: If a file is missing, damaged or of another layout.
    """
    folder = Path(folder)
    file = folder / RUN_FILE
    try:
        content = json.loads(file.read_bytes())
        if (schema := content.get("schema")) != SCHEMA:
            text = f"has schema {schema!r}, but this version reads {SCHEMA}: run again"
            raise ReportError(f"{file} {text}")
        rows, notes = ([kind(**values) for values in content[key]] for key, kind in _LISTS.items())
        run = Run(rows=rows, notes=notes, **{key: content[key] for key in RUN_COLUMNS})
        file = folder / LINES_FILE
        _add_lines(run, read_lines_csv(file))
        file = folder / ITEMS_FILE
        if file.exists():
            # The archive has checksums of its members.
            with np.load(file, allow_pickle=False) as archive:
                for index, (row, task) in enumerate(json.loads(archive["index"].tobytes())):
                    flags = run.rows[row].correct = dict(run.rows[row].correct or {})
                    flags[task] = archive[f"array_{index}"]
    except (OSError, ReportError) as error:
        raise ReportError(str(error)) from error
    except Exception as error:  # any error of zip, its decompressors and numpy for invalid bytes
        raise ReportError(f"{file} is damaged: {error!r}") from error
    tasks: dict[str, list[str]] = {}
    for row in run.rows:
        check_row(row, tasks.setdefault(row.suite, row.tasks), str(folder))
    return run


def _add_lines(run: Run, lines: Iterable[Line]) -> None:
    """Store values of whole models in their rows, and all other lines in `run.lines`."""
    rows = {(row.suite, row.merger, row.name): row for row in run.rows}
    for line in lines:
        row = rows.get((line["suite"], line["merger"], line["row"]))
        task, metric, value = line["task"], line["metric"], line[VALUE]
        if row is None or line["block"] or line.keys() - {*DIMENSIONS, VALUE}:
            run.lines.append(line)
        elif metric.startswith(COST):
            row.cost[metric.removeprefix(COST)] = value
        elif task != AVERAGE:
            row.scores.setdefault(metric, {})[task] = value


# ---- folders


def load(*folders: str | Path) -> Any:
    """Return all measured values in or below folders, one number per line.

    Args:
        *folders: Folders of runs, comparisons, finished cells or diagnoses, or their parents.

    Returns:
        A pandas DataFrame: suite, merger, row, task, block, seed, metric, the settings that differ
        between runs, and `value`.

    Raises:
        ReportError: If there are no results, a file is damaged, or runs of a suite have different
            tasks.
    """
    return join_folders(folders).frame()


def join_folders(folders: Iterable[str | Path]) -> Results:
    """Find, read and join runs (see `load`)."""
    ages = {folder: (folder / RUN_FILE).stat().st_mtime_ns for folder in find_runs(folders)}
    return join({folder: read_run(folder) for folder in sorted(ages, key=lambda f: (ages[f], f))})


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """Return the folders of runs at or below paths, each once.

    Raises:
        ReportError: If a path does not exist or has no run.
    """
    folders: dict[Path, Path] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise ReportError(f"no such run: {path}")
        folder = path if path.is_dir() else path.parent
        files = (file for file in sorted(folder.rglob(RUN_FILE)) if file.is_file())
        below = [file.parent for file in files if "/." not in f"/{file.relative_to(folder)}"]
        if not below:
            raise ReportError(
                f"no run in or below {path}: a run's log directory contains {RUN_FILE}. An earlier "
                "version may have written it without this file: then run again"
            )
        folders |= {run.resolve(): run for run in below}
    return list(folders.values())


# ---- lines.csv


def table_csv(heads: Sequence[str], rows: Iterable[Mapping[str, object]]) -> str:
    """Return rows as CSV, with nothing for a missing value."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows([row.get(head, "") for head in heads] for row in rows)
    return text.getvalue()


def lines_csv(lines: Iterable[Line]) -> str:
    """Return lines as CSV. Labels become the first columns.

    Raises:
        ReportError: If a value is not finite.
    """
    lines = list(lines)
    labels = dict.fromkeys(key for line in lines for key in line
                           if key not in (*DIMENSIONS, VALUE))  # fmt: skip
    for line in lines:
        if not math.isfinite(line[VALUE]):
            names = ", ".join(f"{key} {line[key]}" for key in DIMENSIONS[2:] if line.get(key))
            raise ReportError(f"{line[VALUE]} is not a valid value of {names}")
    return table_csv([*labels, *DIMENSIONS, VALUE], lines)


def read_lines_csv(path: Path) -> list[Line]:
    """Read a file of `lines_csv`. Seeds and labels that look like numbers become numbers.

    A label with an empty cell is left out.

    Raises:
        OSError: If the file cannot be read.
        ValueError, TypeError, KeyError: If a line has other columns, or a value that is no number.
    """
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if missing := {*DIMENSIONS, VALUE} - {*(reader.fieldnames or ())}:
            raise ValueError(f"its first line has no {', '.join(missing)}")
        return [_parse_line(cells) for cells in reader]


def _parse_line(cells: Mapping[str, str]) -> Line:
    filled = {key: text for key, text in cells.items() if text or key in DIMENSIONS}
    line: Line = {key: t if key in _NAMES else _parse_number(t) for key, t in filled.items()}
    if not math.isfinite(line[VALUE]):
        raise ValueError(f"{line[VALUE]} is not a valid value of {line}")
    return line


def _parse_number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


# ---- items.npz


def _pack_flags(rows: Iterable[Row]) -> bytes:
    """Return the flags of all models as an archive of numbered arrays.

    Names of models and tasks may contain any character. An index (JSON as bytes) maps the arrays'
    numbers to these names.
    """
    flags = {
        (n, task): hits for n, row in enumerate(rows) for task, hits in (row.correct or {}).items()
    }
    arrays: dict[str, Any] = {f"array_{n}": hits for n, hits in enumerate(flags.values())}
    arrays["index"] = np.frombuffer(json.dumps([*flags]).encode(), dtype=np.uint8)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()
