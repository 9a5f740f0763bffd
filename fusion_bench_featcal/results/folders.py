"""Runs found in and below folders."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fusion_bench_featcal.errors import ReportError

from .joining import Results, join
from .lines import RUN_FILE, read_run


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
    runs = {folder: read_run(folder) for folder in find(folders)}
    return join(dict(sorted(runs.items(), key=lambda entry: _changed(entry[0]))))


def find(paths: Iterable[str | Path]) -> list[Path]:
    """Return the folders of runs at or below paths, each once.

    Raises:
        ReportError: If a path does not exist or has no run.
    """
    folders: dict[Path, Path] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise ReportError(f"no such run: {path}")
        folder = path if path.is_dir() else path.parent
        below = [file.parent for file in sorted(folder.rglob(RUN_FILE)) if _is_run(file, folder)]
        if not below:
            raise ReportError(
                f"no run in or below {path}: a run's log directory has {RUN_FILE}, unless an "
                "earlier version wrote it: then run again"
            )
        folders |= {run.resolve(): run for run in below}
    return list(folders.values())


def _is_run(file: Path, start: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(start).parts)
    return file.is_file() and not hidden


def _changed(folder: Path) -> tuple[int, Path]:
    return (folder / RUN_FILE).stat().st_mtime_ns, folder
