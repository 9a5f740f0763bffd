"""Search for folders with results: runs, comparisons with the runs below them, and cells."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fusion_bench_featcal.files import ReportError
from fusion_bench_featcal.json_files import read_json
from fusion_bench_featcal.results.cells import SUFFIX
from fusion_bench_featcal.results.report_files import REPORT_FILE
from fusion_bench_featcal.results.schema import COMPARISON_KIND, KIND, check_comparison
from fusion_bench_featcal.results.summary import FailedCell


@dataclass
class ResultFolders:
    """Results at or below some paths, each folder once."""

    runs: list[Path] = field(default_factory=list)
    comparisons: list[Path] = field(default_factory=list)
    cells: list[Path] = field(default_factory=list)
    failed: list[FailedCell] = field(default_factory=list)

    @property
    def number(self) -> int:
        """Number of folders."""
        return len(self.runs) + len(self.comparisons) + len(self.cells)


def find(paths: Iterable[str | Path]) -> ResultFolders:
    """Find runs, comparisons and folders of cells: each path itself, or everything below it.

    In a comparison's folder only runs named by its report count.

    Args:
        paths: Paths to search.

    Raises:
        ReportError: If a path does not exist or has no results, or a report is damaged.
    """
    folders = ResultFolders()
    for path in map(Path, paths):
        if not path.exists():
            raise ReportError(f"no such run: {path}")
        if path.name == REPORT_FILE and path.is_file():
            path = path.parent
        before = folders.number
        _search(path, folders)
        if folders.number == before:
            raise ReportError(f"no run in or below {path}: a run's log directory has {REPORT_FILE}")
    return ResultFolders(
        _once(folders.runs),
        _once(folders.comparisons),
        _once(folders.cells),
        list(dict.fromkeys(folders.failed)),
    )


def refuse_run(directory: str | Path, setting: str) -> None:
    """Refuse to write several runs' report over the report of one.

    Raises:
        ReportError: If the directory has the report of one run, or a `report.json` that is not
            valid JSON, so that its kind is unknown.
    """
    if _content(Path(directory)).get("kind") == KIND:
        raise ReportError(
            f"{directory} holds the report of a run, which would be overwritten. "
            f"Change {setting} to another directory."
        )


def _search(folder: Path, folders: ResultFolders) -> None:
    content = _content(folder)
    if any(folder.glob(f"*{SUFFIX}")):
        folders.cells.append(folder)
        return
    if content.get("kind") == KIND:
        folders.runs.append(folder)
        return
    if content.get("kind") == COMPARISON_KIND:
        folders.comparisons.append(folder)
        check_comparison(content, str(folder / REPORT_FILE))
        if content.get("runs"):
            folders.runs += [folder / name for name in content["runs"]]
            folders.failed += [
                FailedCell(**{key: cell.get(key) for key in FailedCell.__dataclass_fields__})
                for cell in content["failed"]
            ]
            return
    for below in sorted(folder.iterdir()) if folder.is_dir() else ():
        if below.is_dir() and not below.is_symlink():
            _search(below, folders)


def _once(paths: Iterable[Path]) -> list[Path]:
    return list({folder.resolve(): folder for folder in paths}.values())


def _content(folder: Path) -> dict[str, Any]:
    path = folder / REPORT_FILE
    content = read_json(path) if path.is_file() else None
    return content if isinstance(content, dict) else {}
