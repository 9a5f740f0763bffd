"""The manifest of an output folder, checked when it is read, and errors that name its files."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fusion_bench_featcal.files import ReportError, free_space
from fusion_bench_featcal.json_files import read_json
from fusion_bench_featcal.plurals import bytes_text
from fusion_bench_featcal.settings import CalibrationError

FORMAT = 3
_NUMBERS = {"task": ("samples",), "block": ("seconds",)}
"""Numbers that reports read of a log record, by its kind."""


def read_manifest(path: Path) -> dict[str, Any]:
    """Read a manifest.

    Raises:
        CalibrationError: If it is damaged or edited, or an entry is missing.
    """
    with naming_damage(path, "that folder"):
        content = read_json(path, sealed=True)
        if not isinstance(content, dict) or not _is_whole(content):
            raise ReportError("an entry is missing or of another type")
    return content


def _is_whole(content: Mapping[str, Any]) -> bool:
    """Return whether a manifest has all that it is read for."""
    blocks = content.get("blocks")
    return (
        content.get("format") == FORMAT
        and isinstance(content.get("run"), dict)
        and isinstance(blocks, dict)
        and all(isinstance(entry, dict) for entry in blocks.values())
        and all(isinstance(entry.get("digest"), str) for entry in blocks.values())
        and all(isinstance(entry.get("records"), list) for entry in blocks.values())
        and all(_is_record(record) for entry in blocks.values() for record in entry["records"])
    )


def _is_record(value: Any) -> bool:
    return isinstance(value, dict) and all(
        type(value.get(name, 0)) in (int, float)
        for name in _NUMBERS.get(str(value.get("kind")), ())
    )


@contextmanager
def naming_damage(path: Path, remedy: str) -> Iterator[None]:
    """Context whose errors of reading a file say how to go on without it."""
    try:
        yield
    except ReportError as error:
        raise CalibrationError(
            f"{path} (method.checkpoint_dir) cannot be used: {error}. Remove {remedy} to begin anew"
        ) from error


@contextmanager
def naming_room(path: Path, size: int) -> Iterator[None]:
    """Context whose errors of writing a file say what it needs and what is free."""
    try:
        yield
    except OSError as error:
        raise CalibrationError(
            f"cannot write {path}: {error.strerror or error}. It needs {bytes_text(size)}, and "
            f"{bytes_text(free_space(path.parent))} are free. Make room or change "
            "method.checkpoint_dir; with method.resume=true a run goes on after its last whole "
            "block"
        ) from error
