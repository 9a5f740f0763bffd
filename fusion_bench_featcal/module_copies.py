"""Copies of models that run their own weights, whatever was set on an instance.

FusionBench's loaders of classifiers set `model.forward = lambda ...` over the loaded model's own
method. `copy.deepcopy` copies no function: a copy would go on to run the original's weights.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from fusion_bench_featcal.settings import CalibrationError


def copied_module(model: nn.Module, stand_ins: Mapping[int, Any] | None = None) -> nn.Module:
    """Return a deep copy of a model, whose functions run the copy.

    Args:
        model: The model.
        stand_ins: Objects to take in place of copies, by the original's id.
    """
    made = copy.deepcopy(model, dict(stand_ins or {}))
    pairs = zip(model.modules(), made.modules(), strict=True)
    return _bind(made, {id(original): own for original, own in pairs})


def bind_own_functions(model: nn.Module) -> nn.Module:
    """Make functions that were set on a model's modules run this model instead of another one.

    A function that closes over a foreign module is bound to the module of the same class in this
    model. Does nothing to a model whose functions are its classes' or its own.

    Args:
        model: The model, which someone may have copied. It is changed.

    Returns:
        The same model.

    Raises:
        CalibrationError: If several modules of the model could be meant.
    """
    return _bind(model, {})


def _bind(model: nn.Module, counterparts: Mapping[int, nn.Module]) -> nn.Module:
    for name, module in model.named_modules():
        for attribute, value in list(vars(module).items()):
            if isinstance(value, FunctionType):
                place = f"{name}.{attribute}".lstrip(".")
                bound = _Binding(model, counterparts, module, place).bound(value)
                if bound is not value:
                    setattr(module, attribute, bound)
    return model


@dataclass(frozen=True)
class _Binding:
    """One function that was set on a module.

    Attributes:
        model: The model whose weights shall run.
        counterparts: Its modules by the ids of the original's, as far as they are known.
        owner: The module that has the function.
        place: The function's name in messages.
    """

    model: nn.Module
    counterparts: Mapping[int, nn.Module]
    owner: nn.Module
    place: str

    def bound(self, value: Any) -> Any:
        """Return a function, method or module of this model in place of another model's."""
        if isinstance(value, FunctionType) and value.__closure__:
            cells = [_content(cell) for cell in value.__closure__]
            bound = [self.bound(content) for content in cells]
            if all(new is old for new, old in zip(bound, cells, strict=True)):
                return value
            own = tuple(map(CellType, bound))
            made = FunctionType(value.__code__, value.__globals__, value.__name__, None, own)
            made.__defaults__, made.__kwdefaults__ = value.__defaults__, value.__kwdefaults__
            return made
        if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
            module = self.bound(value.__self__)
            return value if module is value.__self__ else MethodType(value.__func__, module)
        return self._counterpart(value) if isinstance(value, nn.Module) else value

    def _counterpart(self, module: nn.Module) -> nn.Module:
        """Return this model's module of the same class; where it has none the module itself."""
        if id(module) in self.counterparts:
            return self.counterparts[id(module)]
        own = [other for other in self.model.modules() if type(other) is type(module)]
        if any(other is module for other in own):
            return module
        if type(self.owner) is type(module):
            return self.owner
        if len(own) > 1:
            kind = type(module).__name__
            raise CalibrationError(
                f"{type(self.model).__name__}.{self.place} is a function that was set on the "
                f"instance and runs a {kind} of another model; this one has {len(own)}, and running"
                " the other's weights would be wrong. Define the function in a class"
            )
        return own[0] if own else module


def _content(cell: CellType) -> Any:
    """Return what a cell holds; a variable that is not assigned yet holds nothing."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
