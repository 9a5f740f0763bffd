"""Options of a command, declared as settings of a dataclass, with parser and recipes."""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import yaml

from fusion_bench_featcal.setting_fields import setting, settings_of
from fusion_bench_featcal.untrusted import parse_yaml, read_yaml

RECIPE = "recipe.yaml"
"""File next to a result with the options of its run."""


def mapping(help: str, metavar: str, word: Any, *, is_location: bool = False) -> Any:
    """Declare an option that maps names to values.

    Args:
        help: Its help.
        metavar: Form of its words.
        word: Parses a command-line argument into a mapping of one name.
        is_location: Whether values are paths of existing files, or hub ids.
    """
    return setting(
        {},
        help,
        accepts="a mapping",
        check=lambda value: isinstance(value, Mapping),
        metavar=metavar,
        word=word,
        is_location=is_location,
    )


def add_arguments(parser: argparse.ArgumentParser, owner: type) -> None:
    """Add a dataclass's options to a parser. The first one is a positional argument."""
    for number, field in enumerate(settings_of(owner)):
        keys, kinds = field.metadata, (field.type, *get_args(field.type))
        more: dict[str, Any] = {"default": argparse.SUPPRESS, "help": keys["help"]}
        if bool in kinds:
            more |= {"action": "store_true"}
        elif keys["choices"]:
            more |= {"choices": keys["choices"]}
        elif "word" in keys:
            more |= {"type": keys["word"], "action": "append", "metavar": keys["metavar"]}
        else:
            more |= {"type": int if int in kinds else str, "metavar": keys.get("metavar")}
        if number:
            parser.add_argument(flag_of(field.name), **more)
        else:
            parser.add_argument(field.name, nargs="?", **more)


def flag_of(name: str) -> str:
    """Return an option's name on the command line."""
    return "--" + name.replace("_", "-")


def given_on_the_command_line(parsed: Mapping[str, Any], owner: type) -> dict[str, Any]:
    """Return the options set on the command line, by name, from a parser of `add_arguments`."""
    values = {f.name: parsed[f.name] for f in settings_of(owner) if f.name in parsed}
    for name, words in values.items():
        if not isinstance(words, list):
            continue
        values[name] = {}
        for word in words:
            twice = values[name].keys() & word.keys()
            if twice and name not in ("set", "columns", "prompt"):  # for these the last one counts
                raise ValueError(f"{flag_of(name)}: {min(twice)} is named twice")
            values[name] = with_changes(values[name], word)
    return values


def with_changes(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping with changes, applied recursively to nested mappings."""
    changed = dict(values)
    for name, value in changes.items():
        earlier = changed.get(name)
        both = isinstance(earlier, Mapping) and isinstance(value, Mapping)
        changed[name] = with_changes(earlier, value) if both else value  # type: ignore[arg-type]
    return changed


def pair(word: str, form: str = "NAME=VALUE", sign: str = "=") -> dict[str, Any]:
    """Read `NAME=VALUE`."""
    name, _, value = word.partition(sign)
    if not (name and value):
        raise argparse.ArgumentTypeError(f"expected {form}, got {word!r}")
    return {name: value}


def scorer(word: str) -> dict[str, Any]:
    """Read MODULE:NAME,..."""
    return pair(word, "lm-eval:TASK,... or MODULE:FUNCTION,...", ":")


def setting_word(word: str) -> dict[str, Any]:
    """Read `SETTING=VALUE` with a YAML value."""
    ((name, text),) = pair(word).items()
    try:
        return {name: parse_yaml(text)}
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{name}={text} is no YAML: {error}") from error


def columns(word: str) -> dict[str, Any]:
    """Read `[NAME:]PART=COLUMN,...`. Without NAME the columns apply to all tasks."""
    task, colon, _ = word.partition("=")[0].rpartition(":")
    pairs = word[len(task) + len(colon) :].split(",")
    named = {name: column for text in pairs for name, column in pair(text).items()}
    return {task: named} if colon else named


def prompt(word: str) -> dict[str, Any]:
    """Read `[NAME=]TEXT`. Without NAME the prompt applies to all tasks, with an empty name."""
    name, equals, text = word.partition("=")
    return {name: text} if equals and "{" not in name else {"": word}


def read_recipe(file: Path) -> dict[str, Any]:
    """Read the options of a recipe."""
    if not file.is_file():
        raise ValueError(f"recipe {file}: there is no such file")
    content = read_yaml(file)
    if not isinstance(content, Mapping):
        raise ValueError(f"{file} is no recipe: it has no `option: value` lines")
    return dict(content)


def recipe_text(owner: Any) -> str:
    """Return the recipe of a dataclass's options that differ from their defaults.

    Files are named by their full paths, so that the recipe works in any folder.
    """
    recorded = {}
    for field in settings_of(type(owner)):
        value, keys = getattr(owner, field.name), field.metadata
        default = {} if "word" in keys else field.default
        if keys.get("is_recorded", True) and value != default:
            recorded[field.name] = _absolute(value) if keys.get("is_location") else value
    return yaml.safe_dump(recorded, sort_keys=False, allow_unicode=True)


def _absolute(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _absolute(entry) for name, entry in value.items()}
    path, colon, split = value, "", ""
    if not Path(value).expanduser().exists():  # FOLDER:SPLIT, or a hub id
        path, colon, split = value.rpartition(":")
    file = Path(path).expanduser()
    return f"{file.absolute()}{colon}{split}" if path and file.exists() else value


def in_words_of_the_command(error: Exception | str) -> str:
    """Return a message with the command's options in place of YAML settings."""
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
    (r"Check method\.base_method", "Check MERGED or --merge"),
    (r"(?<!@)\bmethod\.base_method", "--merge"),
    (r"method=featcal/plus", "--preset plus"),
    (r"\bset method\.(\w+)", r"give --set \1"),
    (r"(?<!@)\bmethod\.(\w+)=", r"--set \1="),
    (r"(?<!@)\bmethod\.(\w+)", r"--set \1"),
)
