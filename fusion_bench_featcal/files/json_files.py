"""JSON files, and masking of secrets in them."""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from fusion_bench_featcal.errors import ReportError
from fusion_bench_featcal.files.untrusted import read_bytes

_MAX_BYTES = 2**28  # largest file. A checkpoint's manifest has about 200 bytes per tensor.
_HIDDEN = "***"
_KEY = (  # not pad_token, image_token and the like
    r"(?i:password|passwd|secret|(?<![a-z][_-])token|(?:hf|auth|access|api|session)[_-]token"
    r"|(?:api|access|private|secret|wandb)[_-]?key)"
)
_SECRET_KEY = re.compile(rf"{_KEY}$")
_SECRETS = {
    re.compile(rf"""({_KEY}['"]?\s*[=:]\s*)("[^"]*"|'[^']*'|[^\s,{{}}<&]+)"""): rf"\1{_HIDDEN}",
    re.compile(r"(\w://)[^/\s]+@"): rf"\1{_HIDDEN}@",
    # Hugging Face, GitHub, GitLab, AWS, Slack, OpenAI, JSON web tokens, HTTP headers
    re.compile(
        r"(?<![A-Za-z0-9])(?:hf_(?!\w*_)|gh[opsru]_|github_pat_|glpat-|AKIA|eyJ|xox[a-z]-|sk-(?=[\w-]*[A-Z])"
        r"|(?i:bearer ))[\w.~+/=-]{12,}"
    ): _HIDDEN,
}


def json_text(content: Any) -> str:
    """Return the text of a JSON file.

    Raises:
        ValueError: If a number is not finite.
    """
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        ReportError: If the file is missing, unreadable or not JSON.
    """
    try:
        return json.loads(read_bytes(path, _MAX_BYTES), parse_constant=_refuse)
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{path} is not valid JSON: {error}") from error


def json_lines(records: Iterable[Mapping[str, Any]]) -> str:
    """Return the text of a JSON lines file."""
    return "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSON lines file.

    Raises:
        ReportError: If the file cannot be read, is empty, or has a line that is not a JSON object.
    """
    try:
        lines = read_bytes(path, _MAX_BYTES).splitlines()
        records = [json.loads(line, parse_constant=_refuse) for line in lines]
    except (OSError, ValueError, RecursionError) as error:
        raise ReportError(f"{path} is damaged: {error}") from error
    if not records or not all(isinstance(record, dict) for record in records):
        raise ReportError(f"{path} is damaged: expected a JSON object per line")
    return records


def plain(value: Any, label: str) -> Any:
    """Convert dataclasses, mappings, sequences, paths and scalars to JSON values.

    Secrets become ***.

    Args:
        value: The value. Numpy and torch scalars become numbers.
        label: Path of the value in its file, for the message.

    Raises:
        ReportError: If a nested value has no JSON form, or is NaN or infinite.
    """
    return masked(_plain(value, label))


def _plain(value: Any, label: str) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise ReportError(f"{label}: {value} cannot be written to report.json")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value), label)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{label}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        ordered = sorted(value, key=str) if isinstance(value, (set, frozenset)) else value
        return [_plain(item, f"{label}[{index}]") for index, item in enumerate(ordered)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if getattr(value, "ndim", None) == 0:
        return _plain(value.item(), label)  # pyright: ignore[reportAttributeAccessIssue]
    raise ReportError(f"{label}: a {type(value).__name__} cannot be written to report.json")


def masked(value: Any) -> Any:
    """Mask texts in a plain value that are secrets by their key or form. Numbers stay."""
    if isinstance(value, Mapping):
        return {
            key: _HIDDEN if isinstance(item, str) and _SECRET_KEY.search(str(key)) else masked(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [masked(entry) for entry in value]
    return without_secrets(value) if isinstance(value, str) else value


def without_secrets(text: str) -> str:
    """Mask tokens, passwords and credentials of URLs in a text by ***."""
    for pattern, replacement in _SECRETS.items():
        text = pattern.sub(replacement, text)
    return text


def masked_words(words: Iterable[str]) -> Iterator[str]:
    """Yield the words of a command line, with masked secrets."""
    before = ""
    for word in words:
        follows_key = before.startswith("-") and _SECRET_KEY.search(before)
        yield _HIDDEN if follows_key else without_secrets(word)
        before = word


def digest_json(content: Any) -> str:
    """Return the SHA-256 of a value's JSON form, independent of the order of keys."""
    text = json.dumps(content, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is no number")
