"""Model families: how a model is cut into blocks, and how one block is run."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from fusion_bench_featcal.errors.words import option
from fusion_bench_featcal.families.base import Call as Call
from fusion_bench_featcal.families.base import Family as Family
from fusion_bench_featcal.families.base import stages_of as stages_of
from fusion_bench_featcal.families.encoder_decoder import ENCODER_DECODER, WHISPER
from fusion_bench_featcal.families.lists import find_stack as find_stack
from fusion_bench_featcal.families.lists import find_stages, is_encoder_decoder
from fusion_bench_featcal.families.lists import head_of as head_of
from fusion_bench_featcal.families.lists import text_tower as text_tower
from fusion_bench_featcal.families.open_clip import OPEN_CLIP, find_open_clip_blocks
from fusion_bench_featcal.families.stack import CLIP, LLAMA, STACK
from fusion_bench_featcal.families.stack import EveryPosition as EveryPosition
from fusion_bench_featcal.families.stack import Stack as Stack
from fusion_bench_featcal.families.stages import STAGES, find_torchvision_blocks
from fusion_bench_featcal.families.t5 import T5
from fusion_bench_featcal.files.classes import FAMILIES, installed_classes, named_class

_FAMILIES = (CLIP, ENCODER_DECODER, LLAMA, OPEN_CLIP, STACK, STAGES, T5, WHISPER)
FAMILIES_BY_NAME: Mapping[str, Family] = {family.name: family for family in _FAMILIES}

# Model types for which `auto` chooses a family before looking at the structure. Tests run each.
MODEL_TYPES = {
    CLIP: ("clip_vision_model",),
    LLAMA: (
        "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "granite", "olmo2", "phi3",
        "smollm3", "starcoder2",
    ),
    STAGES: ("resnet", "convnext", "convnextv2", "segformer"),
    T5: ("t5", "mt5", "umt5"),
    WHISPER: ("whisper",),
}  # fmt: skip
_BY_MODEL_TYPE = {kind: family for family, kinds in MODEL_TYPES.items() for kind in kinds}


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

    `auto` uses the model's `config.model_type`, which may also be the name of a family of another
    installed package, or else the structure: open_clip's blocks, or lists of blocks. It does not
    run the model. Calibration then compares the family's steps with the model's forward pass on two
    samples (`check.py`).

    Args:
        family: `auto`, a name, a list of the blocks' names, a mapping with `_target_` and
            arguments, or a Family.
        model: The model. It may be on the meta device.

    Raises:
        ValueError: If the family is unknown, lacks an option, or `auto` finds none, with advice.
    """
    if family != "auto":
        return _family(family)
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type is None and find_open_clip_blocks(model):
        return OPEN_CLIP
    if model_type is None and find_torchvision_blocks(model):
        return STAGES
    if model_type in _BY_MODEL_TYPE:
        return _BY_MODEL_TYPE[model_type]
    if (target := installed_classes(FAMILIES).get(str(model_type))) is not None:
        return _family_of_target(target)
    if find_stages(model):
        return ENCODER_DECODER if is_encoder_decoder(model) else STACK
    raise ValueError(
        f"{option('family', 'auto')} does not support {type(model).__name__} (model type "
        f"{model_type!r}), because no list of modules clearly holds its blocks. Give the names "
        "of the blocks, or a family of your own (docs/howto/own-family.md)"
    )


def _family(family: Any) -> Family:
    """Return the family for a name or a mapping. A family object is returned unchanged."""
    if isinstance(family, Family):
        return family
    if isinstance(family, Mapping) and "_target_" in family:
        return _family_of_target(**family)
    if isinstance(family, str) and family in FAMILIES_BY_NAME:
        return FAMILIES_BY_NAME[family]
    if isinstance(family, list | tuple) and family and all(isinstance(n, str) for n in family):
        return Stack(tuple(family))
    installed = installed_classes(FAMILIES)
    if isinstance(family, str) and family in installed:
        return _family_of_target(installed[family])
    names = ", ".join(["auto", *FAMILIES_BY_NAME, *installed])
    raise ValueError(
        f"{option('family')} must be {names}, a list of the blocks' names, "
        f"{{_target_: my_module.MyFamily}}, or an object of a Family, got {family!r}"
    )


def _family_of_target(_target_: Any, **options: Any) -> Family:
    """Return a family of the class with a dotted name, built with the other options."""
    kind = named_class(_target_, "family", "MyFamily")
    try:
        family = kind(**options)
    except Exception as error:  # a user's class may raise anything
        raise ValueError(f"{option('family')}: {_target_}: {error}") from error
    if not isinstance(family, Family):
        raise ValueError(f"{option('family')}: {_target_} made {family!r}, which is not a Family")
    return family
