"""Decoder-only language models of Llama's shape: a stack of `layers` after token embeddings."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.families.base import (
    Family,
    call_model,
    hidden_output,
    stop_forward,
    stoppable,
)
from fusion_bench_featcal.families.rows import causal_rows
from fusion_bench_featcal.settings import CalibrationError

# The layers sit under `model.` in a model with a head, at the root of a bare one.
_BLOCK = re.compile(r"(model\.)?layers\.\d+")
_CACHES = {"past_key_values": None, "past_key_value": None, "use_cache": False}

MODEL_TYPES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "granite",
    "olmo2",
    "phi3",
    "smollm3",
    "starcoder2",
)
"""Model types with blocks that are called like Llama's; tests run each of them."""


@dataclass(frozen=True)
class DecoderCall:
    """Input of the next block: hidden features, and every block's own other arguments.

    Attributes:
        hidden: `[batch, positions, d]`.
        kwargs: Block name -> keyword arguments: rotary angles, positions, and the mask of that
            block (models with sliding windows have two masks in turn). They depend on the inputs
            alone, so the model's own forward makes them once, before any block runs.
    """

    hidden: Tensor
    kwargs: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class LlamaFamily(Family):
    """Blocks that pass hidden features on and take nothing else from each other."""

    name: str = "llama"
    same_calls: bool = True

    def stages(self, model: nn.Module) -> list[list[str]]:
        """The decoder layers, first to last, as one stage.

        Raises:
            CalibrationError: If the model has none.
        """
        blocks = [name for name, _ in model.named_modules() if _BLOCK.fullmatch(name)]
        if not blocks:
            raise CalibrationError(
                f"{type(model).__name__} has no decoder layers (model.layers.*); choose another "
                "method.family than llama"
            )
        return [blocks]

    def begin(self, model: nn.Module, inputs: Any, first_block: str, *ending: Any) -> DecoderCall:
        """Run the model's own forward pass with every block standing aside, noting its arguments.

        Caches are switched off: a block runs many times on the same positions.
        """
        if isinstance(inputs, Mapping):  # labels are for the head, which is never reached
            inputs = {k: v for k, v in inputs.items() if k not in ("labels", *_CACHES)}
        (blocks,) = self.stages(model)
        hidden: list[Tensor] = []
        kwargs: dict[str, Mapping[str, Any]] = {}
        with _standing_aside(model, blocks, hidden, kwargs), stoppable():
            call_model(model, inputs)
        return DecoderCall(hidden[0], kwargs)

    def step(self, model: nn.Module, block: str, call: DecoderCall) -> tuple[Tensor, DecoderCall]:
        """Call the block on its stored arguments, which it may not change: they are used again."""
        output = model.get_submodule(block)(call.hidden.clone(), **call.kwargs[block])
        hidden = hidden_output(output)
        return hidden, replace(call, hidden=hidden)

    def row_weights(self, inputs: Any, stage_index: int, decoder_rows: str) -> Tensor | None:
        """Every position that is no padding, or those whose output predicts a label."""
        return causal_rows(inputs, decoder_rows)


@contextmanager
def _standing_aside(
    model: nn.Module,
    blocks: Iterable[str],
    hidden: list[Tensor],
    kwargs: dict[str, Mapping[str, Any]],
) -> Iterator[None]:
    """Context in which blocks run nothing and note what they receive; after the last it stops."""
    names = list(blocks)
    modules: list[Any] = [model.get_submodule(name) for name in names]

    def note(name: str, features: Tensor, *args: Any, **others: Any) -> Tensor:
        if args:  # every supported transformers names all arguments but the first
            raise CalibrationError(
                f"block {name} of {type(model).__name__} is called with {len(args) + 1} arguments "
                "without names; calibrate this model with method.family={name: replay, blocks: "
                "[model.layers.*]}"
            )
        hidden.append(features)
        kwargs[name] = others | {key: _CACHES[key] for key in _CACHES if key in others}
        if name == names[-1]:
            raise stop_forward()
        return hidden[0]  # whether the model takes it whole or its first row, there is one left

    own = [module.__dict__.get("forward") for module in modules]  # some libraries replace it too
    try:
        for name, module in zip(names, modules, strict=True):
            module.forward = lambda *args, name=name, **others: note(name, *args, **others)
        yield
    finally:
        for module, forward in zip(modules, own, strict=True):
            del module.forward
            if forward is not None:
                module.forward = forward


LLAMA = LlamaFamily()
"""Grouped heads, fused or gated projections and norms are the blocks' own affair."""
