"""Features that a model's head receives, and the positions of them that matter."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.families import Family
from fusion_bench_featcal.families.base import call_model, stop_forward, stoppable
from fusion_bench_featcal.modules.models import head_of
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.streams.rows import CountedRows
from fusion_bench_featcal.streams.samples import rows_named


def final_features(model: nn.Module, inputs: Any) -> Tensor:
    """Return the features that a model's head receives, or that it ends with.

    Args:
        model: The model.
        inputs: A batch of its inputs.

    Returns:
        The input of a language model's output embeddings, `[batch, positions, d]`; else the pooled
        output, `[batch, d]`; else the first tensor of the output.
    """
    head = head_of(model)
    if head is None:
        output = call_model(model, inputs)
        pooled = getattr(output, "pooler_output", None)
        return _first_tensor(output) if pooled is None else pooled
    received: list[Tensor] = []

    def stop(_: nn.Module, args: tuple[Any, ...]) -> None:
        received.append(args[0])
        raise stop_forward()

    handle = head.register_forward_pre_hook(stop)
    try:
        with stoppable():
            call_model(model, inputs)
    finally:
        handle.remove()
    return received[0]


def final_rows(
    model: nn.Module, family: Family, settings: FeatCalSettings, inputs: Any
) -> CountedRows | None:
    """Return the positions of the final features that `decoder_rows` names; None: all.

    Where these are the targets, but there are no labels, it is the last position, which predicts
    the next token.

    Args:
        model: The model.
        family: How it is cut into blocks.
        settings: `decoder_rows` is used.
        inputs: A batch of the model's inputs.
    """
    rows = rows_named(settings, inputs)
    mask = family.row_weights(inputs, len(family.stages(model)) - 1, rows)
    config = getattr(model, "config", None)
    writes_on = head_of(model) and not getattr(config, "is_encoder_decoder", False)
    if settings.decoder_rows == "auto" and rows == "all" and writes_on:
        mask = _all_positions(inputs) if mask is None else mask
        positions = torch.arange(mask.shape[1], device=mask.device)
        last = torch.where(mask > 0, positions, -1).max(1, keepdim=True).values
        mask = (positions == last).long()
    return None if mask is None else CountedRows.of_mask(mask)


def _all_positions(inputs: Any) -> Tensor:
    """Return ones for the positions of a language model's inputs, `[batch, positions]`."""
    if isinstance(inputs, Mapping):
        names = (name for name in ("input_ids", "inputs_embeds") if name in inputs)
        inputs = inputs[next(names, next(iter(inputs)))]
    first = _first_tensor(inputs)
    return torch.ones(first.shape[:2], dtype=torch.long, device=first.device)


def _first_tensor(output: Any) -> Tensor:
    while not isinstance(output, Tensor):
        output = next(iter(output.values() if isinstance(output, Mapping) else output))
    return output
