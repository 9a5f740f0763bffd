"""Sizes of the features that a model passes from block to block, from its config and shapes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

LENGTH = 512
"""Number of tokens of a text whose length is unknown."""

_TOKENS = ("cls_token", "class_embedding", "distillation_token", "register_tokens")
_BESIDE = ("shortcut", "downsample")


@dataclass(frozen=True)
class Features:
    """Features that one block receives in one model.

    Attributes:
        positions: Number of positions of a sample.
        width: Width of the features.
        encoded: Numbers of the encoder's output of a sample, which a decoder's blocks receive too.
        shared: Numbers that the samples of a batch share: a position bias.
    """

    positions: int
    width: int
    encoded: int = 0
    shared: int = 0

    def numbers(self, samples: int, batches: int) -> int:
        """Count the numbers of some samples in some batches."""
        return samples * (self.positions * self.width + self.encoded) + batches * self.shared


def features_of(
    model: nn.Module, stages: Sequence[Sequence[str]], length: int, target_length: int
) -> dict[str, Features]:
    """Return what each block receives.

    Args:
        model: The model, on any device.
        stages: Its blocks.
        length: Tokens of a text, or the side of an image where no config tells it.
        target_length: Tokens of an encoder-decoder's target.

    Raises:
        ValueError: If the model's inputs are unknown.
    """
    config: Any = getattr(model, "config", None)
    if config is None:
        raise ValueError(
            f"{type(model).__name__} has no config that tells its inputs; featcal plan knows the "
            "models of transformers"
        )
    if takes_images(model) and len(stages) == 1:
        return _of_images(model, stages[0], getattr(config, "image_size", None) or length)
    decodes = bool(getattr(config, "is_encoder_decoder", False))
    if len(stages) > 1 + decodes or takes_images(model):
        raise ValueError(f"the number of positions in {type(model).__name__} is not known")
    encoded = getattr(config, "max_source_positions", length)  # of Whisper
    lengths = (length,) if not decodes else (encoded, target_length)[2 - len(stages) :]
    features: dict[str, Features] = {}
    for stage, positions in zip(stages, lengths, strict=True):
        width = _inputs_of(_first_layer(model, stage[0]))
        heads = _shared_bias_heads(model, stage)
        memory = encoded * width if decodes and stage is stages[-1] and len(stages) > 1 else 0
        shared = heads * positions**2
        features |= dict.fromkeys(stage, Features(positions, width, memory, shared))
    return features


def takes_images(model: nn.Module) -> bool:
    """Tell whether a model's inputs are images."""
    images = getattr(model, "main_input_name", None) == "pixel_values"
    return images or hasattr(getattr(model, "config", None), "image_size")


def needs_length(model: nn.Module) -> bool:
    """Tell whether the size of a model's inputs does not follow from its config."""
    if takes_images(model):
        return not hasattr(getattr(model, "config", None), "image_size")
    return getattr(model, "main_input_name", None) == "input_ids"


def length_for(model: nn.Module, given: int | None, max_length: int | None = None) -> int:
    """Return the size of a model's inputs: as given, else `max_length`, else 512.

    Raises:
        ValueError: If the model takes images, and neither its config nor `given` tells their size.
    """
    if given is None and takes_images(model) and needs_length(model):
        raise ValueError(
            f"the config of {type(model).__name__} names no image size: give the side of an image "
            "in pixels by --length, such as --length 224"
        )
    return given or max_length or LENGTH


def _of_images(model: nn.Module, blocks: Sequence[str], side: int | Sequence[int]) -> Any:
    """Follow the strides of convolutions and pools up to each block."""
    sides = (side, side) if isinstance(side, int) else side
    names = [name for name, _ in model.named_parameters()]
    tokens = sum(
        model.get_parameter(name).shape[:-1].numel() for name in names if name.endswith(_TOKENS)
    )
    features: dict[str, Features] = {}
    stride, entered, convolves = 1, "", True
    for name, module in model.named_modules():
        if name in blocks:
            first = _first_layer(model, name)
            entered, convolves = f"{name}.", isinstance(first, nn.Conv2d)
            positions = math.prod(length // stride for length in sides)
            features[name] = Features(positions + tokens * (not convolves), _inputs_of(first))
        inside = name.startswith(entered) if entered else False
        skipped = inside and (not convolves or any(part in name for part in _BESIDE))
        if isinstance(module, nn.Conv2d | nn.MaxPool2d | nn.AvgPool2d) and not skipped:
            stride *= module.stride if isinstance(module.stride, int) else module.stride[0]
    return features


def _first_layer(model: nn.Module, block: str) -> Any:
    """Return the first linear map of a block; a norm has the width, too."""
    layers = ("in_channels", "in_features", "nx", "normalized_shape", "num_features")
    modules = model.get_submodule(block).modules()
    return next(module for module in modules if any(hasattr(module, name) for name in layers))


def _inputs_of(layer: Any) -> int:
    """Return the number of inputs of a linear map or a convolution; `nx` is GPT-2's."""
    names = ("in_channels", "in_features", "nx", "num_features")
    return (
        next((getattr(layer, n) for n in names if hasattr(layer, n)), 0)
        or layer.normalized_shape[-1]
    )


def _shared_bias_heads(model: nn.Module, stage: Sequence[str]) -> int:
    """Return the heads of a position bias that the first block makes for all; 0: there is none."""
    heads = [
        {n: p.shape[-1] for n, p in model.get_submodule(b).named_parameters() if "relative_" in n}
        for b in stage[:2]
    ]
    alone = len(heads) < 2 or not heads[1]
    return next(iter(heads[0].values()), 0) if alone else 0
