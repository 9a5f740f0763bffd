"""JSON texts of results, and their values."""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass

from fusion_bench_featcal.errors import ReportError


def json_text(content: object) -> str:
    """Return the text of a JSON file.

    Raises:
        ValueError: If a number is not finite.
    """
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def json_lines(records: Iterable[Mapping[str, object]]) -> str:
    """Return the text of a JSON lines file."""
    return "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)


def plain(value: object, label: str) -> object:
    """Convert dataclasses, mappings, sequences, paths and scalars to JSON values.

    Args:
        value: The value. Numpy and torch scalars become numbers.
        label: Path of the value in its file, for the message.

    Raises:
        ReportError: If a nested value has no JSON form, or is NaN or infinite.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise ReportError(f"{label}: {value} cannot be written to report.json")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value), label)
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{label}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        ordered = sorted(value, key=str) if isinstance(value, (set, frozenset)) else value
        return [plain(item, f"{label}[{index}]") for index, item in enumerate(ordered)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if getattr(value, "ndim", None) == 0:
        return plain(value.item(), label)  # pyright: ignore[reportAttributeAccessIssue]
    raise ReportError(f"{label}: a {type(value).__name__} cannot be written to report.json")


def digest_json(content: object) -> str:
    """Return the SHA-256 of a value's JSON form, independent of the order of keys."""
    text = json.dumps(content, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
