"""Manifests of checkpoints, checked when they are read, and the errors of their files."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fusion_bench_featcal.files import ReportError, free_space
from fusion_bench_featcal.json_files import read_json
from fusion_bench_featcal.settings import CalibrationError

_NUMBERS = {"task": ("samples", "expert_bytes"), "inputs": ("expert_bytes",), "block": ("seconds",)}
"""Numbers that reports read of a log record, by its kind."""


def read_manifest(path: Path) -> dict[str, Any]:
    """Read a manifest.

    Raises:
        CalibrationError: If it is missing, damaged or edited, or lacks something.
    """
    with naming_damage(path):
        content = read_json(path, sealed=True)
        if not isinstance(content, dict) or (_is_of_block(path) and not _is_whole(content)):
            raise ReportError("an entry is missing or of another type")
    return content


def _is_of_block(path: Path) -> bool:
    return path.name.startswith("block-")


def _is_whole(content: Mapping[str, Any]) -> bool:
    """Return whether a block's manifest has all that it is read for."""
    reads, records = content.get("reads"), content.get("records")
    return (
        all(isinstance(content.get(key), str) for key in ("run", "block", "parameters"))
        and isinstance(reads, dict)
        and all(map(_is_texts, reads.values()))
        and isinstance(records, list)
        and all(map(_is_record, records))
    )


def _is_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _is_record(value: Any) -> bool:
    return isinstance(value, dict) and all(
        type(value.get(name)) in (int, float) for name in _NUMBERS.get(str(value.get("kind")), ())
    )


@contextmanager
def naming_damage(path: Path) -> Iterator[None]:
    """Context whose errors of reading a checkpoint's file say how to go on without it."""
    try:
        yield
    except ReportError as error:
        block = _is_of_block(path)
        remedy = (
            f"{path.with_suffix('.json')} to calibrate its block anew, or the whole folder"
            if block
            else "that folder"
        )
        raise CalibrationError(
            f"the checkpoint {path} (method.checkpoint_dir) cannot be used: {error}. Remove "
            f"{remedy} to begin anew"
        ) from error


@contextmanager
def naming_room(path: Path, size: int) -> Iterator[None]:
    """Context whose errors of writing a checkpoint's file say what it needs and what is free."""
    try:
        yield
    except OSError as error:
        raise CalibrationError(
            f"cannot write the checkpoint {path}: {error.strerror or error}. It needs "
            f"{size / 1e6:.3g} MB, and {free_space(path.parent) / 1e6:.3g} MB are free. Make room "
            "or change method.checkpoint_dir; with method.resume=true a run goes on after its last "
            "whole block"
        ) from error
