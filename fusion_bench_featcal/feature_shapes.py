"""Sizes of the features between a model's blocks, from its config and shapes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fusion_bench_featcal.families import Family

LENGTH = 512
"""Default number of tokens of a text."""


@dataclass(frozen=True)
class Features:
    """Sizes of one block's inputs.

    Attributes:
        positions: Number of positions per sample.
        width: Width of the features.
        encoded: Size of the encoder's output per sample, an input of decoder blocks.
        shared: Size of a position bias, which the samples of a batch share.
    """

    positions: int
    width: int
    encoded: int = 0
    shared: int = 0

    def numbers(self, samples: int, batches: int) -> int:
        """Return the size of the inputs of some samples in some batches."""
        return samples * (self.positions * self.width + self.encoded) + batches * self.shared


def features_of(
    family: Family,
    model: nn.Module,
    stages: Sequence[Sequence[str]],
    length: int,
    target_length: int,
) -> dict[str, Features]:
    """Return the sizes of each block's inputs.

    Args:
        family: The model's family.
        model: The model, on any device. Of images one runs through it, which on the meta device
            computes shapes only.
        stages: Its blocks.
        length: Tokens of a text, or the side of an image if it is not in the config.
        target_length: Tokens of an encoder-decoder's target.

    Raises:
        ValueError: If the model's inputs are unknown.
    """
    config: Any = getattr(model, "config", None)
    if config is None:
        raise ValueError(
            f"{type(model).__name__} has no config, from which featcal plan takes the size of "
            "inputs. Plan models of transformers"
        )
    if takes_images(model) and len(stages) == 1:
        return _of_images(family, model, stages[0], getattr(config, "image_size", None) or length)
    decodes = bool(getattr(config, "is_encoder_decoder", False))
    if len(stages) > 1 + decodes or takes_images(model):
        raise ValueError(f"the number of positions in {type(model).__name__} is unknown")
    encoded = getattr(config, "max_source_positions", length)  # of Whisper
    lengths = (length,) if not decodes else (encoded, target_length)[2 - len(stages) :]
    features: dict[str, Features] = {}
    for stage, positions in zip(stages, lengths, strict=True):
        width = _width(model, stage[0])
        heads = _shared_bias_heads(model, stage)
        memory = encoded * width if decodes and stage is stages[-1] and len(stages) > 1 else 0
        shared = heads * positions**2
        features |= dict.fromkeys(stage, Features(positions, width, memory, shared))
    return features


def takes_images(model: nn.Module) -> bool:
    """Return whether a model's inputs are images."""
    images = getattr(model, "main_input_name", None) == "pixel_values"
    return images or hasattr(getattr(model, "config", None), "image_size")


def needs_length(model: nn.Module) -> bool:
    """Return whether the size of a model's inputs is missing in its config."""
    if takes_images(model):
        return not hasattr(getattr(model, "config", None), "image_size")
    return getattr(model, "main_input_name", None) == "input_ids"


def length_for(model: nn.Module, given: int | None, max_length: int | None = None) -> int:
    """Return the size of a model's inputs: as given, else `max_length`, else 512.

    Raises:
        ValueError: If the model takes images of unknown size.
    """
    if given is None and takes_images(model) and needs_length(model):
        raise ValueError(
            f"the config of {type(model).__name__} names no image size: give the side of an image "
            "in pixels by --length, such as --length 224"
        )
    return given or max_length or LENGTH


def _of_images(
    family: Family, model: nn.Module, blocks: Sequence[str], side: int | Sequence[int]
) -> dict[str, Features]:
    """Return the sizes of each block's inputs for an image."""
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
    except RuntimeError as error:  # of operations without a meta kernel
        raise ValueError(f"the number of positions in {type(model).__name__} is unknown") from error
    return features


def _width(model: nn.Module, block: str) -> int:
    """Return the number of inputs of a block's first layer; `nx` is of GPT-2's."""
    for layer in model.get_submodule(block).modules():
        for name in ("in_features", "nx", "normalized_shape", "num_features"):
            if hasattr(layer, name):
                size: Any = getattr(layer, name)
                return size if isinstance(size, int) else size[-1]
    raise ValueError(f"the width of {block} is unknown")


def _shared_bias_heads(model: nn.Module, stage: Sequence[str]) -> int:
    """Return the heads of a position bias that the first block makes for all blocks, else 0."""
    heads = [
        {n: p.shape[-1] for n, p in model.get_submodule(b).named_parameters() if "relative_" in n}
        for b in stage[:2]
    ]
    alone = len(heads) < 2 or not heads[1]
    return next(iter(heads[0].values()), 0) if alone else 0
