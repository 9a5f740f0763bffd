"""Base and experts from the `mergekit_config.yml` that mergekit writes next to a merged model."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fusion_bench_featcal.files.untrusted import read_yaml

FILE, MOE_FILE = "mergekit_config.yml", "mergekit_moe_config.yml"
_BASE_IS_MERGED = ("slerp", "nearswap", "arcee_fusion")
"""Methods whose `base_model` is one of the merged models, not their common origin."""
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?")
_LEVELS = 3  # folders above the merged model that relative paths may start at
_ADVICE = "Name the models by --base and --expert NAME=DIR"


class Merge(NamedTuple):
    """Models that a merge was made from.

    Attributes:
        method: mergekit's name of the merge method.
        base: Folder or hub id of the base, or None if the config has none.
        weights: Folder or hub id of an expert -> its weights, such as one per layer.
    """

    method: str
    base: str | None
    weights: Mapping[str, list[float]]


class _Entry(NamedTuple):
    """A model in a config, the LoRA adapter added to it, and its weights in the merge."""

    model: str
    adapter: str | None
    weights: list[float]


def with_merge_config(
    merged: str, base: str | None, experts: Mapping[str, str], notes: list[str]
) -> tuple[str | None, Mapping[str, str], str]:
    """Complete base and experts from the merged model's mergekit config.

    Models that options name have priority. The config is not read if they name all.

    Args:
        merged: Folder or hub id of the merged model.
        base: The base from the options.
        experts: The experts from the options.
        notes: Receives sentences on the values from the config.

    Returns:
        Base, experts, and the origin of the experts' names, for messages.

    Raises:
        ValueError: If no experts are named, or the config's models are not usable.
    """
    folder = Path(merged).expanduser()
    if not folder.is_dir() and (folder.exists() or not experts):
        raise ValueError(
            f"MERGED {merged}: there is no such folder here. Correct it, or for a model on the hub "
            "name --base ID and --expert NAME=ID for each expert"
        )
    merge = None if base and experts else read_merge(folder)
    if merge is None:
        if not experts:
            raise ValueError(
                f"{merged} has no {FILE}: give --base and --expert NAME=DIR for each expert"
            )
        return base, experts, "--expert"
    option, named = f"{merged}/{FILE}", experts
    if not experts:
        named = _experts(merge, option, notes)
        notes.append(f"experts by {FILE} ({merge.method})")
    if base is None and merge.base is not None:
        notes.append(f"base by {FILE}")
    by_config = [] if base or not merge.base else [merge.base]
    missing = [at for at in (*by_config, *(named.values() if not experts else ())) if _is_lost(at)]
    if missing:
        raise ValueError(f"{option}: these folders are not here: {', '.join(missing)}. {_ADVICE}")
    return base or merge.base, named, "--expert" if experts else option


def _experts(merge: Merge, option: str, notes: list[str]) -> dict[str, str]:
    """Return name -> location of the models that a merge moves towards.

    A name is the last part of a location. A merge moves away from a model with a negative weight,
    and a calibration would move back, so the user has to choose.
    """
    unused = [location for location, weights in merge.weights.items() if not any(weights)]
    locations = [location for location in merge.weights if location not in unused]
    if negative := [location for location in locations if min(merge.weights[location]) < 0]:
        raise ValueError(
            f"{option} gives {', '.join(negative)} a negative weight: the merge moves away from "
            "it, and a calibration would move back. Name the experts by --expert NAME=DIR"
        )
    if unused:
        notes.append(f"not experts, because their weight in the merge is 0: {', '.join(unused)}")
    experts = {_name(location): location for location in locations}
    if not experts or len(experts) < len(locations):
        problem = f"{', '.join(locations)} end in one name" if experts else "no models"
        raise ValueError(f"{option}: {problem}. {_ADVICE}")
    return experts


def _name(location: str) -> str:
    """Return the last part of a path or hub id, without a revision."""
    path = Path(location)
    return path.name if path.exists() else path.name.partition("@")[0]


def _is_lost(location: str) -> bool:
    """Return whether a location is no folder here, and no hub id."""
    return not (Path(location).expanduser().exists() or _HUB_ID.fullmatch(location))


def read_merge(merged: Path) -> Merge | None:
    """Read the models that a folder's model was merged from. None without a mergekit config.

    Raises:
        ValueError: If the config cannot be read, or the model is a mixture or stack of experts.
    """
    file = merged / FILE
    if (merged / MOE_FILE).exists():
        file = merged / MOE_FILE
    try:
        content = read_yaml(file)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{error}. {_ADVICE}") from error
    if isinstance(content, Mapping) and {"experts", "gate_mode"} & content.keys():
        raise ValueError(
            f"{merged} was made by mergekit-moe, which routes tokens between its models and does "
            "not merge them. Only merged models are calibrated"
        )
    try:
        return _merge(content, merged)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _merge(content: Any, merged: Path) -> Merge:
    """Return base and experts of a config. An adapter on the base is an expert's location."""
    sections = [*_sections(content)]
    method = str(content.get("merge_method"))
    if any(map(_stacks, sections)):
        raise ValueError(
            f"{method} of slices that stack or move layers gives a model with other blocks than "
            "its experts, so it cannot be calibrated"
        )
    models = [m for part in sections for key in ("models", "sources") for m in _list(part, key)]
    entries = [_entry(model, merged) for model in models]
    named = [_entry(part["base_model"], merged) for part in sections if part.get("base_model")][:1]
    if method in _BASE_IS_MERGED:
        entries, named = entries + named, []
    adapted = {entry.model for entry in entries if entry.adapter}
    base = named[0].model if named else next(iter(adapted), None)
    if adapted - {base} or any(entry.adapter for entry in named):
        raise ValueError(
            "it adds LoRA adapters to other models than the base: merge each into a folder of its "
            "own (PEFT's merge_and_unload) and name it by --expert NAME=DIR"
        )
    weights: dict[str, list[float]] = {}
    for entry in entries:
        weights.setdefault(entry.adapter or entry.model, []).extend(entry.weights)
    weights.pop(base or "", None)
    return Merge(method, base, weights)


def _sections(part: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a config and the slices and modules in it."""
    if not isinstance(part, Mapping):
        raise ValueError(f"{part!r:.60} is no mapping. {_ADVICE}")
    yield part
    for inner in _list(part, "slices") + _list(part, "modules"):
        yield from _sections(inner)


def _list(part: Mapping[str, Any], key: str) -> list[Any]:
    """Return the entries of a list, or of a mapping by name."""
    entries = part.get(key) or []
    if not isinstance(entries, list | Mapping):
        raise ValueError(f"{key} is {entries!r:.60}, not a list. {_ADVICE}")
    return list(entries.values() if isinstance(entries, Mapping) else entries)


def _stacks(part: Mapping[str, Any]) -> bool:
    """Return whether a slice has another position than its layers have in its models."""
    end: Any = 0
    for piece in _list(part, "slices"):
        sources = [source for source in _list(piece, "sources") if isinstance(source, Mapping)]
        ranges = [source.get("layer_range") or [end, end] for source in sources]
        if any(not isinstance(r, list) or r[0] != end or r != ranges[0] for r in ranges):
            return True
        end = ranges[0][-1] if ranges else end
    return False


def _entry(value: Any, merged: Path) -> _Entry:
    """Read `MODEL`, `MODEL+LORA`, one of mergekit's mappings, or a mapping with parameters."""
    weights, adapter = [], None
    if isinstance(value, Mapping) and isinstance(value.get("parameters"), Mapping):
        weights = [*_numbers(value["parameters"].get("weight"))]
    while isinstance(value, Mapping) and "model" in value:
        value, adapter = value["model"], value.get("lora")
    if adapter is None and isinstance(value, str):
        value, _, adapter = value.partition("+")
    location = _location(value, merged)
    return _Entry(location, _location(adapter, merged) if adapter else None, weights or [1.0])


def _numbers(weight: Any) -> Iterator[float]:
    """Yield the numbers of a weight: one, one per layer, or the values of filters by tensor."""
    if isinstance(weight, Mapping):
        yield from _numbers(weight.get("value"))
    elif isinstance(weight, list):
        for entry in weight:
            yield from _numbers(entry)
    elif isinstance(weight, int | float):
        yield weight


def _location(value: Any, merged: Path) -> str:
    """Return a folder or hub id. Relative folders start here or above the merged model."""
    suffix = ""
    if isinstance(value, Mapping):
        suffix = f"@{value['revision']}" if value.get("revision") else ""
        value = value.get("path")
    if not isinstance(value, str) or not value:
        raise ValueError(f"a model is {value!r:.60}, not a folder or hub id. {_ADVICE}")
    for folder in (Path(value), *(above / value for above in [*merged.parents][:_LEVELS])):
        if folder.exists():
            return os.path.normpath(folder)
    return value + suffix
