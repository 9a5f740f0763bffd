"""Replay of merges that are weighted sums of their models, one tensor at a time.

These are mergekit's `linear`, `task_arithmetic` and `slerp` (as in release 0.1.5, whose gradients
and filters give each tensor its own weights), and one adapter that was merged into its base.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusion_bench_featcal.files.untrusted import read_yaml
from fusion_bench_featcal.folders.merge_config import (
    ADVICE,
    FILE,
    MOE_FILE,
    parameters_of,
    parse_entry,
    parts_of,
)

ADAPTER, UNKNOWN = "base + adapter", "unknown"
_PARAMETERS = {
    "linear": {"weight", "normalize"},
    # The last three have no effect without sparsification.
    "task_arithmetic": {"weight", "normalize", "lambda", "density", "int8_mask", "rescale"},
    "slerp": {"t"},
}
_TOKEN_KEYS = {
    "vocabulary": ("tokenizer_source", "tokenizer"), "chat template": ("chat_template",)
}  # fmt: skip
_DTYPE_KEYS, _DTYPES = ("dtype", "out_dtype"), (None, "bfloat16", "float16", "float32", "float64")
_LAYER = re.compile(r"\.(\d+)\.")
_COLLINEAR = 0.9995  # the cosine above which mergekit's slerp interpolates linearly
_SMALLEST = 1e-8  # norm of a tensor, or sum of weights, that mergekit divides by
_ENTRIES = 2**22  # of a tensor that are compared at once, in float64
_FLOAT32_NOISE = 64 * torch.finfo(torch.float32).eps


class Recipe(NamedTuple):
    """Method, models and parameters of a merge.

    Attributes:
        method: mergekit's name of the method, `ADAPTER` or `UNKNOWN`.
        base: Folder or hub id of the base, or None.
        models: Folder or hub id of a model or adapter -> its parameters.
        shared: Parameters of all models, those with priority first.
        content: The config.
        obstacle: Why the merge cannot be replayed, or None.
    """

    method: str
    base: str | None
    models: Mapping[str, Mapping[str, Any]]
    shared: Sequence[Mapping[str, Any]]
    content: Mapping[str, Any]
    obstacle: str | None

    def allows_change(self, part: str) -> bool:
        """Return whether a part of tokenizer or configs may differ from those of all models.

        The config may change it. For a changed vocabulary mergekit moves rows of embeddings.
        transformers leaves defaults out of the generation config of a model with an adapter.
        """
        is_rewritten = self.method == ADAPTER and part == "generation config"
        return is_rewritten or any(self.content.get(key) for key in _TOKEN_KEYS.get(part, ()))

    def dtypes(self, inputs: Sequence[torch.dtype]) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtypes that a tensor is merged and stored in."""
        names = (self.content.get(key) for key in _DTYPE_KEYS)
        dtype, stored = (name and getattr(torch, name) for name in names)
        dtype = dtype or reduce(torch.promote_types, inputs)
        return dtype, stored or dtype

    def coefficients(
        self, name: str, names: Collection[str], tensors: Mapping[str, Tensor]
    ) -> tuple[str | None, dict[str, float]]:
        """Return the model that changes are added to, or None, and the coefficient of each model.

        Args:
            name: The tensor.
            names: All tensors, which show how many layers there are.
            tensors: Model -> its tensor.
        """
        is_linear, t = self.method == "linear", 0.0
        if match := _LAYER.search(name):
            start = name[: match.start(1)]
            found = (_LAYER.search(other) for other in names if other.startswith(start))
            last = max(int(layer[1]) for layer in found if layer)
            t = int(match[1]) / last if last else 1.0

        def value(key: str, default: float, *own: Mapping[str, Any]) -> float:
            values = (_evaluate(part.get(key), name, t) for part in (*own, *self.shared))
            return next((number for number in values if number is not None), default)

        if self.method == "slerp":
            pair = sorted(self.models, key=lambda model: model != self.base)
            parts = _slerp(value("t", math.nan), *(tensors[model] for model in pair))
            return None, dict(zip(pair, parts, strict=True))
        added = {m: own for m, own in self.models.items() if is_linear or m != self.base}
        weights = {model: value("weight", math.nan, own) for model, own in added.items()}
        scale, total = value("lambda", 1.0), sum(weights.values())
        scale /= total if value("normalize", is_linear) and abs(total) > _SMALLEST else 1.0
        return None if is_linear else self.base, {m: w * scale for m, w in weights.items()}


def read_recipe(merged: Path) -> Recipe | None:
    """Return how a folder's model was merged, or None without the config of a mergekit merge.

    Raises:
        ValueError: If the config cannot be read.
    """
    if (merged / MOE_FILE).exists() or not (merged / FILE).exists():
        return None
    content: Any = read_yaml(merged / FILE)
    try:
        method, modules = content["merge_method"], parts_of(content, "modules") or [content]
        pieces = [piece for module in modules for piece in parts_of(module, "slices") or [module]]
        sources = [s for p in pieces for s in parts_of(p, "sources") or parts_of(p, "models")]
        models = {parse_entry(source, merged): parameters_of(source) for source in sources}
        named = pieces[0].get("base_model") or content.get("base_model")
        base = parse_entry(named, merged).location if named else None
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        problem = f"is not a valid mergekit config: {error}. {ADVICE}"
        raise ValueError(f"{merged / FILE} {problem}") from error
    own = ({base: {}} if base else {}) | {m.location: values for m, values in models.items()}
    shared = [*map(parameters_of, (pieces[0], modules[0], content))]
    used = {key for part in (*own.values(), *shared) for key in part}
    odd = [*sorted(used - _PARAMETERS.get(method, used)), *["several slices"] * (len(pieces) > 1)]
    odd += [f"{len(own)} models"] * (method == "slerp" and (base is None or len(own) != 2))
    odd += [f"{key} {content[key]}" for key in _DTYPE_KEYS if content.get(key) not in _DTYPES]
    is_known = method in _PARAMETERS
    obstacle = f"{method} with {', '.join(odd)}" if is_known and odd else method
    base = base or next((model.model for model in models if model.adapter), None)
    return Recipe(method, base, own, shared, content, None if is_known and not odd else obstacle)


def _evaluate(setting: Any, name: str, t: float) -> float | None:
    """Return a number, a gradient's value at t in [0, 1], or the first fitting filter's value."""
    if setting in (None, []):
        return None
    entries = setting if isinstance(setting, list) else [setting]
    if isinstance(entries[0], Mapping):
        filters = ((str(entry.get("filter") or "*"), entry.get("value")) for entry in entries)
        return _evaluate(next((v for f, v in filters if f == "*" or f in name), None), name, t)
    low, part = divmod(t * (len(entries) - 1), 1)
    first, second = (float(entry) for entry in (entries[int(low) :] * 2)[:2])
    return (1 - part) * first + part * second


def _slerp(t: float, start: Tensor, end: Tensor) -> tuple[float, float]:
    """Return the coefficients of a spherical interpolation of whole tensors."""
    a, b = start.float(), end.float()
    norms = (torch.linalg.vector_norm(x, dtype=torch.float64) for x in (a, b, a - b))
    first, second, distance = map(float, norms)
    lengths = (length if length > _SMALLEST else 1.0 for length in (first, second))
    cosine = (first**2 + second**2 - distance**2) / 2 / math.prod(lengths)
    if abs(cosine) > _COLLINEAR:
        return 1 - t, t
    angle = math.acos(cosine)
    return math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)


class Replay(NamedTuple):
    """A merged tensor, and what it should be: start + the sum of c (tensor - start).

    Attributes:
        merged: The tensor as it is stored.
        start: The base's tensor, or zeros.
        terms: Coefficients and tensors of the models.
        dtype: The dtype that the merge computed in.
        noise: Relative error of the models, from adapters that were merged before and rounded.
    """

    merged: Tensor
    start: Tensor
    terms: Sequence[tuple[float, Tensor]]
    dtype: torch.dtype
    noise: float

    def _changes(self) -> Iterator[tuple[Tensor, Tensor, list[Tensor]]]:
        """Yield parts, in float64, of the merged tensor, of the start, and of each term."""
        tensors = (self.merged, self.start, *(tensor for _, tensor in self.terms))
        for parts in zip(*(tensor.reshape(-1).split(_ENTRIES) for tensor in tensors), strict=True):
            merged, start, *models = (part.double() for part in parts)
            pairs = zip(self.terms, models, strict=True)
            yield merged, start, [c * (model - start) for (c, _), model in pairs]

    def fits(self, scale: float = 1.0) -> bool:
        """Return whether each entry is that of the sum, with scaled terms, within rounding.

        With u, half the distance of 1 to the next number of a dtype, the allowed error is the sum
        of:

        - 4 u |term|, in the dtype of the merge, for the rounding of a difference to the base, of
          its weight, of their product, and of the sum over models. mergekit 0.1.5 computes `linear`
          and `slerp` in float32, earlier releases `linear` in the dtype of the merge.
        - u |result|, in the coarser of the dtypes of merge and file, for the last sum and storage.
        - 64 times the distance of float32's numbers, relative to the entry and the largest term,
          for norms and products of LoRA matrices, which are sums in float32.
        - Four of the smallest numbers of both dtypes, for entries that are subnormal in float16.
        """
        types = [torch.finfo(dtype) for dtype in (self.dtype, self.merged.dtype)]
        unit, coarser = types[0].eps / 2, max(dtype.eps for dtype in types) / 2
        smallest = sum(4 * dtype.tiny * dtype.eps for dtype in types)
        for merged, start, changes in self._changes():
            size = abs(scale) * sum(map(torch.abs, changes), torch.zeros_like(start))
            result, noise = start + scale * sum(changes), _FLOAT32_NOISE + self.noise
            tolerance = 4 * unit * size + coarser * result.abs() + noise * (start.abs() + size)
            tolerance += _FLOAT32_NOISE * size.max() + smallest
            if not bool(((merged - result).abs() <= tolerance).all()):
                return False
        return True

    def fitted_scale(self) -> float:
        """Return the scale of all terms that fits best, by least squares. NaN if all are zero."""
        above = below = 0.0
        for merged, start, changes in self._changes():
            change = sum(changes, torch.zeros_like(start))
            above += float((merged - start) @ change)
            below += float(change @ change)
        return above / below if below else math.nan
