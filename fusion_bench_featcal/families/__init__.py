"""Model families: how a model is cut into blocks, and how one block is run."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from fusion_bench_featcal.families import llama, t5
from fusion_bench_featcal.families.base import BlockCall, ChainFamily, Family
from fusion_bench_featcal.families.clip import CLIP
from fusion_bench_featcal.families.llama import LLAMA
from fusion_bench_featcal.families.open_clip import OPEN_CLIP, find_open_clip_blocks
from fusion_bench_featcal.families.replay import ReplayFamily
from fusion_bench_featcal.families.suggest import suggested_families
from fusion_bench_featcal.families.t5 import T5

__all__ = [
    "CLIP",
    "LLAMA",
    "OPEN_CLIP",
    "T5",
    "BlockCall",
    "ChainFamily",
    "Family",
    "ReplayFamily",
    "check_family",
    "resolve_family",
]

# Every family with the model types that `auto` finds it by: a new one is one line here.
_MODEL_TYPES: Mapping[Family, tuple[str, ...]] = {
    CLIP: ("clip_vision_model",),
    LLAMA: llama.MODEL_TYPES,
    OPEN_CLIP: (),
    T5: t5.MODEL_TYPES,
}
_BY_MODEL_TYPE = {kind: family for family, kinds in _MODEL_TYPES.items() for kind in kinds}
_BY_NAME = {family.name: family for family in _MODEL_TYPES}


_MEMBERS = ["name", *(name for name in vars(Family) if not name.startswith("_"))]
_KNOWN = f"auto, {', '.join(_BY_NAME)}, or {{name: replay, blocks: [pattern, ...]}}"


def check_family(family: Any) -> None:
    """Check a family setting before there is a model.

    Args:
        family: As for `resolve_family`.

    Raises:
        ValueError: If it is unknown or lacks an option.
    """
    if family != "auto":
        _family(family)


def resolve_family(family: Any, model: nn.Module) -> Family:
    """The family that settings ask for.

    Args:
        family: `auto`, a name, a mapping with `name` and options, or a Family itself.
        model: The model; `auto` goes by its `config.model_type`, or by its blocks where open_clip's
            models have none.

    Returns:
        The family.

    Raises:
        ValueError: If the family is unknown, lacks an option, or `auto` does not know the model,
            with what to try instead.
    """
    if family != "auto":
        return _family(family)
    model_type = str(getattr(getattr(model, "config", None), "model_type", None))
    if model_type == "None" and find_open_clip_blocks(model):
        return OPEN_CLIP
    if model_type not in _BY_MODEL_TYPE:
        tries = [f"method.family={family}" for family in suggested_families(model)]
        raise ValueError(
            f"method.family=auto does not know {type(model).__name__} (model type {model_type!r}). "
            + (f"Try {' or '.join(tries)}" if tries else f"Set method.family to {_KNOWN}")
        )
    return _BY_MODEL_TYPE[model_type]


def _family(family: Any) -> Family:
    """The family of a name, of a mapping, or the object itself."""
    if isinstance(family, str):
        if family not in _BY_NAME:
            raise ValueError(f"method.family must be {_KNOWN}, got {family!r}")
        return _BY_NAME[family]
    if isinstance(family, Mapping):
        options = dict(family)
        if list(options) == ["name"] and options["name"] in _BY_NAME:
            return _BY_NAME[options["name"]]
        if options.pop("name", None) != "replay":
            raise ValueError(f"method.family: only replay takes options, got {dict(family)}")
        try:
            return ReplayFamily(**options)
        except TypeError as error:
            raise ValueError(
                f"method.family: {error}; replay takes blocks, mask and other_masks"
            ) from None
    missing = [name for name in _MEMBERS if not hasattr(family, name)]
    if not missing:
        return family
    lacks = f" (it lacks {', '.join(missing)})" if hasattr(family, "step") else ""
    raise ValueError(f"method.family must be {_KNOWN}, or a Family object, got {family!r}{lacks}")
