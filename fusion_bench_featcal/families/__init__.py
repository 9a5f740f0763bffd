"""Model families: how a model is cut into blocks, and how one block is run."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from fusion_bench_featcal.families.base import BlockCall, ChainFamily, Family
from fusion_bench_featcal.families.clip import CLIP
from fusion_bench_featcal.families.replay import ReplayFamily

__all__ = ["CLIP", "BlockCall", "ChainFamily", "Family", "ReplayFamily", "resolve_family"]

_BY_MODEL_TYPE: Mapping[str, Family] = {"clip_vision_model": CLIP}
_BY_NAME: Mapping[str, Family] = {"clip": CLIP}


def resolve_family(family: Any, model: nn.Module) -> Family:
    """The family that settings ask for.

    Args:
        family: `auto`, a name, a mapping with `name` and options, or a Family itself.
        model: The model; `auto` goes by its `config.model_type`.

    Returns:
        The family.

    Raises:
        ValueError: If the family is unknown, lacks an option, or `auto` does not know the model.
    """
    if isinstance(family, str):
        return _named_family(family, model)
    if isinstance(family, Mapping):
        options = dict(family)
        if options.pop("name", None) != "replay":
            raise ValueError(f"method.family: only replay takes options, got {dict(family)}")
        try:
            return ReplayFamily(**options)
        except TypeError as error:
            raise ValueError(f"method.family: {error}; replay takes blocks and mask") from None
    if all(hasattr(family, part) for part in ("stages", "begin", "step", "row_weights")):
        return family
    raise ValueError(f"method.family must be a name, a mapping or a Family, got {family!r}")


def _named_family(name: str, model: nn.Module) -> Family:
    if name in _BY_NAME:
        return _BY_NAME[name]
    known = f"auto, {', '.join(_BY_NAME)}, or {{name: replay, blocks: [pattern, ...]}}"
    if name != "auto":
        raise ValueError(f"method.family must be {known}, got {name!r}")
    model_type = str(getattr(getattr(model, "config", None), "model_type", None))
    if model_type not in _BY_MODEL_TYPE:
        raise ValueError(
            f"method.family=auto does not know {type(model).__name__} (model type {model_type!r}); "
            f"set method.family to {known}"
        )
    return _BY_MODEL_TYPE[model_type]
