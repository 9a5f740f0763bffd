"""Modules that compute what their base class does, although they have a forward of their own."""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_SIZES = 4, 4  # a LayerNorm takes its first argument alone


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear map of its weight and bias, and of nothing else.

    A subclass with a forward of its own (Falcon's) is tried on a small example, if it holds nothing
    that an `nn.Linear` does not: no scale that could differ between modules.
    """
    if not isinstance(module, nn.Linear):
        return False
    if type(module).forward is nn.Linear.forward:
        return True
    usual = {*vars(nn.Linear(1, 1, device="meta")), "_is_hf_initialized"}  # a flag of transformers
    return set(vars(module)) <= usual and bool(_agrees(type(module), nn.Linear))


def is_layer_norm(module: nn.Module) -> bool:
    """Return whether a module is a LayerNorm whose gain and shift are its weight and bias.

    A subclass that uses them otherwise (Nemotron's gain is one more than its weight) is none.
    """
    if not isinstance(module, nn.LayerNorm):
        return False
    own = type(module).forward is not nn.LayerNorm.forward
    return not own or _agrees(type(module), nn.LayerNorm) is not False


@cache
def _agrees(kind: Any, base: type[nn.Module]) -> bool | None:
    """Try a small module of a class with random weights; None: it cannot be made or run."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    try:
        with torch.device("cpu"), torch.no_grad():
            module: Any = kind(*_SIZES[: 1 + (base is nn.Linear)])
            for parameter in module.parameters():
                parameter.copy_(random(*parameter.shape))
            x = random(3, _SIZES[0])
            found, weight, bias = module(x), module.weight, module.bias
            if base is nn.Linear:
                wanted = functional.linear(x, weight, bias)
            else:
                wanted = functional.layer_norm(x, x.shape[-1:], weight, bias, module.eps)
        return bool(torch.allclose(found, wanted, rtol=1e-4, atol=1e-4))
    except Exception:  # a class that takes other arguments
        return None
