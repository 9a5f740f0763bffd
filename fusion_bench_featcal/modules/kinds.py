"""Modules that are equivalent to a base class although they override its forward."""

from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.functional import layer_norm, linear
from torch.nn.utils.parametrize import is_parametrized


def runs_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether a module uses the forward of its kind, not an override."""
    is_unchanged = isinstance(module, kind) and type(module).forward is kind.forward
    return is_unchanged and not is_parametrized(module)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear map by its weight and bias and has no other state.

    A subclass with an overridden forward (Falcon's) is tried on a small example, unless it has
    attributes that `nn.Linear` lacks. These, such as a scale, could differ between modules.
    """
    if not isinstance(module, nn.Linear) or is_parametrized(module):
        return False
    usual = {*vars(nn.Linear(1, 1, device="meta")), "_is_hf_initialized"}  # a flag of transformers
    return runs_as(module, nn.Linear) or (
        set(vars(module)) <= usual and bool(_agrees(type(module), nn.Linear))
    )


def is_layer_norm(module: nn.Module) -> bool:
    """Return whether a module is a LayerNorm whose gain and shift are its weight and bias.

    A subclass with another formula does not count (Nemotron's gain is one more than its weight).
    """
    if not isinstance(module, nn.LayerNorm):
        return False
    return runs_as(module, nn.LayerNorm) or _agrees(type(module), nn.LayerNorm) is not False


@cache
def _agrees(kind: Any, base: type[nn.Module]) -> bool | None:
    """Try a small module of a class with random weights. Return None if it cannot be run."""
    generator, sizes = torch.Generator().manual_seed(0), (4, 4) if base is nn.Linear else (4,)
    try:
        with torch.device("cpu"), torch.no_grad():
            module: Any = kind(*sizes)
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            x, weight, bias = torch.randn(3, 4, generator=generator), module.weight, module.bias
            if base is nn.Linear:
                expected = linear(x, weight, bias)
            else:
                expected = layer_norm(x, x.shape[-1:], weight, bias, module.eps)
            return bool(torch.allclose(module(x), expected, rtol=1e-4, atol=1e-4))
    except Exception:  # a class that takes other arguments
        return None
