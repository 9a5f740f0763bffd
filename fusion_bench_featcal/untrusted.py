"""Reading model configs, merge configs, tables and chat templates from unknown sources.

Size, nesting and time are bounded. YAML aliases and file patterns are not expanded, and only
regular files are read.
"""

import json
import re
import stat
import sys
from ast import literal_eval
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import thread_time
from typing import Any

import yaml

MAX_JSON = 2**26  # bytes; the shard index of the largest model has 2**23
MAX_YAML = 2**20  # bytes; a merge config has 2**10 to 2**17
MAX_NESTING = 64
MAX_TEMPLATE = 2**17  # characters of a chat template; the longest published ones have 2**15
TEMPLATE_SECONDS = 3.0  # processor time to render one chat, which takes milliseconds
MAX_RENDERED = 10_000_000  # characters of a text, or items of a list, in a template
CHARACTERS_PER_TOKEN = 64  # of a text for each token of max_length; a token has about 4

_MAX_BITS = 10_000  # of a number in a template
_COMPILED_PER_SECOND = 4_000  # characters of a template, on a slow machine
_WIDTH = re.compile(r"%[-+ #0-9.]*\d{8}|\{[\w.\[\]]*:[^{}\s\"]*\d{8}")  # of a formatted value
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_POSITIVE = {  # sizes by which transformers divides, or that a model cannot lack
    "d_model", "hidden_size", "n_embd", "vocab_size",
    "decoder_attention_heads", "encoder_attention_heads", "n_head", "n_heads",
    "num_attention_heads", "num_heads", "num_key_value_heads",
}  # fmt: skip
_LARGEST = {  # keys of a model's config -> largest value
    re.compile(r"(layers?|depths?|blocks)$"): 2_000,
    re.compile(r"experts$"): 100_000,
    re.compile(r"heads?$"): 65_536,
    re.compile(r"labels$"): 1_000_000,
    re.compile(r"(size|dim|d_model|d_ff|d_kv|n_embd)$"): 10_000_000,
}
_TYPES: Mapping[str, type] = {
    "architectures": list, "id2label": dict, "label2id": dict, "model_type": str,
}  # fmt: skip


def read_bytes(path: Path, limit: int = MAX_JSON) -> bytes:
    """Read a regular file of at most `limit` bytes.

    Raises:
        OSError: It is missing or cannot be read.
        ValueError: It is a pipe, device or folder, or larger.
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
        FileNotFoundError: It is missing.
        ValueError: It cannot be read, or contains something else.
    """
    data = _content(path, MAX_JSON)
    try:
        content = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it is no mapping")
    if _is_nested(content, MAX_NESTING):
        raise ValueError(f"{path} is damaged: nested deeper than {MAX_NESTING} levels")
    return content


def read_yaml(path: Path) -> Any:
    """Read a YAML file; see `parse_yaml`.

    Raises:
        FileNotFoundError: It is missing.
        ValueError: It cannot be read, or is not plain YAML.
    """
    data = _content(path, MAX_YAML)
    try:
        return parse_yaml(data.decode())
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def parse_yaml(text: str) -> Any:
    """Parse plain YAML: values, lists and mappings, without aliases.

    Raises:
        ValueError: If it has an alias, is nested deeper than `MAX_NESTING`, or is not YAML.
    """
    depth = 0
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent):
                raise ValueError(
                    f"line {event.start_mark.line + 1} has the alias *{event.anchor}: write the "
                    "value out"
                )
            if depth > MAX_NESTING:
                raise ValueError(f"nested deeper than {MAX_NESTING} levels")
        return yaml.load(text, Loader=_LOADER)
    except (LookupError, AttributeError) as error:  # PyYAML does not expect tags such as !!bool x
        raise ValueError(f"a value does not fit its tag ({error})") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f"line {mark.line + 1}: "
        raise ValueError(f"{line}{getattr(error, 'problem', None) or error}") from error


def read_template(path: Path) -> str:
    """Read a chat template.

    Raises:
        ValueError: It cannot be read, is too long or is not UTF-8.
    """
    try:
        return read_bytes(path, MAX_TEMPLATE).decode()
    except (OSError, ValueError) as error:
        raise ValueError(f"chat template {path} cannot be read: {error}") from error


def check_nesting(table: Path) -> None:
    """Refuse a deeply nested JSON table, on which its reader would crash or not end.

    Raises:
        ValueError: If it is nested deeper than `MAX_NESTING` levels.
    """
    brackets = b""
    with open(table, "rb") as stream:
        for lines in iter(lambda: stream.readlines(2**24), []):
            plain = re.sub(rb'(?s)"[^"\\]*(?:\\.[^"\\]*)*"?', b"", b"".join(lines))
            brackets += re.sub(rb"[^][{}]+", b"", plain)
            for _ in range(MAX_NESTING):  # each removes the innermost level
                brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
            if len(brackets) > MAX_NESTING:
                raise ValueError(f"nested deeper than {MAX_NESTING} levels")


def check_model_config(config: Mapping[str, Any], file: Path) -> None:
    """Check numbers and types of a model's config before transformers builds a model from it.

    Args:
        config: Content of a config.json, checked with the configs nested in it.
        file: The file, for messages.

    Raises:
        ValueError: Naming file and key.
    """
    for key, value in config.items():
        if isinstance(value, Mapping):
            check_model_config(value, file)
        values = value if isinstance(value, list) else [value]
        is_valid = isinstance(value, _TYPES.get(key, object) | None)
        if key == "architectures" and value is not None:
            is_valid &= all(isinstance(name, str) for name in values)
        if not is_valid:
            raise ValueError(f"{file} is damaged: its {key} is {value!r:.60}")
        for number in values:
            _check_number(key, number, file)


def _check_number(key: str, value: Any, file: Path) -> None:
    largest = min((n for pattern, n in _LARGEST.items() if pattern.search(key)), default=None)
    if largest is None or value is None:
        return
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if (is_integer and value > largest) or (key in _POSITIVE and not (is_integer and value > 0)):
        raise ValueError(
            f"{file}: {key} is {value!r:.40}, expected a whole number from 1 to "
            f"{largest:,}. Correct the file"
        )


def shortened(text: str, tokens: int | None) -> str:
    """Cut a text that is far longer than a number of tokens; None: do not cut."""
    return text if tokens is None else text[: tokens * CHARACTERS_PER_TOKEN]


def render_chat(tokenizer: Any, turns: list[dict[str, Any]], **options: Any) -> str:
    """Render a chat by the tokenizer's template, in bounded time.

    Args:
        tokenizer: A tokenizer of transformers, which renders in a sandbox of jinja2.
        turns: The chat.
        options: Further arguments of `apply_chat_template`.

    Raises:
        ValueError: If the template fails, does not end, or is too long.
    """
    import jinja2

    try:
        template = tokenizer.get_chat_template()
        if len(template) > MAX_TEMPLATE:
            raise ValueError(f"it has more than {MAX_TEMPLATE:,} characters")
        _check_sizes(template, jinja2.Environment().lex(template))
        with _bounded_rendering(TEMPLATE_SECONDS + len(template) / _COMPILED_PER_SECOND):
            text = tokenizer.apply_chat_template(turns, tokenize=False, **options)
    except (Exception, _Stop) as error:  # a template may raise anything
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"the tokenizer's chat template cannot be used: {reason}") from error
    return text


def _check_sizes(template: str, tokens: Iterable[tuple[int, str, str]]) -> None:
    """Refuse large powers, numbers and widths: a single operation cannot be interrupted."""
    for _, kind, text in tokens:
        if (kind, text) == ("operator", "**"):
            raise ValueError("it has a power (**)")
        if kind in ("integer", "float") and literal_eval(text) > MAX_RENDERED:
            raise ValueError(f"its number {text:.20} is too large")
    if _WIDTH.search(template):
        raise ValueError("it has a width of 8 digits or more")


class _Stop(BaseException):
    """Stops a template. Filters such as `int` would catch a ValueError and continue."""


@contextmanager
def _bounded_rendering(seconds: float) -> Iterator[None]:
    """Context that stops a template which takes too long or builds too large values."""
    end, before = thread_time() + seconds, sys.gettrace()

    def trace(frame: Any, event: str, _: Any) -> Any:
        if thread_time() > end:
            raise _Stop(f"a chat takes it more than {seconds:.2g} seconds")
        inspects = event == "call" or frame.f_code.co_filename == "<template>"
        if inspects and any(map(_is_huge, frame.f_locals.values())):
            raise _Stop("a value in it becomes too large")
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def _is_huge(value: Any) -> bool:
    if isinstance(value, int):
        return value.bit_length() > _MAX_BITS
    return isinstance(value, str | bytes | list | tuple | dict) and len(value) > MAX_RENDERED


def _content(path: Path, limit: int) -> bytes:
    try:
        return read_bytes(path, limit)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error


def _is_nested(value: Any, levels: int) -> bool:
    values = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list):
        return False
    return levels == 0 or any(_is_nested(part, levels - 1) for part in values)
