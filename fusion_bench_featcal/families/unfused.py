"""torch's fused attention matrix split into q, k and v for calibration, and fused again."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.families.base import ModelView

_PARTS = ("q_proj", "k_proj", "v_proj")  # in the order of the fused rows
_LEAVES = ("weight", "bias")


class UnfusedAttention(nn.Module):
    """An `nn.MultiheadAttention` split into modules that hooks can observe.

    The fused module applies its matrices as functions, so that hooks cannot record their inputs.
    Weights are slices of the fused ones and share their memory.
    """

    def __init__(self, fused: nn.MultiheadAttention) -> None:
        """Split an attention module.

        Args:
            fused: The module. It is emptied, and kept for `fused_again`.
        """
        super().__init__()
        self.heads = fused.num_heads
        for index, name in enumerate(_PARTS):
            setattr(self, name, _linear_of(fused, index))
        self.out_proj: Any = fused._modules.pop("out_proj")
        fused.in_proj_weight = fused.in_proj_bias = None  # type: ignore[assignment]
        self.__dict__["emptied"] = [fused]  # in a list, so that it is not registered as a submodule

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
            for name, x in zip(_PARTS, (query, key, value), strict=True)
        )
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = ~attn_mask  # in torch's function True means visible
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask)
        return self.out_proj(mixed.transpose(1, 2).flatten(-2)), None

    def fused_again(self) -> nn.MultiheadAttention:
        """Return the original module with the current weights."""
        (fused,) = self.__dict__["emptied"]
        for leaf in _LEAVES:
            tensors = [getattr(getattr(self, name), leaf) for name in _PARTS]
            if tensors[0] is not None:
                whole = nn.Parameter(
                    torch.cat([p.detach() for p in tensors]), tensors[0].requires_grad
                )
                setattr(fused, f"in_proj_{leaf}", whole)
        fused.out_proj = self.out_proj
        return fused


@dataclass(frozen=True)
class UnfusedView(ModelView):
    """Shows the attention of some blocks split into modules, batch first.

    Attributes:
        find_blocks: Finds the names of the blocks in a model.
        attention: Name of the attention module inside a block.
    """

    find_blocks: Callable[[nn.Module], Iterable[str]]
    attention: str

    def arranged(self, model: nn.Module) -> nn.Module:
        """Return a model with the same tensors in which the blocks' attention is split.

        Raises:
            CalibrationError: If a block's attention cannot be split.
        """
        tensors = [*model.parameters(), *model.buffers()]
        result = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
        for block in self.find_blocks(result):
            owner, stack = result.get_submodule(block), _stack(result, block)
            fused = getattr(owner, self.attention)
            _check(f"{block}.{self.attention}", fused, stack)
            setattr(owner, self.attention, UnfusedAttention(fused))
            stack.batch_first = True
        return result

    def source(self, source: Any) -> "UnfusedSource":
        """Return a source that also has the slices of every fused matrix."""
        return UnfusedSource(source, self.attention)

    def restored(self, model: nn.Module) -> nn.Module:
        """Return the model with fused attention and its current weights."""
        for block in self.find_blocks(model):
            owner = model.get_submodule(block)
            fused = getattr(owner, self.attention).fused_again()
            setattr(owner, self.attention, fused)
            _stack(model, block).batch_first = fused.batch_first
        return model


class UnfusedSource:
    """An expert's weights with each fused matrix also as three slices. Nothing is copied."""

    def __init__(self, source: Any, attention: str) -> None:
        """Wrap a source.

        Args:
            source: The stored weights, an `ExpertSource`.
            attention: Name of the attention modules.
        """
        self._source = source
        self._slices: dict[str, tuple[str, int]] = {}
        for name in source.names():
            for leaf in _LEAVES:
                stem = name.removesuffix(f".{attention}.in_proj_{leaf}")
                if stem != name:
                    for index, part in enumerate(_PARTS):
                        self._slices[f"{stem}.{attention}.{part}.{leaf}"] = (name, index)

    def names(self) -> set[str]:
        """Return names of all tensors and all slices."""
        return self._source.names() | set(self._slices)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor or slice."""
        if name not in self._slices:
            return self._source.shape(name)
        first, *rest = self._source.shape(self._slices[name][0])
        return (first // 3, *rest)

    def nbytes(self, name: str) -> int:
        """Return the size of one tensor or slice."""
        stored, count = self._slices.get(name, (name,))[0], 3 if name in self._slices else 1
        return self._source.nbytes(stored) // count

    def tensor(self, name: str) -> Tensor:
        """Return one tensor or slice."""
        if name not in self._slices:
            return self._source.tensor(name)
        fused, index = self._slices[name]
        return self._source.tensor(fused).chunk(3)[index]


def _linear_of(fused: nn.MultiheadAttention, index: int) -> nn.Linear:
    """Return one third of the fused matrix as a module that shares its memory."""
    width = fused.embed_dim
    part = nn.Linear(width, width, bias=fused.in_proj_bias is not None, device="meta")
    for leaf in _LEAVES:
        whole = getattr(fused, f"in_proj_{leaf}")
        if whole is not None:
            rows = whole.detach().chunk(3)[index]
            setattr(part, leaf, nn.Parameter(rows, requires_grad=whole.requires_grad))
    return part.train(fused.training)


def _stack(model: nn.Module, block: str) -> Any:
    """Return the module that runs the list of blocks and transposes batch and positions."""
    return model.get_submodule(block.rsplit(".", 2)[0])


def _check(name: str, fused: Any, stack: nn.Module) -> None:
    plain = type(fused) is nn.MultiheadAttention and fused._qkv_same_embed_dim
    if not plain or fused.bias_k is not None or fused.add_zero_attn:
        raise CalibrationError(
            f"module {name} is a {type(fused).__name__} of a kind that cannot be taken apart; "
            'calibrate the other modules: method.modules=["!*attn*"]'
        )
    if not fused.batch_first and not hasattr(stack, "batch_first"):
        raise CalibrationError(
            f"module {name} has its batch in second place and {type(stack).__name__} no "
            "batch_first to change that; open_clip_torch 2.26 or newer has"
        )
