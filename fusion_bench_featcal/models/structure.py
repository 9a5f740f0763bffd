"""Structures of models, and their filling."""

from collections.abc import Container
from typing import Any

import torch
from torch import nn

from fusion_bench_featcal.experts import ExpertSource, LazyModel
from fusion_bench_featcal.families import head_of


def untie(model: nn.Module, stored: ExpertSource) -> None:
    """Give a model a head of its own if its files have one, as transformers 5 does.

    Args:
        model: A model without weights.
        stored: Its weights.
    """
    head: Any = head_of(model)
    if head is None:
        return
    head_name = next(f"{name}.weight" for name, module in model.named_modules() if module is head)
    tensors = model.state_dict(keep_vars=True).items()
    tied = [name for name, tensor in tensors if tensor is head.weight and name != head_name]
    tied = [name for name in tied if name in stored.names()]
    is_stored = head_name in stored.names() and tied
    if is_stored and not torch.equal(stored.tensor(head_name), stored.tensor(tied[-1])):
        head.weight = nn.Parameter(torch.empty_like(head.weight), requires_grad=False)


@torch.no_grad()
def fill(model: nn.Module, source: ExpertSource, optional: Container[str] = ()) -> None:
    """Copy a source's values into a model in memory, in its dtypes.

    Args:
        model: The model.
        source: The values.
        optional: Tensors that the source may lack. They keep the values of the model.

    Raises:
        CalibrationError: If the source lacks another tensor or has one of another shape.
    """
    weights, filled = LazyModel("the model", source, model, optional=optional), set[int]()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in weights.keys and id(tensor) not in filled:  # a tied matrix is read once
            filled.add(id(tensor))
            tensor.copy_(weights.tensor(name))
