"""Names that a model's card and configs give to the model it was fine-tuned from."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from fusion_bench_featcal.files.untrusted import parse_json, parse_yaml

_HEAD = re.compile(r"---\s*\n(.*?)\n---\s*\n", re.DOTALL)
CARD_FILES = ("README.md", "config.json", "config_sentence_transformers.json")


def without_base(locations: Sequence[str], argument: str) -> str:
    """Return a sentence on what a base would add, with its name if all experts name the same.

    Args:
        locations: The experts' folders or hub ids.
        argument: How a base is given, such as `base={!r}`.
    """
    named = [bases_of(location) for location in locations]
    common = (name for name in named[0] if all(name in names for names in named))
    base = next(common, None) if len(named) > 1 else None  # one expert alone may name itself
    return (
        "without a base, the repair uses only the texts. With the model that the experts were "
        "fine-tuned from, it also uses the experts' weights, and fewer texts repair more"
        + ("" if base is None else f". The experts name it: {argument.format(base)}")
    )


def bases_of(location: str) -> list[str]:
    """Return names of a model's base: its location, then the names in its card and configs.

    Args:
        location: The folder or hub id that the model was loaded from. If the model was trained
            since, this is its base, and the card and configs there name the base of the base.
    """
    contents = [c for name in CARD_FILES if isinstance(c := read_local(location, name), Mapping)]
    values = [content.get(key) for content in contents for key in ("base_model", "_name_or_path")]
    lists = [value if isinstance(value, list) else [value] for value in values]
    return [str(name) for names in ([location], *lists) for name in names if name]


def read_local(location: str, name: str) -> Any:
    """Return the content of a JSON file or the head of a card, {} if it is missing or damaged.

    Args:
        location: A folder, or a hub id that may be in the cache.
        name: The file.
    """
    try:
        is_folder = Path(location).is_dir()
        file = Path(location, name) if is_folder else try_to_load_from_cache(location, name)
        if not isinstance(file, str | Path):  # not in the cache
            return {}
        data = Path(file).read_bytes()
        if name.endswith(".json"):
            return parse_json(data, Path(file))
        head = _HEAD.match(data.decode())
        return parse_yaml(head[1]) if head else {}
    except (OSError, ValueError):  # also if it is neither a folder nor an id
        return {}
