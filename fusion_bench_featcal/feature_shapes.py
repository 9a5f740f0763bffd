"""Sizes of the features between a model's blocks, from its config and shapes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fusion_bench_featcal.families import Family

LENGTH = 512
"""Default length of a text, in tokens."""


@dataclass(frozen=True)
class Features:
    """Sizes of one block's inputs.

    Attributes:
        positions: Number of positions per sample.
        width: Width of the features.
        encoded: Size of the encoder's output per sample, an input of decoder blocks.
        shared: Size of a position bias, which all samples of a batch share.
    """

    positions: int
    width: int
    encoded: int = 0
    shared: int = 0

    def numbers(self, samples: int, batches: int) -> int:
        """Return the size of all inputs, for some samples in some batches."""
        return samples * (self.positions * self.width + self.encoded) + batches * self.shared


def takes_images(model: nn.Module) -> bool:
    """Return whether a model's inputs are images."""
    images = getattr(model, "main_input_name", None) == "pixel_values"
    return images or hasattr(getattr(model, "config", None), "image_size")


def image_numbers(model: nn.Module, length: int | None) -> int:
    """Return the number of values in one input image, or 0 if the inputs are not images."""
    config: Any = getattr(model, "config", None)
    side = getattr(config, "image_size", None) or length
    if not takes_images(model) or side is None:
        return 0
    sides = (side, side) if isinstance(side, int) else side
    return getattr(config, "num_channels", 3) * math.prod(sides)


def features_of(
    family: Family,
    model: nn.Module,
    stages: Sequence[Sequence[str]],
    length: int | None,
    target_length: int,
) -> dict[str, Features]:
    """Return the sizes of each block's inputs.

    Args:
        family: The model's family.
        model: The model, on the meta device. For images a forward pass computes the shapes.
        stages: Its blocks.
        length: Tokens of a text, or the side of an image if it is not in the config.
        target_length: Tokens of an encoder-decoder's target.

    Raises:
        ValueError: If the size of the inputs is unknown.
    """
    kind, config = type(model).__name__, getattr(model, "config", None)
    images, decodes = takes_images(model), bool(getattr(config, "is_encoder_decoder", False))
    if images and len(stages) == 1:
        side = getattr(config, "image_size", None) or length
        if side is None:
            raise ValueError(
                f"the config of {kind} names no image size: give the side of an image in pixels "
                "by --length, such as --length 224"
            )
        return _of_images(family, model, stages[0], side)
    encoded = getattr(config, "max_source_positions", length)  # Whisper has it
    if config is None or images or len(stages) > 1 + decodes or encoded is None:
        raise ValueError(f"the number of positions in {kind} is unknown")
    lengths = (encoded, target_length)[2 - len(stages) :] if decodes else (encoded,)
    features: dict[str, Features] = {}
    for stage, positions in zip(stages, lengths, strict=True):
        width = _width(model, stage[0])
        memory = encoded * width if stage is not stages[0] else 0
        shared = _shared_bias_heads(model, stage) * positions**2
        features |= dict.fromkeys(stage, Features(positions, width, memory, shared))
    return features


def _of_images(
    family: Family, model: nn.Module, blocks: Sequence[str], side: int | Sequence[int]
) -> dict[str, Features]:
    parameter, sides = next(model.parameters()), (side, side) if isinstance(side, int) else side
    channels = getattr(model.config, "num_channels", 3)
    images = torch.zeros(1, channels, *sides, dtype=parameter.dtype, device=parameter.device)
    features: dict[str, Features] = {}
    try:
        call = family.begin(model, {"pixel_values": images}, blocks[0])
        for block in blocks:
            shape = call.hidden.shape  # [1, positions, width] or [1, channels, height, width]
            width = shape[-1] if len(shape) == 3 else shape[1]
            features[block] = Features(math.prod(shape[1:]) // width, width)
            _, call = family.step(model, block, call)
    except RuntimeError as error:  # an operation has no meta kernel
        raise ValueError(f"the number of positions in {type(model).__name__} is unknown") from error
    return features


def _width(model: nn.Module, block: str) -> int:
    """Return the number of inputs of a block's first layer. `nx` is the name in GPT-2."""
    for layer in model.get_submodule(block).modules():
        for name in ("in_features", "nx", "normalized_shape", "num_features"):
            if hasattr(layer, name):
                size: Any = getattr(layer, name)
                return size if isinstance(size, int) else size[-1]
    raise ValueError(f"the width of {block} is unknown")


def _shared_bias_heads(model: nn.Module, stage: Sequence[str]) -> int:
    """Return the heads of a position bias that the first block computes for all blocks."""
    heads = [
        {n: p.shape[-1] for n, p in model.get_submodule(b).named_parameters() if "relative_" in n}
        for b in stage[:2]
    ]
    return 0 if len(heads) > 1 and heads[1] else next(iter(heads[0].values()), 0)
