"""Modules of the last block of which only the positions count that the model reads behind it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def closing_modules(
    model: nn.Module,
    block: str,
    modules: Sequence[str],
    run: Callable[[], Tensor],
    mask: Tensor,
) -> set[str]:
    """Find the modules whose other positions no output is read through, by the block's gradients.

    Args:
        model: The model.
        block: The last block.
        modules: Names of its linear modules.
        run: Runs the block on one batch; its hidden output, `[batch, positions, d]`.
        mask: 1 for positions of that output which are read, else 0, `[batch, positions]`.
    """
    outputs: dict[str, Tensor] = {}

    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return (args[0].detach().requires_grad_(), *args[1:]), kwargs

    def keep(name: str) -> Callable[..., None]:
        return lambda _, __, output: outputs.update({name: output})

    hooks = [model.get_submodule(block).register_forward_pre_hook(enter, with_kwargs=True)]
    hooks += [model.get_submodule(name).register_forward_hook(keep(name)) for name in modules]
    try:
        with torch.enable_grad():
            hidden = run()
            generator = torch.Generator().manual_seed(0)
            probe = torch.randn(hidden.shape, generator=generator).to(hidden) * mask[..., None]
            gradients = torch.autograd.grad(
                hidden, list(outputs.values()), probe, allow_unused=True, materialize_grads=True
            )
    finally:
        for hook in hooks:
            hook.remove()
    return {
        name
        for name, gradient in zip(outputs, gradients, strict=True)
        if gradient.shape[:-1] == mask.shape and not bool(gradient[mask == 0].any())
    }
