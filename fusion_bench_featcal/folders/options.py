"""Options that are declared once, as fields, and read from a command line, a recipe or Python."""

import argparse
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from fusion_bench_featcal.nearest_names import nearest_hint, refuse_unknown_keys
from fusion_bench_featcal.untrusted import parse_yaml, read_yaml

RECIPE = "recipe.yaml"
"""File beside a result with the options that it was made with."""
_KINDS = {
    str: "a text", int: "a whole number", bool: "true or false", dict: "a mapping", Path: "a path",
}  # fmt: skip


def option(
    default: Any,
    text: str,
    *,
    kind: type = str,
    metavar: str | None = None,
    choices: tuple[str, ...] = (),
    word: Callable[[str, str], dict[str, Any]] | None = None,
    short: str = "",
    is_location: bool = False,
    is_recorded: bool = True,
) -> Any:
    """Declare an option, as a field of a dataclass.

    Args:
        default: Its value where it is not given; `dict` for an empty mapping.
        text: Its help.
        kind: Type of its value: str, int, bool, Path or dict.
        metavar: Name of the value in the help.
        choices: The values that it may have; none: any.
        word: Reads a word of the command line, with the option's name, to an entry of the mapping.
        short: Letter of the option on the command line.
        is_location: Whether values are paths, where there is such a file, or ids of the hub.
        is_recorded: Whether a recipe has it: not where it concerns a single run.
    """
    keys = dict(locals())
    default = keys.pop("default")
    if default is dict:
        return dataclasses.field(default_factory=dict, metadata=keys)
    return dataclasses.field(default=default, metadata=keys)


def options_of(owner: Any) -> Iterator[dataclasses.Field[Any]]:
    """Yield the fields of a dataclass that are options."""
    return (field for field in dataclasses.fields(owner) if field.metadata)


def flag_of(name: str) -> str:
    """Return an option's name on the command line."""
    return "--" + name.replace("_", "-")


def add_arguments(parser: argparse.ArgumentParser, owner: type) -> None:
    """Add a dataclass's options to a parser of `argparse`; the first is a word without a flag."""
    for number, field in enumerate(options_of(owner)):
        keys = field.metadata
        more: dict[str, Any] = {"default": argparse.SUPPRESS, "help": keys["text"]}
        if keys["kind"] is bool:
            more |= {"action": "store_true"}
        elif keys["choices"]:
            more |= {"choices": keys["choices"]}
        elif keys["kind"] is dict:
            more |= {"action": "append", "metavar": keys["metavar"]}
        else:
            more |= {"type": keys["kind"], "metavar": keys["metavar"]}
        if number:
            short = [f"-{keys['short']}"] if keys["short"] else []
            parser.add_argument(*short, flag_of(field.name), **more)
        else:
            parser.add_argument(field.name, nargs="?", **more)


def given_on_the_command_line(parsed: Mapping[str, Any], owner: type) -> dict[str, Any]:
    """Return the options that were given to a parser of `add_arguments`, by name.

    Raises:
        ValueError: If a word of a mapping cannot be read, or a name stands there twice.
    """
    values: dict[str, Any] = {}
    for field in options_of(owner):
        if field.name in parsed:
            value = parsed[field.name]
            is_mapping = field.metadata["kind"] is dict
            values[field.name] = _mapping(value, field) if is_mapping else value
    return values


def _mapping(words: list[str], field: dataclasses.Field[Any]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    flag = flag_of(field.name)
    for word in words:
        entries = field.metadata["word"](word, flag)
        is_single = field.metadata["word"] in (pair, scorer)
        if is_single and (twice := mapping.keys() & entries.keys()):
            raise ValueError(f"{flag} with {min(twice)} stands there twice")
        mapping = with_changes(mapping, entries)
    return mapping


def with_changes(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping with changes, which go into mappings within it."""
    changed = dict(values)
    for name, value in changes.items():
        earlier = changed.get(name)
        both = isinstance(earlier, Mapping) and isinstance(value, Mapping)
        changed[name] = with_changes(earlier, value) if both else value  # type: ignore[arg-type]
    return changed


def checked(values: Mapping[str, Any], owner: type, place: str) -> dict[str, Any]:
    """Return options of the types that they have.

    Args:
        values: Name -> value, as somebody wrote it.
        owner: The dataclass that declares them.
        place: Name of what they stand in, for messages.

    Raises:
        ValueError: If an option is unknown or its value of another type.
    """
    fields = {field.name: field for field in options_of(owner)}
    refuse_unknown_keys(values, fields, place)
    return {
        name: _checked(value, fields[name], place)
        for name, value in values.items()
        if value is not None
    }


def _checked(value: Any, field: dataclasses.Field[Any], place: str) -> Any:
    kind, choices = field.metadata["kind"], field.metadata["choices"]
    if kind in (str, Path) and isinstance(value, str | Path):
        value = kind(value)
    fits = isinstance(value, Mapping if kind is dict else kind)
    if not fits or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{place}: {field.name} is {value!r:.60}, not {_KINDS[kind]}")
    if choices and value not in choices:
        raise ValueError(f"{place}: {field.name} is {value!r}, not one of {', '.join(choices)}")
    return value.expanduser() if isinstance(value, Path) else value


def read_recipe(file: Path) -> dict[str, Any]:
    """Read the options of a recipe.

    Raises:
        ValueError: If it is not there, cannot be read, or is no mapping.
    """
    if not file.is_file():
        raise ValueError(f"recipe {file}: there is no such file")
    content = read_yaml(file)
    if not isinstance(content, Mapping):
        raise ValueError(f"{file} is no recipe: it has no `option: value` lines")
    return dict(content)


def recipe_text(owner: Any) -> str:
    """Return the recipe of a dataclass's options that differ from their defaults.

    Files are named by their full paths, so that the recipe holds in any folder.
    """
    recorded = {}
    for field in options_of(owner):
        value = getattr(owner, field.name)
        default = {} if field.metadata["kind"] is dict else field.default
        if field.metadata["is_recorded"] and value != default:
            recorded[field.name] = _absolute(value) if field.metadata["is_location"] else value
    return yaml.safe_dump(recorded, sort_keys=False, allow_unicode=True)


def _absolute(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _absolute(entry) for name, entry in value.items()}
    path, *split = str(value).rsplit(":", 1)
    for location, end in ((str(value), ""), (path, "".join(f":{name}" for name in split))):
        if Path(location).expanduser().exists():
            return f"{Path(location).expanduser().absolute()}{end}"
    return value


def pair(word: str, flag: str) -> dict[str, Any]:
    """Read `NAME=VALUE`.

    Raises:
        ValueError: If it has no name or no value.
    """
    name, equals, value = word.partition("=")
    if not (name and equals and value):
        raise ValueError(f"{flag} takes NAME=VALUE, such as {flag} math=DIR, got {word!r}")
    return {name: value}


def scorer(word: str, flag: str) -> dict[str, Any]:
    """Read MODULE:NAME,..."""
    module, _, name = word.partition(":")
    if not (module and name):
        raise ValueError(f"{flag} takes lm-eval:TASK,... or MODULE:FUNCTION,..., got {word!r}")
    return {module: name}


def setting(word: str, flag: str) -> dict[str, Any]:
    """Read `SETTING=VALUE`, whose value is YAML.

    Raises:
        ValueError: If it is none.
    """
    ((name, text),) = pair(word, flag).items()
    try:
        return {name: parse_yaml(text)}
    except ValueError as error:
        raise ValueError(f"{flag} {name}={text} is no YAML: {error}") from error


def columns(word: str, flag: str) -> dict[str, Any]:
    """Read `[NAME:]MEANING=COLUMN,...`; those of all tasks stand beside the tasks' own mappings.

    Raises:
        ValueError: If a column or a meaning is missing.
    """
    start = word.partition("=")[0]
    task, colon, _ = start.rpartition(":")
    pairs = word[len(task) + len(colon) :].split(",")
    named = {name: column for text in pairs for name, column in pair(text, flag).items()}
    return {task: named} if colon else named


def prompt(word: str, flag: str) -> dict[str, Any]:
    """Read `[NAME=]TEXT`; the prompt of all tasks has an empty name."""
    name, equals, text = word.partition("=")
    return {name: text} if equals and "{" not in name else {"": word}


def by_expert(
    given: Mapping[str, Any], experts: Mapping[str, str], name: str, notes: list[str]
) -> dict[str, Any]:
    """Return an option's values by expert; a name may be a part of one expert's name.

    Values of all experts stay: a prompt without a name, columns beside those of single tasks.

    Raises:
        ValueError: If a name fits no expert, or several.
    """
    matched: dict[str, Any] = {}
    flag = flag_of(name)
    for name, value in given.items():
        if not name or (flag == "--columns" and not isinstance(value, Mapping)):
            matched[name] = value
            continue
        fitting = [e for e in experts if e == name] or [e for e in experts if name in e]
        if len(fitting) != 1:
            problem = "several experts fit" if fitting else "there is no such expert"
            raise ValueError(
                f"{flag} {name}=...: {problem}{nearest_hint(name, experts)}; the experts are "
                f"{', '.join(experts)}"
            )
        if fitting[0] != name:
            notes.append(f"{flag} {name} is of {fitting[0]}")
        if fitting[0] in matched:
            raise ValueError(f"{flag}: {fitting[0]} stands there twice")
        matched[fitting[0]] = value
    return matched


def in_words_of_the_command(error: Exception | str) -> str:
    """Return a message with the command's options in place of settings in YAML."""
    text = str(error)
    for pattern, name in _OPTIONS:
        text = re.sub(pattern, name, text)
    return text


_OPTIONS = (
    (r"or set modelpool\.tokenizer", "or name a template by --chat-template FILE"),
    (r"modelpool\.models\._pretrained_", "--base"),
    (r"modelpool\.models\.([\w.-]*\w)", r"--expert \1"),
    (r"modelpool\.models\b", "--base and --expert"),
    (r"modelpool\.\w+_datasets\.([\w.-]*\w)", r"--data \1"),
    (r"modelpool\.(tokenizer|processor)", "--tokenizer"),
    (r"method\.resume=true", "--resume"),
    (r"method\.checkpoint_dir", "--out"),
    (r"(?<!@)\bmethod\.base_method", "--merge"),
    (r"method=featcal/plus", "--preset plus"),
    (r"\bset method\.(\w+)", r"give --set \1"),
    (r"(?<!@)\bmethod\.(\w+)=", r"--set \1="),
    (r"(?<!@)\bmethod\.(\w+)", r"--set \1"),
)
