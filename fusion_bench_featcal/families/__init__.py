"""Model families: how a model is cut into blocks, and how one block is run."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from torch import nn

from fusion_bench_featcal.families import llama, stages, t5, whisper
from fusion_bench_featcal.families.base import BlockCall, ChainFamily, Family, stages_of
from fusion_bench_featcal.families.clip import CLIP
from fusion_bench_featcal.families.llama import LLAMA
from fusion_bench_featcal.families.open_clip import OPEN_CLIP, find_open_clip_blocks
from fusion_bench_featcal.families.stack import STACK, StackFamily
from fusion_bench_featcal.families.stages import STAGES, find_torchvision_blocks
from fusion_bench_featcal.families.structure import find_stack
from fusion_bench_featcal.families.t5 import T5
from fusion_bench_featcal.families.whisper import WHISPER

__all__ = [
    "CLIP",
    "LLAMA",
    "OPEN_CLIP",
    "STACK",
    "STAGES",
    "T5",
    "WHISPER",
    "BlockCall",
    "ChainFamily",
    "Family",
    "StackFamily",
    "check_family",
    "resolve_family",
    "stages_of",
]

# All families with the model types for which `auto` chooses them before looking at the structure.
# A new family is one more line.
_MODEL_TYPES: Mapping[Family, tuple[str, ...]] = {
    CLIP: ("clip_vision_model",),
    LLAMA: llama.MODEL_TYPES,
    OPEN_CLIP: (),
    STACK: (),
    STAGES: stages.MODEL_TYPES,
    T5: t5.MODEL_TYPES,
    WHISPER: whisper.MODEL_TYPES,
}
_BY_MODEL_TYPE = {kind: family for family, kinds in _MODEL_TYPES.items() for kind in kinds}
_BY_NAME = {family.name: family for family in _MODEL_TYPES}


_MEMBERS = ["name", *(name for name in vars(Family) if not name.startswith("_"))]
_KNOWN = f"auto, {', '.join(_BY_NAME)}, or {{_target_: my_module.MyFamily}}"


def check_family(family: Any) -> None:
    """Check a family setting before a model is loaded.

    Args:
        family: As for `resolve_family`.

    Raises:
        ValueError: If it is unknown or lacks an option.
    """
    if family != "auto":
        _family(family)


def resolve_family(family: Any, model: nn.Module) -> Family:
    """Return the family for a setting.

    `auto` uses the model's `config.model_type`, or else its structure: open_clip's blocks, or one
    list of blocks of one class. It does not run the model. Calibration then compares the family's
    steps with the model's forward pass on its first samples (`streams/family_check.py`).

    Args:
        family: `auto`, a name, a mapping with `name` and options or with `_target_` and arguments,
            or a Family.
        model: The model. It may be on the meta device.

    Returns:
        The family.

    Raises:
        CalibrationError: If the family is `stack` and the model has no single list of blocks.
        ValueError: If the family is unknown, lacks an option, or `auto` finds none, with advice.
    """
    if family != "auto":
        return STACK.fitted(model) if family in ("stack", {"name": "stack"}) else _family(family)
    model_type = str(getattr(getattr(model, "config", None), "model_type", None))
    if model_type == "None" and find_open_clip_blocks(model):
        return OPEN_CLIP
    if model_type == "None" and find_torchvision_blocks(model):
        return STAGES
    if model_type in _BY_MODEL_TYPE:
        return _BY_MODEL_TYPE[model_type]
    if find_stack(model) is not None:
        return STACK.fitted(model)
    raise ValueError(
        f"method.family=auto does not know {type(model).__name__} (model type {model_type!r}), "
        "and no list of modules of one class clearly holds its blocks. Set method.family to a "
        "family of your own, {_target_: my_module.MyFamily} (docs/tutorials/family.md)"
    )


def _family(family: Any) -> Family:
    """Return the family for a name or a mapping. A family object is returned unchanged."""
    if isinstance(family, str):
        if family not in _BY_NAME:
            raise ValueError(f"method.family must be {_KNOWN}, got {family!r}")
        return _BY_NAME[family]
    if isinstance(family, Mapping):
        return _family_of_options(dict(family))
    if isinstance(family, type):
        raise ValueError(f"method.family is the class {family.__name__}: give an object of it")
    missing = [name for name in _MEMBERS if not hasattr(family, name)]
    if not missing:
        return family
    lacks = f" (it lacks {', '.join(missing)})" if hasattr(family, "step") else ""
    raise ValueError(f"method.family must be {_KNOWN}, or a Family object, got {family!r}{lacks}")


def _family_of_options(options: dict[str, Any]) -> Family:
    """Return the family for a mapping."""
    if "_target_" in options:
        return _family_of_target(options)
    if list(options) == ["name"] and options["name"] in _BY_NAME:
        return _BY_NAME[options["name"]]
    raise ValueError(f"method.family must be {_KNOWN}, got {options}")


def _family_of_target(options: dict[str, Any]) -> Family:
    """Return a family of the class in `_target_`, built with the other options."""
    target = options.pop("_target_")
    module, _, name = str(target).rpartition(".")
    try:
        kind = getattr(import_module(module), name)
    except (AttributeError, ImportError, ValueError) as error:
        raise ValueError(
            f"method.family: _target_ {target!r} cannot be imported ({error}); give "
            "my_module.MyFamily, with my_module.py in the folder of the run or installed"
        ) from error
    try:
        family = kind(**options)
    except TypeError as error:
        raise ValueError(f"method.family: {target}: {error}") from error
    if isinstance(family, str | Mapping):
        raise ValueError(f"method.family: {target} made {family!r}, which is no Family")
    return _family(family)
