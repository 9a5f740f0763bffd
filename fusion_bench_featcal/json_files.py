"""JSON files with a digest of their content, and masking of secrets."""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from fusion_bench_featcal.files import ReportError
from fusion_bench_featcal.untrusted import read_bytes

DIGEST = "digest"
_LINE_DIGITS = 16  # of the digest in every line of a JSON lines file
_MAX_BYTES = 2**28  # of a file; a checkpoint's manifest has about 200 bytes per tensor
_HIDDEN = "***"
_KEY = (
    "(?i:(?<!(?:pad|eos|bos|unk|cls|sep)_)(?<!mask_)(?<!(?:image|video|audio)_)token|passw(?:or)?d|passphrase|pwd|secret|credentials?"
    "|authorization|auth|cookie|wandb[_-]?key|api[_-]?key|(?:access|private|secret)[_-]?key)"
)
_SECRET_KEY = re.compile(f"{_KEY}$")
_SECRETS = {
    # a key with a value, which within braces may have blanks
    re.compile(
        rf"""({_KEY}['"\\]*\s*[=:]\s*|(?<![\w-])--?[\w-]{{,40}}{_KEY}\s+)(?!\s*[{{<])(?:(?i:bearer|basic)\s+)?"""
        r"""(?:"[^"]*"|'[^']*'|[^,}\s]+(?: [^,}\s=:]+)*(?=\s*[,}])|[^,}\s]+)"""
    ): rf"\1{_HIDDEN}",
    re.compile(r"(\w://)[^/\s]+@"): rf"\1{_HIDDEN}@",
    re.compile(r"\b([Bb]earer\s+)[\w.~+/=-]{8,}"): rf"\1{_HIDDEN}",
    # tokens of Hugging Face, OpenAI, GitHub, GitLab, AWS, Slack, Google and PyPI; JSON web tokens
    re.compile(
        r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{12,}|gh[opsru]_\w{12,}|github_pat_\w{12,}"
        r"|A[KS]IA[A-Z0-9]{12,}|sk-(?=[\w-]*\d)(?=[\w-]*[A-Z])[\w-]{20,}|(?:glpat|xox[abprs]|pypi)-[\w-]{12,}|AIza[\w-]{12,}"
        r"|eyJ[\w-]+\.[\w-]+\.[\w-]*)"
    ): _HIDDEN,
}


def sealed_json(content: Mapping[str, Any]) -> str:
    """Return the text of a JSON file with the digest of its content."""
    # The digest is the first key, so that a truncated file cannot lose it alone.
    return json.dumps({DIGEST: digest_json(content), **content}, indent=2, allow_nan=False) + "\n"


def read_json(path: Path, *, sealed: bool = False) -> Any:
    """Read a JSON file, and check its digest if it has one.

    Args:
        path: The file.
        sealed: Refuse a file without a digest.

    Returns:
        The content without its digest.

    Raises:
        ReportError: The file is missing, unreadable, not JSON, has numbers that are not finite or
            beyond 64 bits, or has changed since it was written.
    """
    try:
        content = parse_json(read_bytes(path, _MAX_BYTES))
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{path} is not valid JSON: {error}") from error
    seal = content.pop(DIGEST, None) if isinstance(content, dict) else None
    if seal is None and sealed:
        raise ReportError(f"{path} has no digest: it is damaged, or of an earlier version")
    if seal not in (None, digest_json(content)):
        edited = f' (if it was edited on purpose, remove its key "{DIGEST}")' * (not sealed)
        raise ReportError(
            f"{path} is damaged: its digest does not fit its content. Restore it or run again"
            + edited
        )
    return content


def sealed_lines(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a JSON lines file; every line has the digest of all records."""
    # In each line, so that a missing line is noticed.
    digest = digest_json(records)[:_LINE_DIGITS]
    return "".join(
        json.dumps({**record, DIGEST: digest}, allow_nan=False) + "\n" for record in records
    )


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSON lines file, and check the digest in its lines if they have one.

    Returns:
        The records without their digest.

    Raises:
        ReportError: The file cannot be read, is empty, has a line that is no JSON object, or has
            changed since it was written.
    """
    records = []
    try:
        for number, line in enumerate(read_bytes(path, _MAX_BYTES).splitlines(), start=1):
            record = parse_json(line)
            if not isinstance(record, dict):
                raise ReportError(f"{path}, line {number} is not a record")
            records.append(record)
    except (OSError, ValueError, RecursionError) as error:
        raise ReportError(f"{path} is damaged: {error}") from error
    digests = [record.pop(DIGEST, None) for record in records]
    if not records:
        raise ReportError(f"{path} is damaged: it is empty")
    if any(digests) and set(map(str, digests)) != {digest_json(records)[:_LINE_DIGITS]}:
        raise ReportError(f"{path} is damaged: its digest does not fit its content")
    return records


def parse_json(data: bytes | str) -> Any:
    """Parse JSON strictly.

    Raises:
        ValueError: It is not UTF-8 or not JSON, or a number is not finite or beyond 64 bits.
        RecursionError: It is nested too deeply.
    """
    text = data.decode() if isinstance(data, bytes) else data
    return json.loads(text, parse_constant=_refuse, parse_float=_float, parse_int=_integer)


def plain(value: Any, label: str) -> Any:
    """Convert dataclasses, mappings, sequences, paths and scalars to JSON values.

    Secrets become ***.

    Args:
        value: The value; numpy and torch scalars become numbers.
        label: Path of the value in its file, for the message.

    Raises:
        ReportError: A nested value has no JSON form, or is NaN or infinite.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise ReportError(f"{label}: {value} cannot be written to report.json")
    if value is None or isinstance(value, (bool, int, float, str)):
        return masked(value)
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value), label)
    if isinstance(value, Mapping):
        return {
            # numbers stay: a task or class may be named like a secret
            str(key): _HIDDEN
            if isinstance(item, str) and _is_secret(key, item)
            else plain(item, f"{label}.{key}")
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple, set, frozenset)):
        ordered = sorted(value, key=str) if isinstance(value, (set, frozenset)) else value
        return [plain(item, f"{label}[{index}]") for index, item in enumerate(ordered)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if getattr(value, "ndim", None) == 0:
        return plain(value.item(), label)  # pyright: ignore[reportAttributeAccessIssue]
    raise ReportError(f"{label}: a {type(value).__name__} cannot be written to report.json")


def masked(value: Any) -> Any:
    """Mask secrets in a plain value, by the names of keys and by their form in texts."""
    if isinstance(value, Mapping):
        return {
            key: _HIDDEN if _is_secret(key, item) else masked(item) for key, item in value.items()
        }
    if isinstance(value, list):
        return [masked(entry) for entry in value]
    return without_secrets(value) if isinstance(value, str) else value


def without_secrets(text: str) -> str:
    """Mask tokens, passwords and credentials of URLs in a text by ***."""
    for pattern, replacement in _SECRETS.items():
        text = pattern.sub(replacement, text)
    return text


def _is_secret(key: object, value: object) -> bool:
    return _SECRET_KEY.search(str(key)) is not None and not isinstance(value, bool | None)


def masked_words(words: Iterable[str]) -> Iterator[str]:
    """Yield the words of a command line, with masked secrets."""
    before = ""
    for word in words:
        key, equals, _ = word.partition("=")
        if before.startswith("-") and _SECRET_KEY.search(before):
            yield _HIDDEN
        elif equals and _SECRET_KEY.search(key):
            yield f"{key}={_HIDDEN}"
        else:
            yield without_secrets(word)
        before = word


def digest_json(content: Any) -> str:
    """SHA-256 of a value's JSON form, whatever the order of its keys."""
    text = json.dumps(content, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is no number")


def _float(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def _integer(text: str) -> int:
    return int(text) if len(text) <= 20 else _refuse(text)
