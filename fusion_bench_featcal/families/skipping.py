"""Forward passes of a model in which some of its modules do not run."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.families.base import Call, call_of


class SkippedOutput(Tensor):
    """Features returned by a skipped block, in any form that the model expects.

    A model takes a block's result whole, by its first or only entry, or unpacks it. Any other use
    is detected by the comparison with the model's forward pass.
    """

    entries: int
    __torch_function__: Any = torch._C._disabled_torch_function_impl  # results are plain tensors

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int):
            return self if index in (0, -1) else None
        return self.as_subclass(Tensor)[index]

    def __iter__(self) -> Any:
        return iter((self, *[None] * (self.entries - 1)))

    def __len__(self) -> int:
        return 1


def as_skipped_output(hidden: Tensor, entries: int) -> SkippedOutput:
    """Return features as the output of a block that a model may unpack into `entries` values."""
    output = hidden.as_subclass(SkippedOutput)
    output.entries = entries
    return output


@contextmanager
def skipping(
    model: nn.Module, blocks: Sequence[str], output: Callable[[str, Call], Tensor]
) -> Iterator[None]:
    """Context in which blocks do not run: a function of name and call returns the output."""
    modules: list[Any] = [model.get_submodule(name) for name in blocks]

    def run(name: str, *args: Any, **kwargs: Any) -> Tensor:
        call = call_of(args, kwargs)
        return output(name, replace(call, hidden=call.hidden.as_subclass(Tensor)))

    replaced = [module.__dict__.get("forward") for module in modules]  # by some other library
    try:
        for name, module in zip(blocks, modules, strict=True):
            module.forward = partial(run, name)
        yield
    finally:
        for module, forward in zip(modules, replaced, strict=True):
            del module.forward
            if forward is not None:
                module.forward = forward
