"""Structures of models without weights, of a size that their files can hold, and their filling."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from fusion_bench_featcal.experts import ExpertSource, LazyModel

_MOST = 10**5  # parameters of a model whose files are not safetensors


def without_weights(kind: Any, config: Any, dtype: torch.dtype, tensors: int | None) -> nn.Module:
    """Return a model of transformers with its parameters on the meta device.

    Args:
        kind: Its class.
        config: Its config, which may be of another person.
        dtype: Its dtype.
        tensors: Number of tensors in its files, or None if they are not known.

    Raises:
        ValueError: If the config asks for many more parameters than the files can hold.
    """
    most = _MOST if tensors is None else 1000 + 100 * tensors  # experts may be stored as one
    # Not `model.to(dtype)`: position tables stay float32, as by `from_pretrained`.
    with default_dtype(dtype), init_empty_weights(include_buffers=False), _bounded(most):
        model = kind(config)
    model.tie_weights()  # moving parameters to the meta device has untied them
    return model.eval().requires_grad_(False)


def untie(model: Any, stored: ExpertSource) -> None:
    """Give a model a head of its own if its files have one, as transformers 5 does.

    Args:
        model: A model without weights.
        stored: Its weights.
    """
    find: Any = getattr(model, "get_output_embeddings", lambda: None)
    if (head := find()) is None:
        return
    head_name = next(f"{name}.weight" for name, module in model.named_modules() if module is head)
    tensors = model.state_dict(keep_vars=True).items()
    tied = [name for name, tensor in tensors if tensor is head.weight and name != head_name]
    tied = [name for name in tied if name in stored.names()]
    if head_name not in stored.names() or not tied:
        return
    if not torch.equal(stored.tensor(head_name), stored.tensor(tied[-1])):
        head.weight = nn.Parameter(torch.empty_like(head.weight), requires_grad=False)


@torch.no_grad()
def fill(model: nn.Module, source: ExpertSource) -> None:
    """Copy a source's values into a model in memory, in its dtypes.

    Raises:
        CalibrationError: If the source lacks a tensor or has one of another shape.
    """
    weights, filled = LazyModel("the model", source, model), set[int]()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in filled:  # a tied matrix is read once
            filled.add(id(tensor))
            tensor.copy_(weights.tensor(name))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Context in which modules are made in a floating-point dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _bounded(most: int) -> Iterator[None]:
    """Context in which a model can have a number of parameters, by what its files can hold."""
    numbers = count(1)

    def refuse(module: nn.Module, name: str, parameter: Any) -> None:
        if next(numbers) > most:
            raise ValueError(
                "its numbers of layers and modules ask for many more tensors than its files have "
                f"(more than {most:,}). Correct them"
            )

    handle = register_module_parameter_registration_hook(refuse)
    try:
        yield
    finally:
        handle.remove()
