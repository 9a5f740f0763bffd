"""Batches of model inputs without entries, for models without weights."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def example_inputs(model: nn.Module, samples: int, length: int, target_length: int) -> Any:
    """A batch of a model's inputs without entries.

    Args:
        model: The model.
        samples: Samples in the batch.
        length: Tokens of a text.
        target_length: Tokens of an encoder-decoder's target.

    Returns:
        The inputs, on the meta device.

    Raises:
        ValueError: If they cannot be told from the model's config.
    """
    config: Any = getattr(model, "config", None)
    if config is None:
        raise ValueError(
            f"{type(model).__name__} has no config that tells its inputs; featcal plan knows the "
            "models of transformers"
        )
    if hasattr(config, "image_size"):
        side, channels = config.image_size, getattr(config, "num_channels", 3)
        return {"pixel_values": torch.empty(samples, channels, side, side, device="meta")}
    ids = torch.empty(samples, length, dtype=torch.long, device="meta")
    if getattr(config, "is_encoder_decoder", False):
        return {"input_ids": ids, "labels": ids.new_empty(samples, target_length)}
    return {"input_ids": ids}


def without_masks(inputs: Any) -> Any:
    """A batch on the meta device without masks: their entries decide nothing that is counted.

    Models look at a mask's entries, which the meta device does not have.
    """
    if isinstance(inputs, Mapping):
        kept = {k: v for k, v in inputs.items() if not k.endswith("attention_mask")}
        return {key: _empty(value) for key, value in kept.items()}
    return tuple(map(_empty, inputs)) if isinstance(inputs, tuple | list) else _empty(inputs)


def _empty(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value
