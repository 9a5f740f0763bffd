"""Files that others wrote, as checked Python values: bounded in size, nesting and time.

The one reader of model configs, merge configs, tables and chat templates, for `featcal` and for
`fusion_bench`. It follows no aliases, expands no patterns and reads regular files only.
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

MOST_JSON = 2**26  # bytes; the shard index of the largest model has 2**23
MOST_YAML = 2**20  # bytes; a merge config has 2**10 to 2**17
MOST_NESTING = 64
MOST_TEMPLATE = 2**17  # characters of a chat template; the longest known have 2**15
TEMPLATE_SECONDS = 3.0  # processor time to render one chat, which takes milliseconds
MOST_RENDERED = 10_000_000  # characters of a text, or items of a list, in a template
CHARACTERS_PER_TOKEN = 64  # kept of a text for each token of max_length; a token has about 4

_MOST_BITS = 10_000  # of a number in a template
_COMPILED_PER_SECOND = 4_000  # characters of a template, on a slow machine
_WIDTH = re.compile(r"%[-+ #0-9.]*\d{8}|\{[\w.\[\]]*:[^{}\s\"]*\d{8}")  # of a formatted value
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MOST_LAYERS_AND_EXPERTS = 1_000_000  # layers times experts; Doge has 524,288
_POSITIVE = {  # sizes by which transformers divides, or that a model cannot lack
    "d_model", "hidden_size", "n_embd", "vocab_size",
    "decoder_attention_heads", "encoder_attention_heads", "n_head", "n_heads",
    "num_attention_heads", "num_heads", "num_key_value_heads",
}  # fmt: skip
_LAYERS, _EXPERTS = re.compile(r"(layers?|depths?|blocks)$"), re.compile(r"experts$")
_LARGEST = {  # keys of a model's config -> largest value
    _LAYERS: 2_000,
    _EXPERTS: 100_000,
    re.compile(r"heads?$"): 65_536,
    re.compile(r"labels$"): 1_000_000,
    re.compile(r"(size|dim|d_model|d_ff|d_kv|n_embd)$"): 10_000_000,
}
_TYPES: Mapping[str, type] = {
    "architectures": list, "id2label": dict, "label2id": dict, "model_type": str,
}  # fmt: skip


def read_bytes(path: Path, most: int = MOST_JSON) -> bytes:
    """Read a regular file of at most `most` bytes.

    Raises:
        OSError: It is missing or cannot be read.
        ValueError: It is a pipe, device or folder, or larger.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path} is not a regular file")
    with open(path, "rb") as stream:
        content = stream.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path} is larger than {most >> 10:,} KiB")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file whose content is a mapping.

    Raises:
        FileNotFoundError: It is missing.
        ValueError: It cannot be read, or is something else.
    """
    data = _content(path, MOST_JSON)
    try:
        content = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it is no mapping")
    if _is_nested(content, MOST_NESTING):
        raise ValueError(f"{path} is damaged: nested deeper than {MOST_NESTING} levels")
    return content


def read_yaml(path: Path) -> Any:
    """Read a YAML file; see `parse_yaml`.

    Raises:
        FileNotFoundError: It is missing.
        ValueError: It cannot be read, or has more than plain values.
    """
    data = _content(path, MOST_YAML)
    try:
        return parse_yaml(data.decode())
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def parse_yaml(text: str) -> Any:
    """Parse plain YAML: values, lists and mappings, without aliases.

    Raises:
        ValueError: If it has an alias, is nested deeper than `MOST_NESTING`, or is no YAML.
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
            if depth > MOST_NESTING:
                raise ValueError(f"nested deeper than {MOST_NESTING} levels")
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
        return read_bytes(path, MOST_TEMPLATE).decode()
    except (OSError, ValueError) as error:
        raise ValueError(f"chat template {path} cannot be read: {error}") from error


def check_nesting(table: Path) -> None:
    """Refuse a JSON table that is nested so deeply that its reader never ends, or crashes.

    Raises:
        ValueError: If it is nested deeper than `MOST_NESTING` levels.
    """
    brackets = b""
    with open(table, "rb") as stream:
        for lines in iter(lambda: stream.readlines(2**24), []):
            plain = re.sub(rb'(?s)"[^"\\]*(?:\\.[^"\\]*)*"?', b"", b"".join(lines))
            brackets += re.sub(rb"[^][{}]+", b"", plain)
            for _ in range(MOST_NESTING):  # each removes the innermost level
                brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
            if len(brackets) > MOST_NESTING:
                raise ValueError(f"nested deeper than {MOST_NESTING} levels")


def check_model_config(config: Mapping[str, Any], file: Path) -> None:
    """Check numbers and types of a model's config, before transformers makes a model from it.

    Args:
        config: Content of a config.json; parts of composite models are checked too.
        file: The file, for messages.

    Raises:
        ValueError: Naming file and key.
    """
    most = {_LAYERS: 1, _EXPERTS: 1}
    for key, value in config.items():
        if isinstance(value, Mapping):
            check_model_config(value, file)
        names = value if isinstance(value, list) else [value]
        strange = not isinstance(value, _TYPES.get(key, object) | None)
        if key == "architectures" and value is not None:
            strange |= not all(isinstance(name, str) for name in names)
        if strange:
            raise ValueError(f"{file} is damaged: its {key} is {value!r:.60}")
        for number in names:
            _check_number(key, number, file)
            for pattern in most:
                if isinstance(number, int) and pattern.search(key):
                    most[pattern] = max(most[pattern], number)
    if most[_LAYERS] * most[_EXPERTS] > _MOST_LAYERS_AND_EXPERTS:
        raise ValueError(
            f"{file}: {most[_LAYERS]:,} layers of {most[_EXPERTS]:,} experts are more than any "
            "model has. Correct the file"
        )


def _check_number(key: str, value: Any, file: Path) -> None:
    largest = min((n for pattern, n in _LARGEST.items() if pattern.search(key)), default=None)
    if largest is None or value is None:
        return
    plain = isinstance(value, int) and not isinstance(value, bool)
    if (plain and value > largest) or (key in _POSITIVE and not (plain and value > 0)):
        raise ValueError(
            f"{file}: {key} is {value!r:.40}, expected a whole number from 1 to "
            f"{largest:,}. Correct the file"
        )


def shortened(text: str, tokens: int | None) -> str:
    """Cut a text that is far longer than the tokens that are kept of it.

    Args:
        text: The text.
        tokens: Largest number of tokens; None: there is none, and nothing is cut.
    """
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
        if len(template) > MOST_TEMPLATE:
            raise ValueError(f"it has more than {MOST_TEMPLATE:,} characters")
        _check_sizes(template, jinja2.Environment().lex(template))
        with _bounded_rendering(TEMPLATE_SECONDS + len(template) / _COMPILED_PER_SECOND):
            text = tokenizer.apply_chat_template(turns, tokenize=False, **options)
    except (Exception, _Stop) as error:  # a template may raise anything
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"the tokenizer's chat template cannot be used: {reason}") from error
    return text


def _check_sizes(template: str, tokens: Iterable[tuple[int, str, str]]) -> None:
    """Refuse powers, numbers and widths that make one operation long: none can be stopped."""
    for _, kind, text in tokens:
        if (kind, text) == ("operator", "**"):
            raise ValueError("it has a power (**)")
        if kind in ("integer", "float") and literal_eval(text) > MOST_RENDERED:
            raise ValueError(f"its number {text:.20} is too large")
    if _WIDTH.search(template):
        raise ValueError("it has a width of 8 digits or more")


class _Stop(BaseException):
    """The end of a template. Filters such as `int` catch a ValueError and go on, untraced."""


@contextmanager
def _bounded_rendering(seconds: float) -> Iterator[None]:
    """Stop a template that takes too long, or makes too long texts, wherever it is."""
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
        return value.bit_length() > _MOST_BITS
    return isinstance(value, str | bytes | list | tuple | dict) and len(value) > MOST_RENDERED


def _content(path: Path, most: int) -> bytes:
    try:
        return read_bytes(path, most)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error


def _is_nested(value: Any, levels: int) -> bool:
    values = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list):
        return False
    return levels == 0 or any(_is_nested(part, levels - 1) for part in values)
