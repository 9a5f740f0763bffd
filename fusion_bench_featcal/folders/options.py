"""Options of a command, declared as settings of a dataclass: their parser, and recipes in YAML."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml

from fusion_bench_featcal.errors.masking import masked
from fusion_bench_featcal.errors.words import Vocabulary
from fusion_bench_featcal.files.untrusted import parse_yaml
from fusion_bench_featcal.settings.fields import setting, settings_of

RECIPE = "recipe.yaml"
"""File next to a result with the options of its run."""
INPUTS_FILE = "inputs.json"
"""File beside finished blocks, and in a saved model's report: option -> digest of its files."""
WORDS = Vocabulary("--set ", {
    "resume": "--resume", "checkpoint_dir": "--out",
    "rule=plus": "--preset plus", "rule=paper": "--preset paper",
    "base": "--base", "expert": "--expert {}", "batches": "--data {}",
    "image_column": "--columns image=NAME", "label_column": "--columns label=NAME",
    "split": "PATH:SPLIT", "template": "--chat-template FILE",
    "swudi": "--merge swudi", "processes": " (torchrun --nproc-per-node)",
    "float32": "save MERGED, --base and every --expert in it, with "
    "model.float().save_pretrained(DIR)",
})  # fmt: skip
"""Names of the command's options in messages that other entry points share."""


def pair(word: str) -> dict[str, Any]:
    """Read `NAME=VALUE`."""
    name, _, value = word.partition("=")
    if not (name and value):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {word!r}")
    return {name: value}


def setting_word(word: str) -> dict[str, Any]:
    """Read `SETTING=VALUE` with a YAML value."""
    ((name, text),) = pair(word).items()
    try:
        return {name: parse_yaml(text)}
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{name}={text} is not valid YAML: {error}") from error


def columns(word: str) -> dict[str, str]:
    """Read `[NAME:]PART=COLUMN,...` into `{[NAME:]PART: COLUMN}`."""
    task, colon, _ = word.partition("=")[0].rpartition(":")
    pairs = list(map(pair, word[len(task) + len(colon) :].split(",")))
    named = {f"{task}{colon}{part}": c for entry in pairs for part, c in entry.items()}
    if len(named) < len(pairs):
        raise argparse.ArgumentTypeError(f"{word!r} names a column twice")
    return named


def prompt(word: str) -> dict[str, str]:
    """Read `[NAME=]TEXT`. Without NAME the prompt applies to all other tasks, with the name *."""
    name, equals, text = word.partition("=")
    return {name: text} if equals and "{" not in name else {"*": word}


def mapping(
    help: str,
    metavar: str,
    word: Callable[[str], Any] = pair,
    *,
    texts: bool = True,
    **more: Any,
) -> Any:
    """Declare a repeatable option that maps names to values.

    Args:
        help: Its help.
        metavar: Form of its words.
        word: Parses one word into a mapping.
        texts: Whether all values are texts.
        **more: Further metadata. With `is_location=True` values are paths or hub ids. A name may
            stand twice only with `last_counts=True`.
    """
    return setting(
        {},
        help,
        accepts="a mapping of names to texts" if texts else "a mapping",
        check=lambda value: (
            isinstance(value, Mapping)
            and (not texts or all(isinstance(text, str) for text in value.values()))
        ),
        metavar=metavar,
        word=word,
        **more,
    )


def add_arguments(parser: argparse.ArgumentParser, owner: type, *names: str) -> None:
    """Add a dataclass's options to a parser. The first one is a positional argument.

    Args:
        parser: The parser.
        owner: The dataclass.
        *names: Only these options, of which the first is required. All without names.
    """
    fields = [field for field in settings_of(owner) if not names or field.name in names]
    for index, field in enumerate(fields):
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
        if index:
            parser.add_argument(flag_of(field.name), **more)
        else:
            parser.add_argument(field.name, nargs=None if names else "?", **more)


def flag_of(name: str) -> str:
    """Return an option's name on the command line."""
    return "--" + name.replace("_", "-")


def command_line_options(parsed: Mapping[str, object], owner: type) -> dict[str, Any]:
    """Return the options set on the command line, by name, from a parser of `add_arguments`."""
    values = {}
    for field in settings_of(owner):
        if isinstance(value := parsed.get(field.name), list):
            value = _join(value, flag_of(field.name), field.metadata.get("last_counts", False))
        values[field.name] = value
    return {name: value for name, value in values.items() if value is not None}


def _join(words: Sequence[Mapping[str, object]], flag: str, last_counts: bool) -> dict[str, Any]:
    """Join the words of a repeatable option.

    Raises:
        ValueError: If two have one name, unless the last one counts.
    """
    joined = dict[str, Any]()
    for name, value in (entry for word in words for entry in word.items()):
        if name in joined and not last_counts:
            task = "for all tasks" if name == "*" else name
            raise ValueError(
                f"{flag} has {task} twice, {joined[name]} and {value}: leave one of them out, or "
                "give it another name"
            )
        joined[name] = value
    return joined


def recipe_text(owner: object, folder: Path) -> str:
    """Return the recipe of a dataclass's options that differ from their defaults.

    Paths of files that exist are relative to the recipe's folder (see `with_full_paths`), because
    a full path has names of users and machines.
    """
    defaults, recorded = type(owner)(), {}
    for field in settings_of(type(owner)):
        value, keys = getattr(owner, field.name), field.metadata
        if keys.get("is_recorded", True) and value != getattr(defaults, field.name):
            recorded[field.name] = _as_relative(value, folder) if keys.get("is_location") else value
    return masked(yaml.safe_dump(recorded, sort_keys=False, allow_unicode=True))


def with_full_paths(recipe: Mapping[str, object], owner: type, folder: Path) -> dict[str, Any]:
    """Return the options of a recipe with full paths in place of paths relative to its folder.

    Names without `./` or `../` that the folder lacks are hub ids, or paths in the current folder.
    """
    locations = {field.name for field in settings_of(owner) if field.metadata.get("is_location")}
    return {n: _as_absolute(v, folder) if n in locations else v for n, v in recipe.items()}


def _as_absolute(value: Any, folder: Path) -> Any:
    if isinstance(value, Mapping):
        return {name: _as_absolute(entry, folder) for name, entry in value.items()}
    path = os.path.normpath(folder.resolve() / value)
    return path if value.startswith(".") or _existing_path(path) is not None else value


def _as_relative(value: Any, folder: Path) -> Any:
    if isinstance(value, Mapping):
        return {name: _as_relative(entry, folder) for name, entry in value.items()}
    if (path := _existing_path(value)) is None:
        return value
    file = Path(path).absolute()  # its name stays, because files in the hub's cache are links
    relative = os.path.relpath(file.parent.resolve() / file.name, folder.resolve())
    return f"{relative}{value.removeprefix(path)}"


def _existing_path(value: str) -> str | None:
    """Return the path that exists in `PATH` or `PATH:SPLIT`, or None."""
    paths = (value, value.rpartition(":")[0])
    return next((path for path in paths if path and Path(path).exists()), None)
