"""Routed experts of mixtures, token by token, for the slow references.

A slot is one routed expert: what the parameters of a mixture's module have at its number. `entry`
is its matrix in front of the gate or activation, `exit` that behind it.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

Matrix = tuple[Tensor, Tensor]  # `[outputs, inputs]` and bias, zero if there is none


def mixtures_in(model: nn.Module, blocks: Iterable[str]) -> list[str]:
    """Names of the mixtures in the layout of transformers 5."""
    return [
        name
        for block in blocks
        for name, module in model.get_submodule(block).named_modules(prefix=block)
        if is_mixture(module)
    ]


def is_mixture(module: nn.Module) -> bool:
    return hasattr(module, "is_concatenated") and hasattr(module, "down_proj")


def entry_and_exit(mixture: Any) -> tuple[str, str]:
    """Names of the parameters with the matrices of all slots."""
    return "gate_up_proj" if mixture.has_gate else "up_proj", "down_proj"


def matrix_of(mixture: Any, leaf: str, slot: int) -> Matrix:
    """One slot's matrix."""
    weight = getattr(mixture, leaf)[slot].detach().double()
    weight = weight.T if mixture.is_transposed else weight
    if not mixture.has_bias:
        return weight, weight.new_zeros(len(weight))
    return weight, getattr(mixture, f"{leaf}_bias")[slot].detach().double()


def store(mixture: Any, leaf: str, slot: int, new: tuple[Tensor, Tensor | None]) -> None:
    """Write one slot's matrix, and its bias if it has one that changes."""
    weight, bias = new
    getattr(mixture, leaf).data[slot] = weight.T if mixture.is_transposed else weight
    if mixture.has_bias and bias is not None:
        getattr(mixture, f"{leaf}_bias").data[slot] = bias


def sent_to(slot: int, chosen: Tensor) -> list[int]:
    """Numbers of the tokens that are sent to a slot, given the slots chosen for each token."""
    return [token for token, slots in enumerate(chosen.tolist()) if slot in slots]


def mapped(matrix: Matrix, tokens: Tensor) -> Tensor:
    """Outputs of a matrix."""
    return torch.stack([matrix[0] @ token + matrix[1] for token in tokens])


def inner(mixture: Any, slot: int, tokens: Tensor) -> Tensor:
    """Inputs of a slot's exit: gated or activated outputs of its entry."""
    entered = mapped(matrix_of(mixture, entry_and_exit(mixture)[0], slot), tokens)
    if not mixture.has_gate:
        return mixture.act_fn(entered)
    is_usual = mixture._apply_gate.__name__ == "_default_apply_gate"
    if not (is_usual and type(mixture.act_fn).__name__.startswith("SiLU")):
        return mixture._apply_gate(entered)
    half = entered.shape[1] // 2
    gate, up = entered[:, :half], entered[:, half:]
    return gate / (1 + (-gate).exp()) * up


@torch.no_grad()
def ran_slowly(mixture: Any, tokens: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """Output of a mixture, slot by slot, for the arguments of its forward."""
    outputs, tokens = torch.zeros_like(tokens).double(), tokens.double()
    for token, slots in enumerate(chosen.tolist()):
        for place, slot in enumerate(slots):
            inside = inner(mixture, slot, tokens[token][None])
            outside = mapped(matrix_of(mixture, "down_proj", slot), inside)[0]
            if mixture.has_post_expert_norm:
                outside = mixture.post_expert_norm(outside)
            outputs[token] += shares[token, place] * outside
    return outputs
