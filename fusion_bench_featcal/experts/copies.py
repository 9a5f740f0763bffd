"""Copies of models whose instance functions run the copied weights.

FusionBench's loaders of classifiers set `model.forward = lambda ...` on the loaded model.
`copy.deepcopy` does not copy functions, so a copy would still run the original's weights.
"""

import copy
from collections.abc import Callable, Iterable
from types import CellType, FunctionType, MethodType

import torch
from torch import Tensor, nn

Swap = Callable[[nn.Module], nn.Module]


def copied_module(
    model: nn.Module, tensors: Iterable[Tensor] = (), make: Callable[[Tensor], Tensor] = torch.clone
) -> nn.Module:
    """Return a deep copy of a model whose functions run the copy.

    Args:
        model: The model.
        tensors: Parameters and buffers that are replaced instead of copied. Tied tensors stay tied.
        make: Returns the replacement of a tensor.
    """
    memo = dict[int, object]()  # of deepcopy: id of a tensor -> its replacement
    for tensor in tensors:
        new, is_parameter = make(tensor), isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(new, requires_grad=False) if is_parameter else new
    copied = copy.deepcopy(model, memo)
    copies = dict(zip(map(id, model.modules()), copied.modules(), strict=True))
    return _rebind(copied, lambda module: copies.get(id(module), module))


def bind_own_functions(model: nn.Module) -> nn.Module:
    """Let functions that were set on a model run this model, and not another one of its class.

    Args:
        model: The model, possibly a copy. It is changed in place.

    Returns:
        The same model.
    """
    return _rebind(model, lambda module: model if type(module) is type(model) else module)


def _rebind(model: nn.Module, swap: Swap) -> nn.Module:
    for owner in model.modules():
        for attribute, value in list(vars(owner).items()):
            if isinstance(value, FunctionType):
                setattr(owner, attribute, _rebound(value, swap))
    return model


def _rebound(value: object, swap: Swap) -> object:
    """Return a function, method or module with all modules that it refers to swapped."""
    if isinstance(value, nn.Module):
        return swap(value)
    if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
        return MethodType(value.__func__, swap(value.__self__))
    if not (isinstance(value, FunctionType) and value.__closure__):
        return value
    cells = tuple(CellType(_rebound(cell.cell_contents, swap)) for cell in value.__closure__)
    function = FunctionType(
        value.__code__, value.__globals__, value.__name__, value.__defaults__, cells
    )
    function.__kwdefaults__ = value.__kwdefaults__
    return function
