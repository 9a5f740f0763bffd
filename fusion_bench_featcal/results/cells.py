"""Finished cells of comparisons: one file per cell, complete or absent."""

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from fusion_bench_featcal.files import ReportError, write_atomic
from fusion_bench_featcal.json_files import json_text, plain

from .curves import Curves, as_curves
from .items import as_correct

SCHEMA = 1
SUFFIX = ".cell.npz"
RESULTS_DIR = "method.results_dir"
_CONTENT = "content"


@dataclass(kw_only=True)
class CellResult:
    """Result of one row of a comparison.

    Attributes:
        suite: Name of the model pool.
        merger: The upstream merger, or "" for the base and the experts.
        row: The row: a reference, the merger itself, or a method on it.
        accuracy: Task -> accuracy in 0..1.
        loss: Task -> loss, if the task pool computes one and it is finite.
        settings: Settings of the row's method. The settings of the pool's part (`tasks`) included.
        conditions: Further values by which cells of a row differ: the upstream merger's settings
            for a method on it, and the precision.
        cost: Its cost, and the size that it adds to the model (see `Report.cost`).
        samples: Task -> {"samples", "split"} used, empty for methods without data.
        seed: Seed of its samples and training, or None without randomness.
        notes: Sentences for the reader.
        curves: Task -> (step, loss) of its training, in order, empty without training.
        versions: Versions of packages.
        device: The machine.
        correct: Task -> bool `[items]`, or None if the task pool has no such flags.
    """

    suite: str
    merger: str
    row: str
    accuracy: dict[str, float]
    loss: dict[str, float] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    conditions: dict[str, Any] = field(default_factory=dict)
    cost: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, dict[str, Any]] = field(default_factory=dict)
    seed: int | None = None
    notes: list[str] = field(default_factory=list)
    curves: Curves = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    device: dict[str, Any] = field(default_factory=dict)
    correct: Mapping[str, Any] | None = None


def save_cell(path: Path, cell: CellResult) -> None:
    """Write a finished cell.

    Raises:
        ReportError: If a part of it has no JSON form, or the file cannot be written.
    """
    content = {
        entry.name: plain(getattr(cell, entry.name), entry.name)
        for entry in fields(cell)
        if entry.name != "correct"
    }
    flags = dict(cell.correct or {})
    content |= {"schema": SCHEMA, "items": None if cell.correct is None else list(flags)}
    arrays: dict[str, Any] = {
        f"array_{number}": as_correct(values, task)
        for number, (task, values) in enumerate(flags.items())
    }
    arrays[_CONTENT] = np.frombuffer(json_text(content).encode(), dtype=np.uint8)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    write_atomic(path, buffer.getvalue(), RESULTS_DIR)


def load_cell(path: Path) -> CellResult:
    """Read a file of `save_cell`.

    Raises:
        ReportError: If it is damaged or of another schema.
    """
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as archive:
            content = json.loads(archive[_CONTENT].tobytes())
            schema, items = content.pop("schema"), content.pop("items")
            if schema != SCHEMA:
                raise ReportError(f"{path} has schema {schema}, not {SCHEMA}: remove it")
            cell = CellResult(**content)
            cell.curves = as_curves(cell.curves, str(path))
            if items is not None:
                cell.correct = {task: archive[f"array_{n}"] for n, task in enumerate(items)}
            return cell
    except ReportError:
        raise
    except Exception as error:  # zip, numpy and JSON raise many types for damaged bytes
        raise ReportError(f"{path} is damaged, remove it: {error!r}") from error


def load_cells(folder: Path) -> list[CellResult]:
    """Read all finished cells in a folder, the oldest first.

    Raises:
        ReportError: As `load_cell`.
    """
    files = sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: (path.stat().st_mtime_ns, path))
    return [load_cell(path) for path in files]
