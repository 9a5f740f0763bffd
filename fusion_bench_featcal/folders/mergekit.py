"""Base and experts from the `mergekit_config.yml` that mergekit writes next to a merged model."""

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fusion_bench_featcal.errors.block import first_line
from fusion_bench_featcal.files.untrusted import read_yaml

FILE = "mergekit_config.yml"
_BASE_IS_MERGED = ("slerp", "nearswap", "arcee_fusion")
"""Methods whose `base_model` is one of the merged models, not their common origin."""
_TYPES = {"models": list, "sources": list, "slices": list, "modules": dict}
_MOST_PATH = 1000  # characters
_ADVICE = "Name the models by --base and --expert NAME=DIR"


class UnreadableConfig(ValueError):
    """A config without usable model names. The user may name models by options instead."""


class Merge(NamedTuple):
    """Models that a merge was made from.

    Attributes:
        method: mergekit's name of the merge method.
        base: Folder or hub id of the base, or None if the config has none.
        experts: Name -> folder or hub id. A name is the last part of the location, joined by `-`
            with as many parent folders as it takes to be unique.
    """

    method: str
    base: str | None
    experts: Mapping[str, str]


class _Reference(NamedTuple):
    """A model in a config, and the LoRA adapter added to it."""

    model: str
    adapter: str | None


def with_merge_config(
    merged: str, base: str | None, experts: Mapping[str, str], notes: list[str]
) -> tuple[str | None, Mapping[str, str], str]:
    """Complete base and experts from the merged model's mergekit config.

    Args:
        merged: Folder or hub id of the merged model.
        base: The base from the options.
        experts: The experts from the options.
        notes: Receives sentences on the values from the config.

    Returns:
        Base, experts, and the origin of the experts' names, for messages.
    """
    folder = Path(merged).expanduser()
    if not folder.is_dir() and (folder.exists() or not experts):
        raise ValueError(
            f"MERGED {merged}: there is no such folder here. Correct it, or for a model on the hub "
            "name --base ID and --expert NAME=ID for each expert"
        )
    try:
        merge = read_merge(folder)
    except UnreadableConfig as error:
        if not experts:
            raise
        notes.append(f"not read: {first_line(error)}")
        merge = None
    if merge is None:
        if not experts:
            raise ValueError(
                f"{merged} has no {FILE}: give --base and --expert NAME=DIR for each expert"
            )
        return base, experts, "--expert"
    if base is None and merge.base is not None:
        notes.append(f"base by {FILE}")
    elif base is not None and merge.base is not None and not _is_same(base, merge.base):
        raise ValueError(
            f"--base {base} is not the base that {merged} was merged on: its {FILE} names "
            f"{merge.base}"
        )
    if not experts:
        notes.append(f"experts by {FILE} ({merge.method})")
        return base or merge.base, merge.experts, f"{merged}/{FILE}"
    listed = list(merge.experts.values())
    for name, location in experts.items():
        if not any(_is_same(location, other) for other in listed):
            raise ValueError(
                f"--expert {name}={location} is no model that {merged} was merged from: its {FILE} "
                f"names {', '.join(listed)}"
            )
    if unnamed := [v for v in listed if not any(_is_same(v, e) for e in experts.values())]:
        notes.append(f"merged from {', '.join(unnamed)} as well, for which no --expert stands")
    return base or merge.base, experts, "--expert"


def _is_same(one: str, other: str) -> bool:
    """Return whether two locations are one folder, or one hub id."""
    first, second = Path(one).expanduser(), Path(other).expanduser()
    if first.exists() and second.exists():
        return first.resolve() == second.resolve()
    # One of them may be the local copy of the other.
    return one == other or first.exists() != second.exists()


def read_merge(merged: Path) -> Merge | None:
    """Read the models that a folder's model was merged from. None without a mergekit config."""
    file = merged / FILE
    try:
        content = read_yaml(file)
        sections = list(_sections(content))
        models = [_reference(model, merged) for part in sections for model in _models(part)]
        named = next((part["base_model"] for part in sections if part.get("base_model")), None)
        base = None if named is None else _reference(named, merged)
    except FileNotFoundError:
        return None
    except ValueError as error:
        start = "" if str(file) in str(error) else f"{file}: "
        raise UnreadableConfig(f"{start}{error}. {_ADVICE}") from error
    method = str(content.get("merge_method"))
    if method == "passthrough" or any(map(_stacks, sections)):
        slices = f"{method} from slices of different layers"
        stacked = "passthrough, which stacks layers" if method == "passthrough" else slices
        raise ValueError(
            f"{merged} was merged by mergekit's {stacked}: it has other blocks than its experts, "
            "so it cannot be calibrated"
        )
    if base is not None and method in _BASE_IS_MERGED:
        models, base = [*models, base], None
    base_location, locations = _with_adapters(models, base, file)
    experts = _named(locations)
    if not experts or len(experts) < len(locations):
        problem = f"the names of {', '.join(locations)} do not differ" if experts else "no models"
        raise UnreadableConfig(f"{file}: {problem}. {_ADVICE}")
    return Merge(method, base_location, experts)


def _sections(content: Any, label: str = "it") -> Iterator[Mapping[str, Any]]:
    """Yield a config and the slices and modules in it, after a check of their types."""
    if not isinstance(content, Mapping):
        raise ValueError(f"{label} is {content!r:.60}, not a mapping")
    for key, kind in _TYPES.items():
        if not isinstance(content.get(key), kind | None):
            name = "list" if kind is list else "mapping"
            raise ValueError(f"{key} is {content[key]!r:.60}, not a {name}")
    yield content
    for part in [*(content.get("slices") or ()), *(content.get("modules") or {}).values()]:
        yield from _sections(part, "a slice or module")


def _models(part: Mapping[str, Any]) -> Iterator[Any]:
    for entry in [*(part.get("models") or ()), *(part.get("sources") or ())]:
        yield entry.get("model") if isinstance(entry, Mapping) else entry


def _reference(value: Any, merged: Path) -> _Reference:
    """Read a reference: `MODEL`, `MODEL+LORA`, or one of mergekit's mappings."""
    model, adapter = value, None
    if isinstance(value, Mapping) and "model" in value:
        model, adapter = value["model"], value.get("lora")
    if adapter is None and isinstance(model, str):
        model, _, adapter = model.partition("+")
    location = _location(model, merged)
    return _Reference(location, _location(adapter, merged) if adapter else None)


def _location(value: Any, merged: Path) -> str:
    """Return a folder or hub id. Relative folders may start at the merged model's parent."""
    revision = None
    if isinstance(value, Mapping):
        value, revision = value.get("path"), value.get("revision")
    if not isinstance(value, str) or not 0 < len(value) <= _MOST_PATH:
        raise ValueError(f"a model is {value!r:.60}, not a folder or hub id")
    beside = merged.parent / value
    if not Path(value).exists() and beside.exists():
        return str(beside)
    return value if revision is None else f"{value}@{revision}"


def _stacks(part: Mapping[str, Any]) -> bool:
    """Return whether the merged model has other blocks than its experts."""
    end = 0
    for piece in part.get("slices") or ():
        sources = [source for source in piece.get("sources") or () if source]
        ranges = [source.get("layer_range") or [end, end] for source in sources]
        if any(span[0] != end or span != ranges[0] for span in ranges):
            return True
        end = ranges[0][1] if ranges else end
    return False


def _with_adapters(
    models: Collection[_Reference], base: _Reference | None, file: Path
) -> tuple[str | None, list[str]]:
    """Return the locations of base and experts. An adapter on the base is an expert's location."""
    adapted = {_resolved(model.model): model.model for model in models if model.adapter}
    base_location = None if base is None else base.model
    if base_location is None and len(adapted) == 1:
        (base_location,) = adapted.values()
    other_locations = [
        location for key, location in adapted.items() if key != _resolved(base_location or "")
    ]
    if other_locations or (base is not None and base.adapter):
        raise ValueError(
            f"{file} adds LoRA adapters to {', '.join(other_locations) or 'the base'}, of which "
            "featcal cannot say what they were tuned from: merge each into a folder of its own "
            "(PEFT's merge_and_unload) and name it by --expert NAME=DIR"
        )
    locations = {_resolved(m.adapter or m.model): m.adapter or m.model for m in models}
    if base_location is not None:
        locations.pop(_resolved(base_location), None)
    return base_location, list(locations.values())


def _resolved(location: str) -> Path:
    """Return a folder with all links resolved, or a hub id, in one spelling."""
    folder = Path(location).expanduser()
    return folder.resolve() if folder.exists() else folder


def _named(locations: Collection[str]) -> dict[str, str]:
    """Name models by the shortest unique ends of their locations, in the form of file names."""
    split = {_split(location): location for location in locations}
    named = {}
    for path_parts, location in split.items():
        tails = [path_parts[-length:] for length in range(1, len(path_parts) + 1)]
        free = [t for t in tails if sum(other[-len(t) :] == t for other in split) == 1]
        tail = free[0] if free else path_parts
        named["-".join(part for part in tail if part.strip("/."))] = location
    return named


def _split(location: str) -> tuple[str, ...]:
    """Split a hub id, or the full path of a folder without resolving links."""
    folder = Path(location).expanduser()
    if folder.exists():
        return Path(os.path.abspath(folder)).parts
    return Path(location.partition("@")[0]).parts
