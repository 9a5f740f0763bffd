"""Copies of models whose instance functions run the copied weights.

FusionBench's loaders of classifiers set `model.forward = lambda ...` on the loaded model.
`copy.deepcopy` does not copy functions, so a copy would still run the original's weights.
"""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from fusion_bench_featcal.errors import CalibrationError


def copied_module(model: nn.Module, stand_ins: Mapping[int, Any] | None = None) -> nn.Module:
    """Return a deep copy of a model whose functions run the copy.

    Args:
        model: The model.
        stand_ins: Objects to use in place of copies, by the id of the original.
    """
    twin = copy.deepcopy(model, dict(stand_ins or {}))
    pairs = zip(model.modules(), twin.modules(), strict=True)
    return _rebind(twin, {id(original): copied for original, copied in pairs})


def bind_own_functions(model: nn.Module) -> nn.Module:
    """Rebind functions that were set on a model's modules, so that they run this model.

    A module of another model in a function's closure is replaced by this model's module of the
    same class. A model without such functions does not change.

    Args:
        model: The model, possibly a copy. It is changed in place.

    Returns:
        The same model.

    Raises:
        CalibrationError: If several modules of the model are of that class.
    """
    return _rebind(model, {})


def _rebind(model: nn.Module, copies: Mapping[int, nn.Module]) -> nn.Module:
    for name, owner in model.named_modules():
        for attribute, value in list(vars(owner).items()):
            if isinstance(value, FunctionType):
                label = f"{type(model).__name__}.{name}.{attribute}".replace("..", ".")
                swap = partial(_own_module, model, copies, owner, label)
                rebound = _rebound(value, swap)
                if rebound is not value:
                    setattr(owner, attribute, rebound)
    return model


def _rebound(value: Any, swap: Callable[[nn.Module], nn.Module]) -> Any:
    """Return a function, method or module with all modules that it refers to swapped."""
    if isinstance(value, nn.Module):
        return swap(value)
    if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
        module = swap(value.__self__)
        return value if module is value.__self__ else MethodType(value.__func__, module)
    if not (isinstance(value, FunctionType) and value.__closure__):
        return value
    cells = [_rebound_cell(cell, swap) for cell in value.__closure__]
    if all(new is old for new, old in zip(cells, value.__closure__, strict=True)):
        return value
    function = FunctionType(value.__code__, value.__globals__, value.__name__, None, tuple(cells))
    function.__defaults__, function.__kwdefaults__ = value.__defaults__, value.__kwdefaults__
    return function


def _rebound_cell(cell: CellType, swap: Callable[[nn.Module], nn.Module]) -> CellType:
    try:
        content = cell.cell_contents
    except ValueError:  # a variable without a value
        return cell
    rebound = _rebound(content, swap)
    return cell if rebound is content else CellType(rebound)


def _own_module(
    model: nn.Module, copies: Mapping[int, nn.Module], owner: nn.Module, label: str, used: nn.Module
) -> nn.Module:
    """Return `model`'s counterpart of a module that `owner`'s function uses, else that module."""
    if id(used) in copies:
        return copies[id(used)]
    candidates = [module for module in model.modules() if type(module) is type(used)]
    if not candidates or any(module is used for module in candidates):
        return used
    if type(owner) is type(used):
        return owner
    if len(candidates) > 1:
        raise CalibrationError(
            f"{label} is a function that was set on the instance and runs a {type(used).__name__} "
            f"of another model; this one has {len(candidates)}, and running the other's weights "
            "would be wrong. Define the function in a class"
        )
    return candidates[0]
