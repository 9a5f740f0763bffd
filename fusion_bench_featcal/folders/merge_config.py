"""The config that mergekit writes beside a merged model: base, experts and their weights."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fusion_bench_featcal.files.untrusted import read_yaml

FILE, MOE_FILE = FILES = "mergekit_config.yml", "mergekit_moe_config.yml"
ADVICE = "Name the models with --base and --expert NAME=DIR"
_BASE_IS_MERGED = ("slerp", "nearswap", "arcee_fusion")
"""Methods whose `base_model` is one of the merged models, not their common origin."""
_BASE_IS_UNREAD = ("linear", "karcher")
"""Methods that treat `base_model` like any other model."""
_UNWEIGHTED = (
    "arcee_fusion", "karcher", "model_stock", "nearswap", "passthrough", "ram", "ramplus_tl", "sce",
)  # fmt: skip
_LEVELS = 3  # folders above the merged model that relative paths may start at


class Merge(NamedTuple):
    """Models that a merge was made from.

    Attributes:
        method: mergekit's name of the merge method.
        base: Folder or hub id of the base, or None if the config has none.
        weights: Folder or hub id of an expert -> its weight, or None if it is not one number.
        has_negative_weight: Whether a weight or lambda is negative.
    """

    method: str
    base: str | None
    weights: Mapping[str, float | None]
    has_negative_weight: bool


class Entry(NamedTuple):
    """A model in a config, and the LoRA adapter added to it."""

    model: str
    adapter: str | None

    @property
    def location(self) -> str:
        """The adapter, or the whole model."""
        return self.adapter or self.model


def read_merge(merged: Path) -> Merge | None:
    """Read the models that a folder's model was merged from. None without a mergekit config.

    Raises:
        ValueError: If the config cannot be read, or the model is a mixture or stack of experts.
    """
    file = merged / (MOE_FILE if (merged / MOE_FILE).exists() else FILE)
    try:
        content = read_yaml(file)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{error}. {ADVICE}") from error
    if isinstance(content, Mapping) and {"experts", "gate_mode"} & content.keys():
        raise ValueError(
            f"{merged} was made with mergekit-moe, which routes tokens between its models and does "
            "not merge them. Only merged models can be calibrated"
        )
    try:
        return _parse_merge(content, merged)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not a valid mergekit config: {error}. {ADVICE}") from error


def _parse_merge(content: Any, merged: Path) -> Merge:
    """Return base and experts of a config. An adapter on the base is an expert's location."""
    method = str(content.get("merge_method"))
    modules = parts_of(content, "modules") or [content]
    if any(map(moves_layers, modules)):
        raise ValueError(
            f"slices that stack or move layers ({method}) give the model other blocks than its "
            "experts have, so it cannot be calibrated"
        )
    pieces, models = list[Mapping[str, Any]](), list[dict[str, None]]()
    entries, stated = list[Entry](), dict[str, list[Any]]()
    for module in modules:
        models.append({})
        for piece in parts_of(module, "slices") or [module]:
            pieces.append(piece)
            for source in parts_of(piece, "sources") or parts_of(piece, "models"):
                entries.append(entry := parse_entry(source, merged))
                models[-1][entry.location] = None
                stated.setdefault(entry.location, []).append(parameters_of(source).get("weight"))
    if other := next((names for names in models if names.keys() != models[0].keys()), None):
        raise ValueError(
            f"its modules are merged from different models ({', '.join(models[0])} and "
            f"{', '.join(other)}). {ADVICE}"
        )
    base_names = dict.fromkeys(p.get("base_model") or content.get("base_model") for p in pieces)
    bases = list(dict.fromkeys(parse_entry(name, merged) for name in base_names if name))
    common, inner = parameters_of(content), [p for p in (*pieces, *modules) if p is not content]
    weights = _find_weights(
        method, stated, common, any("weight" in parameters_of(p) for p in inner)
    )
    if method in _BASE_IS_MERGED and bases:
        t = _as_weight(common.get("t", 0.5), "t") if method == "slerp" else 0.5
        weights = dict.fromkeys(weights, t) | {bases[0].location: None if t is None else 1 - t}
        entries, bases = [*entries, bases[0]], []
    base = _find_base(method, bases, entries, weights)
    weights.pop(base or "", None)
    return Merge(method, base, weights, _has_negative_weight(content))


def _find_base(
    method: str, bases: Sequence[Entry], entries: Sequence[Entry], weights: Mapping[str, object]
) -> str | None:
    """Return the common origin of the merged models, or None if the config names none."""
    names = [entry.location for entry in bases]
    adapted = list(dict.fromkeys(entry.model for entry in entries if entry.adapter))
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
            "own (PEFT's merge_and_unload) and name it with --expert NAME=DIR"
        )
    return base


def _find_weights(
    method: str, stated: Mapping[str, Sequence[object]], common: Mapping[str, object], differ: bool
) -> dict[str, float | None]:
    """Return location -> weight, or None if it is not one number.

    Args:
        method: The merge method.
        stated: Location -> the `weight` of all its entries, None for an entry without one.
        common: Parameters of the whole config.
        differ: Whether a slice or module sets a weight.
    """
    if method in _UNWEIGHTED:
        return dict.fromkeys(stated, 1.0)
    weights = dict[str, float | None]()
    for location, entries in stated.items():
        values = (common.get("weight", 1) if value is None else value for value in entries)
        numbers = {_as_weight(value, "weight") for value in values}
        weights[location] = numbers.pop() if len(numbers) == 1 and not differ else None
    return weights


def _as_weight(value: Any, name: str) -> float | None:
    """Return a weight as a number, or None for a gradient or filter.

    A text such as `5e-1`, which YAML 1.1 does not read as a number, is converted.
    """
    if isinstance(value, list | Mapping):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} is {value!r:.60}, not a number")
    return number


def _has_negative_weight(value: object, is_weight: bool = False) -> bool:
    """Return whether a weight or lambda anywhere in a config is below 0."""
    if isinstance(value, Mapping):
        inner = ((v, is_weight or key in ("weight", "lambda")) for key, v in value.items())
        return any(_has_negative_weight(*pair) for pair in inner)
    if isinstance(value, list):
        return any(_has_negative_weight(entry, is_weight) for entry in value)
    return is_weight and str(value).strip().startswith("-")


def parameters_of(part: object) -> Mapping[str, Any]:
    """Return the parameters of a model, slice, module or config."""
    return (part.get("parameters") or {}) if isinstance(part, Mapping) else {}


def parts_of(part: Mapping[str, Any], key: str) -> list[Any]:
    """Return the entries of a list, or of a mapping by name."""
    entries = part.get(key) or []
    return list(entries.values() if isinstance(entries, Mapping) else entries)


def moves_layers(part: Mapping[str, object]) -> bool:
    """Return whether the layers of a slice move, as in a stack of layers."""
    end: Any = 0
    for piece in parts_of(part, "slices"):
        ranges = [source.get("layer_range") or [end, end] for source in parts_of(piece, "sources")]
        if any(r[0] != end or r != ranges[0] for r in ranges):
            return True
        end = ranges[0][-1] if ranges else end
    return False


def parse_entry(value: object, merged: Path) -> Entry:
    """Read `MODEL`, `MODEL+LORA`, one of mergekit's mappings, or a mapping with parameters."""
    adapter = None
    while isinstance(value, Mapping) and "model" in value:
        value, adapter = value["model"], value.get("lora")
    if adapter is None and isinstance(value, str):
        value, _, adapter = value.partition("+")
    location = _find_location(value, merged)
    return Entry(location, _find_location(adapter, merged) if adapter else None)


def _find_location(value: Any, merged: Path) -> str:
    """Return a folder or hub id. Relative folders start here or above the merged model."""
    suffix = ""
    if isinstance(value, Mapping):
        suffix = f"@{value['revision']}" if value.get("revision") else ""
        value = value.get("path")
    for folder in (Path(value), *(above / value for above in [*merged.parents][:_LEVELS])):
        if folder.exists():
            return os.path.normpath(folder)
    return value + suffix
