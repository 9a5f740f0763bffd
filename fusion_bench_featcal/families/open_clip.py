"""open_clip's vision transformer: its blocks, and its attention split into q, k and v.

open_clip applies one fused matrix per attention as a function, so that hooks cannot record its
inputs. Models are split where a calibration begins and fused where it ends.
"""

import copy
import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.families.stack import ImageTower

_IN_CLIP = re.compile(r"(.+\.)?visual\.transformer\.resblocks\.\d+")
_IN_TOWER = re.compile(r"transformer\.resblocks\.\d+")  # in a CLIP model this is the text tower
PROJECTIONS = ("q_proj", "k_proj", "v_proj")  # in the order of the fused rows


def find_open_clip_blocks(model: nn.Module) -> list[str]:
    """Return the vision transformer's blocks in forward order, none for other models."""
    names = [name for name, _ in model.named_modules()]
    blocks = [name for name in names if _IN_CLIP.fullmatch(name)]
    if not blocks and isinstance(getattr(model, "conv1", None), nn.Conv2d):
        blocks = [name for name in names if _IN_TOWER.fullmatch(name)]
    return blocks


class OpenClip(ImageTower):
    """The blocks of a vision transformer, alone, in a CLIP model or in FusionBench's classes."""

    def stages(self, model: nn.Module) -> list[list[str]]:
        """Return the vision transformer's blocks as one stage.

        Raises:
            CalibrationError: If there are none.
        """
        blocks = find_open_clip_blocks(model)
        if not blocks:
            raise CalibrationError(
                f"{type(model).__name__} has no open_clip vision transformer "
                "(visual.transformer.resblocks.*); choose another family than open_clip"
            )
        return [blocks]

    def reads_first(self, model: nn.Module, inputs: Any) -> bool:
        """Return whether the tower's output depends on the class token alone."""
        root = find_open_clip_blocks(model)[0].partition("transformer.resblocks")[0].rstrip(".")
        tower: Any = model.get_submodule(root)
        pools = getattr(tower, "pool_type", "tok") != "tok" or getattr(tower, "attn_pool", None)
        return not pools and hasattr(tower, "class_embedding")


OPEN_CLIP = OpenClip(name="open_clip", compared=False)


class SplitAttention(nn.Module):
    """An `nn.MultiheadAttention` split into four linear modules, batch first.

    Weights are slices of the fused ones and share their memory.
    """

    def __init__(self, whole: nn.MultiheadAttention) -> None:
        """Split an attention module. It is emptied, and stored for `fused`."""
        super().__init__()
        self.heads, width = whole.num_heads, whole.embed_dim
        for index, name in enumerate(PROJECTIONS):
            linear = nn.Linear(width, width, whole.in_proj_bias is not None, device="meta")
            for leaf, _ in linear.named_parameters():
                tensor = getattr(whole, f"in_proj_{leaf}")
                rows = nn.Parameter(tensor.detach().chunk(3)[index], tensor.requires_grad)
                setattr(linear, leaf, rows)
            setattr(self, name, linear.train(whole.training))
        self.q_proj: Any
        self.out_proj: Any = whole._modules.pop("out_proj")
        whole.in_proj_weight = whole.in_proj_bias = None  # type: ignore[assignment]
        self.__dict__["whole"] = whole  # not registered as a submodule

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """Attend. All features are `[batch, positions, d]`.

        Args:
            query: Features that attend.
            key: Features that are attended to, for the scores.
            value: Features that are attended to, for the content.
            need_weights: Ignored: weights are never returned.
            attn_mask: Added to the scores, `[positions, positions]`. If it is boolean, True marks
                positions that must not be seen.

        Returns:
            The attended features, and None.
        """
        query, key, value = (
            getattr(self, name)(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for name, x in zip(PROJECTIONS, (query, key, value), strict=True)
        )
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = ~attn_mask  # in torch's function True means visible
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask)
        return self.out_proj(mixed.transpose(1, 2).flatten(-2)), None

    def fused(self) -> nn.MultiheadAttention:
        """Return the original module with the current weights."""
        whole = self.__dict__["whole"]
        for leaf, first in self.q_proj.named_parameters():
            rows = [getattr(getattr(self, name), leaf).detach() for name in PROJECTIONS]
            parameter = nn.Parameter(torch.cat(rows), first.requires_grad)
            setattr(whole, f"in_proj_{leaf}", parameter)
        whole.out_proj = self.out_proj
        return whole


def split(model: nn.Module) -> nn.Module:
    """Return a model with the same tensors in which the blocks' attention is split.

    Models other than open_clip's, and text towers, stay as they are.

    Raises:
        CalibrationError: If a block's attention cannot be split.
    """
    if not (blocks := find_open_clip_blocks(model)):
        return model
    tensors = [*model.parameters(), *model.buffers()]
    model = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    for block in blocks:
        owner, stack = model.get_submodule(block), _stack(model, block)
        _check(f"{block}.attn", owner.attn, stack)
        owner.attn = SplitAttention(owner.attn)  # type: ignore[arg-type]
        stack.batch_first = True
    return model


def fused(model: nn.Module) -> nn.Module:
    """Return a split model in open_clip's form. The argument must not be used again."""
    for block in find_open_clip_blocks(model):
        owner: Any = model.get_submodule(block)
        owner.attn = owner.attn.fused()
        _stack(model, block).batch_first = owner.attn.batch_first
    return model


def _stack(model: nn.Module, block: str) -> Any:
    """Return the module that runs the list of blocks and transposes batch and positions."""
    return model.get_submodule(block.rsplit(".", 2)[0])


def _check(name: str, attention: Any, stack: nn.Module) -> None:
    plain = type(attention) is nn.MultiheadAttention and attention._qkv_same_embed_dim
    if not plain or attention.bias_k is not None or attention.add_zero_attn:
        raise CalibrationError(
            f"module {name} is a {type(attention).__name__} of a kind that cannot be split into "
            "q, k and v. Build the model with torch's nn.MultiheadAttention"
        )
    if not attention.batch_first and not hasattr(stack, "batch_first"):
        raise CalibrationError(
            f"module {name} expects the batch in the second dimension, and {type(stack).__name__} "
            "has no batch_first to change this. Install open_clip_torch 2.26 or newer"
        )
