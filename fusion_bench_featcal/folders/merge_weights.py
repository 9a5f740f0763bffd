"""Weights of models in a mergekit config: numbers at four levels, with filters and gradients."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

_UNWEIGHTED = (
    "arcee_fusion", "karcher", "model_stock", "nearswap", "passthrough", "ram", "ramplus_tl", "sce",
)  # fmt: skip
_UNSCALED = ("linear", "multislerp", "nuslerp")
"""Methods that read `weight`, but no `lambda`."""
_POSITIONS = 33  # places at which the gradient of unknown or very many layers is evaluated
_MOST_FILTERS = 64

Parameters = Mapping[str, Any]


class MergedTogether(NamedTuple):
    """Models that are merged with each other, in all layers or in those of a slice.

    Attributes:
        models: Location -> parameters of its entries. The first with a value counts.
        base: Location of the base, or None.
        levels: Parameters of the slice, its module and the config, the nearest first.
        layers: Number of layers, or None if it is unknown.
    """

    models: Mapping[str, Sequence[Parameters]]
    base: str | None
    levels: Sequence[Parameters]
    layers: int | None


class Weight(NamedTuple):
    """Weight of a model in a merge.

    Attributes:
        total: Sum over layers. Values of several filters count alike.
        values: The distinct values, without `lambda`. One, unless tensors differ.
    """

    total: float
    values: frozenset[float]


def weights_of(method: str, groups: Sequence[MergedTogether]) -> dict[str, Weight]:
    """Return location -> weight of every model, resolved as mergekit resolves its parameters.

    `weight` is times `lambda`. Of `slerp` the base has the weight 1 - t, and the other model t.

    Raises:
        ValueError: If a number cannot be read.
    """
    totals, values = dict[str, float](), dict[str, set[float]]()
    for group in groups:
        for model in group.models:
            pairs = _pairs(method, group, model)
            mean = sum(weight * scale for weight, scale in pairs) / len(pairs)
            totals[model] = totals.get(model, 0.0) + (group.layers or 1) * mean
            values.setdefault(model, set()).update(round(weight, 9) for weight, _ in pairs)
    absent = {model for group in groups for model in totals if model not in group.models}
    return {
        model: Weight(total, frozenset(values[model] | ({0.0} if model in absent else set())))
        for model, total in totals.items()
    }


def has_weights(method: str) -> bool:
    """Return whether a method reads weights."""
    return method not in _UNWEIGHTED


def _pairs(method: str, group: MergedTogether, model: str) -> list[tuple[float, float]]:
    """Return `weight` and `lambda` of a model at every position and for every filter.

    Both are 1 if there is none. Tensors that only lack a weight, which mergekit refuses, are left
    out.
    """
    if not has_weights(method):
        return [(1.0, 1.0)]
    levels, is_slerp = [*group.models[model], *group.levels], method == "slerp"
    scaled = () if method in (*_UNSCALED, "slerp") else group.levels
    pairs = list[tuple[float | None, float]]()
    for tensor in _filters(levels):
        for t in _positions(group.layers):
            weight = resolved("t" if is_slerp else "weight", levels, tensor, t)
            if weight is not None and is_slerp and model == group.base:
                weight = 1 - weight
            scale = resolved("lambda", scaled, tensor, t)
            pairs.append((weight, 1.0 if scale is None else scale))
    complete = [(weight, scale) for weight, scale in pairs if weight is not None]
    return complete or [(1.0, scale) for _, scale in pairs]


def resolved(name: str, levels: Sequence[Parameters], tensor: str, t: float) -> float | None:
    """Return a parameter's value for a tensor: that of the nearest level that has one, or None.

    Args:
        name: The parameter.
        levels: Parameters of source, slice, module and config, the nearest first.
        tensor: Name of the tensor, or a part of it, which filters are searched in.
        t: Position of its layer, 0 to 1.
    """
    values = (_evaluated(level[name], tensor, t, name) for level in levels if name in level)
    return next((value for value in values if value is not None), None)


def _evaluated(setting: Any, tensor: str, t: float, name: str) -> float | None:
    """Return the value of a number, a gradient of numbers, or the first condition that applies."""
    entries = setting if isinstance(setting, list) else [setting]
    if any(isinstance(entry, Mapping) for entry in entries):
        for entry in entries:
            condition = entry if isinstance(entry, Mapping) else {"value": entry}
            if condition.get("filter") in (None, "*") or str(condition["filter"]) in tensor:
                return _evaluated(condition.get("value"), tensor, t, name)
        return None
    numbers = [_number(entry, name) for entry in entries]
    if not numbers:
        return None
    place = t * (len(numbers) - 1)
    start = int(place)
    share = place - start
    return (1 - share) * numbers[start] + share * numbers[min(start + 1, len(numbers) - 1)]


def _number(value: Any, name: str) -> float:
    """Return a number, which may be a text: YAML 1.1 has no `-5e-1`."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} is {value!r:.60}, not a number")
    return number


def _filters(parameters: Iterable[Parameters]) -> list[str]:
    """Return the filters of all values, and the empty text if a tensor may match none."""
    settings = (p[name] for p in parameters for name in ("weight", "lambda", "t") if name in p)
    conditions = (entry for s in settings for entry in (s if isinstance(s, list) else [s]))
    filters = [entry.get("filter") for entry in conditions if isinstance(entry, Mapping)]
    names = dict.fromkeys(str(name) for name in filters if name not in (None, "*"))
    if len(names) > _MOST_FILTERS:
        raise ValueError(f"it has more than {_MOST_FILTERS} filters")
    return ["", *names]


def _positions(layers: int | None) -> list[float]:
    """Return positions of layers, from 0 to 1. That of a single layer is 1."""
    count = min(layers or _POSITIONS, _POSITIONS)
    return [1.0] if count == 1 else [n / (count - 1) for n in range(count)]
