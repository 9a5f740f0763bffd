"""Readers of configs from other people: JSON and YAML."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

_POINTER = b"version https://git-lfs.github.com/spec/"
_POINTER_BYTES = 200  # more than a version, a sha256 and a size take
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def pointer_text(file: Path) -> str | None:
    """Return a text on a file of git-lfs that has no content, or None for other files."""
    if file.stat().st_size > _POINTER_BYTES or not file.read_bytes().startswith(_POINTER):
        return None
    return f"{file} is a git-lfs pointer, not the file itself: run git lfs pull in the folder"


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that contains a mapping.

    Raises:
        OSError: If it is missing or cannot be read.
        ValueError: If it has another content, or a number that is not finite.
    """
    content = parse_json(path.read_bytes(), path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it is not a mapping")
    return content


def parse_sample(text: str) -> Any:
    """Parse the JSON of a sample.

    Raises:
        ValueError: If it is no JSON, or a text has a lone surrogate, which no tokenizer takes.
        RecursionError: If it is nested too deeply.
    """
    value = json.loads(text)
    if _SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode()
    return value


def parse_json(data: bytes, path: Path) -> object:
    """Parse JSON of finite numbers. Errors name the path."""
    try:
        return json.loads(data, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def read_yaml(path: Path) -> object:
    """Read a YAML file (see `parse_yaml`).

    Raises:
        OSError: If it is missing or cannot be read.
        ValueError: If it is not plain YAML.
    """
    data = path.read_bytes()
    try:
        return parse_yaml(data.decode())
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


class _Loader(yaml.SafeLoader):
    """A safe loader of numbers such as 1e-5, and of mappings without a key twice."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        names = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in names:
                problem = f"the key {key.value!r} appears twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            names.add(str(key.value))
        return node


_Loader.add_implicit_resolver(  # 1e-5, which YAML 1.1 reads as a text
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), [*"-+0123456789"]
)


def parse_yaml(text: str) -> object:
    """Parse plain YAML: values, lists and mappings.

    Raises:
        ValueError: If it is not YAML, or a mapping has a key twice (PyYAML drops the first).
    """
    try:
        return yaml.load(text, _Loader)
    except Exception as error:  # PyYAML raises KeyError and others for tags such as `!!bool x`
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f"line {mark.line + 1}: "
        problem = getattr(error, "problem", None) or getattr(error, "reason", None)
        text = str(error) if isinstance(error, ValueError) else repr(error)
        raise ValueError(f"{line}{problem or text}") from error


def _refuse(text: str) -> object:
    raise ValueError(f"{text} is not a number")
