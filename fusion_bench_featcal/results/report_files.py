"""The files of a report: `report.json` and `report.md`."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fusion_bench_featcal.files import write_atomic
from fusion_bench_featcal.json_files import json_text

REPORT_FILE = "report.json"


def write_files(directory: Path, content: Mapping[str, Any], page: str, setting: str) -> Path:
    """Write `report.md` and, last, `report.json`. Return the path of `report.json`."""
    text = json_text(content)
    write_atomic(directory / "report.md", page, setting)
    return write_atomic(directory / REPORT_FILE, text, setting)


def addresses(runs: Iterable[str | Path], folder: Path) -> list[str]:
    """Return the paths of runs for the report in a folder: relative if they are below it."""
    paths = [Path(run).resolve() for run in runs]
    start = folder.resolve()
    return [str(path.relative_to(start) if path.is_relative_to(start) else path) for path in paths]
