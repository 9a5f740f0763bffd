"""Counted positions in modules of the last block, if they differ from the blocks before it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.families import Family
from fusion_bench_featcal.modules.sites import Site
from fusion_bench_featcal.rules.rule import Rule
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings
from fusion_bench_featcal.streams.rows import CountedRows

DEMO_WEIGHT = 0.01
"""Weight of all tokens except the first with `token_weights=demo_last_block`."""


class DemoRows:
    """Small weight for all tokens but the first, except in k_proj and v_proj (authors' demo)."""

    def mask(
        self, model: nn.Module, block: str, hidden: Tensor, valid: CountedRows | None
    ) -> Tensor | None:
        """Return weights of positions, `[batch, positions]`: 1 for the first, else `DEMO_WEIGHT`.

        Args:
            model: The model.
            block: The last block, for messages.
            hidden: Features of the block's shape, `[batch, positions, d]`.
            valid: Positions that count in earlier blocks, or None for all.

        Raises:
            CalibrationError: If features are not `[batch, tokens, d]`.
        """
        if hidden.ndim != 3:
            raise CalibrationError(
                f"block {block} gives {tuple(hidden.shape)}, not [batch, tokens, d]: "
                "method.token_weights=demo_last_block does not fit; use uniform"
            )
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        weights = hidden.new_full(hidden.shape[:2], DEMO_WEIGHT, dtype=dtype)
        weights[:, 0] = 1
        return weights if valid is None else weights * valid.mask(dtype)

    def modules(
        self,
        model: nn.Module,
        block: str,
        sites: Sequence[Site],
        run: Callable[[], Tensor],
        mask: Tensor,
    ) -> list[str]:
        """Return names of the modules that use the weights, which are all but k_proj and v_proj.

        Args:
            model: The model.
            block: The last block.
            sites: Its calibrated modules.
            run: Runs the block on one batch, and returns its hidden output.
            mask: The weights in that batch.
        """
        return [s.name for s in sites if not s.name.endswith(("k_proj", "v_proj"))]


class ClosingRows:
    """Positions that the model reads after its last block, in linear modules of that block.

    A position does not count in a module if no output that is read depends on it.
    """

    def __init__(self, family: Family) -> None:
        """Prepare.

        Args:
            family: Returns the positions that are read.
        """
        self._family = family

    def mask(
        self, model: nn.Module, block: str, hidden: Tensor, valid: CountedRows | None
    ) -> Tensor | None:
        """Return 1 for positions that are read, else 0, or None if all are. See `DemoRows.mask`."""
        return self._family.closing_rows(model, hidden)

    def modules(
        self,
        model: nn.Module,
        block: str,
        sites: Sequence[Site],
        run: Callable[[], Tensor],
        mask: Tensor,
    ) -> list[str]:
        """Select modules by gradients of a random combination of the outputs that are read."""
        outputs: dict[str, Tensor] = {}
        names = [site.name for site in sites if site.kind == "linear"]

        def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
            return (args[0].detach().requires_grad_(), *args[1:]), kwargs

        def note(name: str) -> Callable[..., None]:
            return lambda _, __, output: outputs.update({name: output})

        hooks = [model.get_submodule(block).register_forward_pre_hook(enter, with_kwargs=True)]
        hooks += [model.get_submodule(name).register_forward_hook(note(name)) for name in names]
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
        return [
            name
            for name, gradient in zip(outputs, gradients, strict=True)
            if gradient.shape[:-1] == mask.shape and not bool(gradient[mask == 0].any())
        ]


LastRows = DemoRows | ClosingRows
"""Counted positions in modules of the last block, if they differ from earlier blocks."""


def last_rows_of(settings: FeatCalSettings, rule: Rule, family: Family) -> LastRows | None:
    """Return the positions that settings and rule choose in the last block."""
    if settings.token_weights == "demo_last_block":
        return DemoRows()
    return ClosingRows(family) if rule.reads_closing_rows else None
