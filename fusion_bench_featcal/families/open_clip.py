"""open_clip's vision transformer, alone or inside a CLIP model or FusionBench's wrappers."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.families.base import BlockCall, ChainFamily
from fusion_bench_featcal.families.unfused import UnfusedView

_IN_CLIP = re.compile(r"(.+\.)?visual\.transformer\.resblocks\.\d+")
_IN_TOWER = re.compile(r"transformer\.resblocks\.\d+")  # in a CLIP model this is the text tower


def find_open_clip_blocks(model: nn.Module) -> list[str]:
    """Return the vision transformer's blocks in forward order, none for other models."""
    names = [name for name, _ in model.named_modules()]
    blocks = [name for name in names if _IN_CLIP.fullmatch(name)]
    if not blocks and isinstance(getattr(model, "conv1", None), nn.Conv2d):
        blocks = [name for name in names if _IN_TOWER.fullmatch(name)]
    return blocks


def open_clip_stages(model: nn.Module) -> list[list[str]]:
    """Return the vision transformer's blocks as one stage.

    Raises:
        CalibrationError: If there are none.
    """
    blocks = find_open_clip_blocks(model)
    if not blocks:
        raise CalibrationError(
            f"{type(model).__name__} has no open_clip vision transformer "
            "(visual.transformer.resblocks.*); choose another method.family than open_clip"
        )
    return [blocks]


@dataclass(frozen=True)
class OpenClipFamily(ChainFamily):
    """A chain of blocks whose attention is calibrated as q, k, v and output projections."""

    def begin(self, model: nn.Module, inputs: Any, first_block: str, *ending: Any) -> BlockCall:
        """Return the input of the first block.

        The images may be named `pixel_values`, as in transformers. They are passed by position,
        since open_clip's models and their wrappers have other argument names.
        """
        if isinstance(inputs, Mapping) and "pixel_values" in inputs:
            inputs = inputs["pixel_values"]
        return super().begin(model, inputs, first_block)

    def closing_rows(self, model: nn.Module, hidden: Tensor) -> Tensor | None:
        """Return a mask of the class token, if the tower's output depends on nothing else."""
        root = find_open_clip_blocks(model)[0].partition("transformer.resblocks")[0].rstrip(".")
        tower: Any = model.get_submodule(root)
        pools = getattr(tower, "pool_type", "tok") != "tok" or getattr(tower, "attn_pool", None)
        if pools or not hasattr(tower, "class_embedding"):
            return None
        mask = hidden.new_zeros(hidden.shape[:-1])
        is_batch_first = getattr(tower.transformer, "batch_first", True)
        mask.select(1 if is_batch_first else 0, 0).fill_(1)
        return mask


OPEN_CLIP = OpenClipFamily(
    name="open_clip",
    find_stages=open_clip_stages,
    view=UnfusedView(find_open_clip_blocks, attention="attn"),  # text towers stay fused
)
"""Every position of every image counts: there is no padding."""
