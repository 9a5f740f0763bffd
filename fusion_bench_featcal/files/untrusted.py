"""Readers of configs from other people: files of bounded size, JSON, and YAML without aliases."""

import json
import re
import stat
from pathlib import Path
from typing import Any

import yaml

MAX_JSON = 2**26  # bytes, for a shard index (2**23 for the largest model)
MAX_YAML = 2**20  # bytes, for a merge config (2**10 to 2**17)


def read_bytes(path: Path, limit: int = MAX_JSON) -> bytes:
    """Read a regular file of at most `limit` bytes.

    Raises:
        OSError: If it is missing or cannot be read.
        ValueError: If it is a pipe, device or folder, or larger.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path} is not a regular file")
    with open(path, "rb") as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"{path} is larger than {limit >> 10:,} KiB")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that contains a mapping.

    Raises:
        FileNotFoundError: If it is missing.
        ValueError: If it cannot be read, or has another content.
    """
    data = _content(path, MAX_JSON)
    try:
        content = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it is no mapping")
    return content


def read_yaml(path: Path) -> Any:
    """Read a YAML file (see `parse_yaml`).

    Raises:
        FileNotFoundError: If it is missing.
        ValueError: If it cannot be read, or is not plain YAML.
    """
    data = _content(path, MAX_YAML)
    try:
        return parse_yaml(data.decode())
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


class _Loader(yaml.SafeLoader):
    """A loader that refuses aliases, which can multiply a few lines into billions of values."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.get_event()
            raise yaml.MarkedYAMLError(
                problem=f"has the alias *{event.anchor}: write the value out",
                problem_mark=event.start_mark,
            )
        return super().compose_node(parent, index)


_Loader.add_implicit_resolver(  # 1e-5, which YAML 1.1 reads as a text
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), [*"-+0123456789"]
)


def parse_yaml(text: str) -> Any:
    """Parse plain YAML: values, lists and mappings, without aliases.

    Raises:
        ValueError: If it has an alias, or is not YAML.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except Exception as error:  # PyYAML raises KeyError and others for tags such as `!!bool x`
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f"line {mark.line + 1}: "
        raise ValueError(f"{line}{getattr(error, 'problem', None) or repr(error)}") from error


def _content(path: Path, limit: int) -> bytes:
    try:
        return read_bytes(path, limit)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
