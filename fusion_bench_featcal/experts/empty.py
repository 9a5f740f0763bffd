"""Models of transformers without weights, and inputs for them."""

from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn

_TARGETS = 8  # tokens that a decoder writes


def without_weights(kind: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    """Return a model of transformers with its parameters on the meta device.

    Args:
        kind: Its class.
        config: Its config, which may be of another person.
        dtype: Its dtype.
    """
    # Not `model.to(dtype)`: position tables stay float32, as with `from_pretrained`.
    with init_empty_weights(include_buffers=False):
        model = kind._from_config(config, dtype=dtype)
    model.tie_weights()  # moving parameters to the meta device has untied them
    return model.eval().requires_grad_(False)


def sample_of(model: Any, tokens: int) -> dict[str, Tensor]:
    """Return one text of a number of tokens, one image or one recording."""
    config, kind = model.config, model.main_input_name
    ids = torch.zeros(1, tokens, dtype=torch.long)
    sample = {kind: ids}
    if kind == "pixel_values":
        size, channels = getattr(config, "image_size", 224), getattr(config, "num_channels", 3)
        sides = size if isinstance(size, list | tuple) else (size, size)
        sample[kind] = torch.zeros(1, channels, *sides, dtype=model.dtype)
    elif kind == "input_features":
        sides = config.num_mel_bins, 2 * config.max_source_positions
        sample[kind] = torch.zeros(1, *sides, dtype=model.dtype)
    if getattr(config, "is_encoder_decoder", False):
        sample["decoder_input_ids"] = ids[:, :_TARGETS]
    return sample
