"""The config that mergekit writes next to a merged model: base, experts and their weights."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fusion_bench_featcal.files.untrusted import read_yaml
from fusion_bench_featcal.folders.merge_weights import (
    MergedTogether,
    Parameters,
    Weight,
    weights_of,
)

FILE, MOE_FILE = FILES = "mergekit_config.yml", "mergekit_moe_config.yml"
ADVICE = "Name the models by --base and --expert NAME=DIR"
_BASE_IS_MERGED = ("slerp", "nearswap", "arcee_fusion")
"""Methods whose `base_model` is one of the merged models, not their common origin."""
_BASE_IS_UNREAD = ("linear", "karcher")
"""Methods that treat `base_model` like any other model."""
_LEVELS = 3  # folders above the merged model that relative paths may start at


class Merge(NamedTuple):
    """Models that a merge was made from.

    Attributes:
        method: mergekit's name of the merge method.
        base: Folder or hub id of the base, or None if the config has none.
        weights: Folder or hub id of an expert -> its weight.
    """

    method: str
    base: str | None
    weights: Mapping[str, Weight]


class _Entry(NamedTuple):
    """A model in a config, and the LoRA adapter added to it."""

    model: str
    adapter: str | None

    @property
    def location(self) -> str:
        """The adapter, or the whole model."""
        return self.adapter or self.model


class _Part(NamedTuple):
    """A slice of a merge, or all of it: its models, their weights, and the base."""

    group: MergedTogether
    entries: list[_Entry]
    base: _Entry | None


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
        raise ValueError(f"{error}. {ADVICE}") from error
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
    content = _mapping(content)
    method = str(content.get("merge_method"))
    modules = [*map(_mapping, _list(content, "modules"))] or [content]
    if any(map(_stacks, modules)):
        raise ValueError(
            f"{method} of slices that stack or move layers gives a model with other blocks than "
            "its experts, so it cannot be calibrated"
        )
    parts = [_parts(method, module, content, merged) for module in modules]
    models = [{m: None for part in of_module for m in part.group.models} for of_module in parts]
    if other := next((names for names in models if names.keys() != models[0].keys()), None):
        raise ValueError(
            f"its modules are merged from different models ({', '.join(models[0])} and "
            f"{', '.join(other)}). {ADVICE}"
        )
    return _joined(method, [part for of_module in parts for part in of_module])


def _joined(method: str, parts: Sequence[_Part]) -> Merge:
    """Return base and experts of all parts."""
    entries = [entry for part in parts for entry in part.entries]
    is_merged = method in _BASE_IS_MERGED
    bases = [] if is_merged else list(dict.fromkeys(part.base for part in parts if part.base))
    adapted = list(dict.fromkeys(entry.model for entry in entries if entry.adapter))
    weights = weights_of(method, [part.group for part in parts])
    names = [entry.location for entry in bases]
    base = next(iter(names or adapted), None)
    if len(bases) > 1:
        raise ValueError(f"its slices have different bases ({', '.join(names)}). {ADVICE}")
    if bases and base in weights and method in _BASE_IS_UNREAD:
        raise ValueError(
            f"base_model {base} is one of the models that {method} averages, so it may be an "
            f"expert or the base. {ADVICE}"
        )
    if {*adapted} - {base} or any(entry.adapter for entry in bases):
        raise ValueError(
            "it adds LoRA adapters to other models than the base: merge each into a folder of its "
            "own (PEFT's merge_and_unload) and name it by --expert NAME=DIR"
        )
    weights.pop(base or "", None)
    return Merge(method, base, weights)


def _parts(
    method: str, module: Mapping[str, Any], content: Mapping[str, Any], merged: Path
) -> list[_Part]:
    """Read the slices of a module, or the module as one. The config is a module by itself."""
    parts = []
    for piece in map(_mapping, _list(module, "slices") or [module]):
        values = _list(piece, "sources") or _list(piece, "models")
        entries = [_entry(value, merged) for value in values]
        named = piece.get("base_model") or content.get("base_model")
        base = _entry(named, merged) if named else None
        models = dict[str, list[Parameters]]()
        for entry, value in zip(entries, values, strict=True):
            models.setdefault(entry.location, []).append(_parameters(value))
        if base is not None and method in _BASE_IS_MERGED:
            models.setdefault(base.location, [])
            entries.append(base)
        levels = [_parameters(holder) for holder in (piece, module, content)]
        at = None if base is None else base.location
        parts.append(_Part(MergedTogether(models, at, levels, _layers(values)), entries, base))
    return parts


def _mapping(part: Any) -> Mapping[str, Any]:
    """Return a part of a config that must be a mapping."""
    if not isinstance(part, Mapping):
        raise ValueError(f"{part!r:.60} is no mapping. {ADVICE}")
    return part


def _parameters(part: Any) -> Parameters:
    """Return the parameters of a model, slice, module or config."""
    parameters = part.get("parameters") if isinstance(part, Mapping) else None
    return parameters if isinstance(parameters, Mapping) else {}


def _layers(sources: Sequence[Any]) -> int | None:
    """Return the number of layers of a slice, which are equal for its sources."""
    ranges = [s.get("layer_range") for s in sources if isinstance(s, Mapping)]
    first = next(filter(None, ranges), None)
    return None if first is None else max(1, int(first[-1]) - int(first[0]))


def _list(part: Mapping[str, Any], key: str) -> list[Any]:
    """Return the entries of a list, or of a mapping by name."""
    entries = part.get(key) or []
    if not isinstance(entries, list | Mapping):
        raise ValueError(f"{key} is {entries!r:.60}, not a list. {ADVICE}")
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
    adapter = None
    while isinstance(value, Mapping) and "model" in value:
        value, adapter = value["model"], value.get("lora")
    if adapter is None and isinstance(value, str):
        value, _, adapter = value.partition("+")
    location = _location(value, merged)
    return _Entry(location, _location(adapter, merged) if adapter else None)


def _location(value: Any, merged: Path) -> str:
    """Return a folder or hub id. Relative folders start here or above the merged model."""
    suffix = ""
    if isinstance(value, Mapping):
        suffix = f"@{value['revision']}" if value.get("revision") else ""
        value = value.get("path")
    if not isinstance(value, str) or not value:
        raise ValueError(f"a model is {value!r:.60}, not a folder or hub id. {ADVICE}")
    for folder in (Path(value), *(above / value for above in [*merged.parents][:_LEVELS])):
        if folder.exists():
            return os.path.normpath(folder)
    return value + suffix
