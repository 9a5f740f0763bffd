"""Hooks that see what every calibrated module of a block receives."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

InputKey = tuple[int, int]
"""Identity of an input: the tensor and its version (in-place writes raise the version)."""


@dataclass
class Recording:
    """Inputs of one pass through a block.

    Attributes:
        inputs: Each distinct input once, copied, by identity.
        calls: For each module, the identities of its inputs, one a call.
    """

    inputs: dict[InputKey, Tensor] = field(default_factory=dict)
    calls: dict[str, list[InputKey]] = field(default_factory=dict)
    _alive: list[Tensor] = field(default_factory=list)

    def add(self, module: str, value: Tensor) -> None:
        """Note one call of a module."""
        key = (id(value), 0 if value.is_inference() else value._version)
        if key not in self.inputs:
            # A block may overwrite the tensor later (an in-place residual), so it is copied; the
            # tensor itself is kept too, because a freed one's identity can return.
            self.inputs[key] = value.detach().clone()
            self._alive.append(value)
        self.calls.setdefault(module, []).append(key)

    def of(self, module: str) -> list[Tensor]:
        """A module's inputs, one a call."""
        return [self.inputs[key] for key in self.calls.get(module, [])]


@contextmanager
def record_inputs(model: nn.Module, modules: Iterable[str]) -> Iterator[Recording]:
    """Record what the named modules receive while the context is open.

    Args:
        model: The model.
        modules: Names of its modules.

    Yields:
        The recording, filled by every forward pass inside the context.
    """
    recording = Recording()

    def hook(name: str) -> Any:
        def record(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            value = args[0] if args else next(iter(kwargs.values()))
            recording.add(name, value)

        return record

    handles = [
        model.get_submodule(name).register_forward_pre_hook(hook(name), with_kwargs=True)
        for name in modules
    ]
    try:
        yield recording
    finally:
        for handle in handles:
            handle.remove()
