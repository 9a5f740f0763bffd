"""Readers of configs from other people: JSON and YAML of bounded size."""

import json
import math
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

MAX_JSON = 2**28  # bytes, for a run's results and a shard index (2**23 for the largest model)
MAX_YAML = 2**20  # bytes, for a merge config (2**10 to 2**17)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
MAX_VALUES = 10**5  # in a YAML file, because aliases multiply a few lines into billions


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
        OSError: If it is missing or cannot be read.
        ValueError: If it has another content, or a number that is not finite.
    """
    content = parse_json(read_bytes(path), path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it is no mapping")
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


def parse_json(data: bytes, path: Path) -> Any:
    """Parse JSON of finite numbers. Errors name the path."""
    try:
        return json.loads(data, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def read_yaml(path: Path) -> Any:
    """Read a YAML file (see `parse_yaml`).

    Raises:
        OSError: If it is missing or cannot be read.
        ValueError: If it is not plain YAML.
    """
    data = read_bytes(path, MAX_YAML)
    try:
        return parse_yaml(data.decode())
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


class _Loader(yaml.SafeLoader):
    """A safe loader of numbers such as 1e-5."""


_Loader.add_implicit_resolver(  # 1e-5, which YAML 1.1 reads as a text
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), [*"-+0123456789"]
)


def parse_yaml(text: str) -> Any:
    """Parse plain YAML: values, lists and mappings. Aliases may repeat a few thousand values.

    Raises:
        ValueError: If it is not YAML, a mapping has a key twice, of which PyYAML drops the first,
            or aliases repeat too many values.
    """
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ValueError(f"line {line}: {error.reason}: #x{error.character:04x}") from error
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _values(node, {}) > MAX_VALUES:
            raise ValueError(f"it has more than {MAX_VALUES:,} values with its aliases written out")
        return loader.construct_document(node)
    except Exception as error:  # PyYAML raises KeyError and others for tags such as `!!bool x`
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f"line {mark.line + 1}: "
        problem = getattr(error, "problem", None)
        text = str(error) if isinstance(error, ValueError) else repr(error)
        raise ValueError(f"{line}{problem or text}") from error
    finally:
        loader.dispose()


def _values(node: yaml.Node, counts: dict[int, float]) -> float:
    """Return the number of values below a node, with aliases written out.

    Args:
        node: The node.
        counts: Nodes by id -> number of values, which this function fills.
    """
    if id(node) not in counts:
        counts[id(node)] = math.inf  # a node that contains itself has no end
        children = node.value if isinstance(node, yaml.CollectionNode) else ()
        if isinstance(node, yaml.MappingNode):
            _refuse_repeats(key for key, _ in children)
        nodes = (n for child in children for n in (child if isinstance(child, tuple) else (child,)))
        counts[id(node)] = 1 + sum(_values(child, counts) for child in nodes)
    return counts[id(node)]


def _refuse_repeats(keys: Iterable[yaml.Node]) -> None:
    names = set[str]()
    for key in keys:
        if isinstance(key, yaml.ScalarNode) and key.value in names:
            problem = f"the key {key.value!r} stands twice"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        names.add(str(key.value))


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is no number")
