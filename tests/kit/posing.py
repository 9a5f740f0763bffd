"""The operations that a GPU would run, on a CPU."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CPU, GPU = "cpu", "cuda"
_of: Any = Tensor


class Posing(TorchFunctionMode):
    """Context in which tensors name a GPU as their device, and those of a GPU are on the CPU."""

    _properties: Mapping[Any, Any] = {
        _of.device.__get__: torch.device(GPU),
        _of.is_cpu.__get__: False,
        _of.is_cuda.__get__: True,
    }

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in self._properties and not args[0].is_meta:
            return self._properties[func]
        named = {key: _on_cpu(value) for key, value in (kwargs or {}).items()}
        return func(*map(_on_cpu, args), **named)


def _on_cpu(value: Any) -> Any:
    is_gpu = isinstance(value, str | torch.device) and str(value).startswith(GPU)
    return torch.device(CPU) if is_gpu else value
