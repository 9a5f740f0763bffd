"""JSON texts of results, and their values."""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from fusion_bench_featcal.errors import ReportError
from fusion_bench_featcal.files.untrusted import parse_json, read_bytes

_DEEPEST = 50
"""Levels of values in values."""


def json_text(content: Any) -> str:
    """Return the text of a JSON file.

    Raises:
        ValueError: If a number is not finite.
    """
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def json_lines(records: Iterable[Mapping[str, Any]]) -> str:
    """Return the text of a JSON lines file."""
    return "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSON lines file.

    Raises:
        OSError: If it cannot be read.
        ValueError: If a line is not JSON.
    """
    return [parse_json(line, path) for line in read_bytes(path).splitlines()]


def plain(value: Any, label: str) -> Any:
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


def typed(value: Any, kind: Any, name: str, depth: int = 0) -> Any:
    """Return a value of a JSON file as the type that is declared for it.

    Args:
        value: The value.
        kind: A dataclass, a TypedDict, `list[T]`, `dict[str, T]`, a type of scalars, or Any.
        name: Its name in messages.
        depth: Number of values around it.

    Raises:
        ValueError: If it or a value in it has another type, or is nested too deeply.
        TypeError: If it has not the keys of its dataclass.
    """
    if kind is Any:
        kind = {dict: dict[str, Any], list: list[Any]}.get(type(value), object)
    fields = get_type_hints(kind) if hasattr(kind, "__annotations__") else {}
    shape: Any = dict if fields else get_origin(kind)
    if shape not in (dict, list):
        shape = int | float if kind is float else kind
    if depth > _DEEPEST:
        raise ValueError(f"{name[:60]} is nested too deeply")
    if not isinstance(value, shape):
        expected = getattr(shape, "__name__", shape)
        raise ValueError(f"{name[:60]} must be {expected}, got {str(value)[:40]}")
    if isinstance(value, str | dict):
        "".join(value).encode()  # raises for a lone surrogate, which cannot be printed
    if shape is list:
        (inner,) = get_args(kind)
        return [typed(item, inner, f"{name}[{n}]", depth + 1) for n, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if missing := getattr(kind, "__required_keys__", frozenset()) - value.keys():
        raise ValueError(f"{name[:60]} has no {', '.join(missing)}")
    kinds = fields or dict.fromkeys(value, get_args(kind)[-1])
    values = {k: typed(v, kinds.get(k, Any), f"{name}.{k}", depth + 1) for k, v in value.items()}
    return kind(**values) if fields else values


def digest_json(content: Any) -> str:
    """Return the SHA-256 of a value's JSON form, independent of the order of keys."""
    text = json.dumps(content, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
