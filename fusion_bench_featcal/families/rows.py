"""Counted rows of a text model: never padding, and only targets if a setting requires it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fusion_bench_featcal.errors import CalibrationError

NO_TARGET = -100
"""Label of a position without a target (ignored by the losses of transformers)."""


def mask_named(inputs: Any, name: str) -> Tensor | None:
    """Return a mask by its name in a model's inputs, `[batch, positions]`, or None if missing.

    Raises:
        CalibrationError: If it exists but does not identify padding position by position.
    """
    mask = inputs.get(name) if isinstance(inputs, Mapping) else None
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise CalibrationError(
            f"the input {name!r} is {shape}, but a mask of padding is [batch, positions]. Give "
            "such a mask"
        )
    return mask


def labelled_rows(inputs: Any) -> Tensor | None:
    """Return 1 for positions with a label, `[batch, positions]`, or None without labels.

    In an encoder-decoder model, whose labels are shifted into the decoder's inputs, these are the
    decoder's positions that predict a target.
    """
    labels = mask_named(inputs, "labels")
    return None if labels is None else (labels != NO_TARGET).long()


def causal_rows(inputs: Any, decoder_rows: str, mask_name: str = "attention_mask") -> Tensor | None:
    """Return the counted rows of a decoder-only model, whose labels are aligned with its inputs.

    Args:
        inputs: The model's inputs.
        decoder_rows: `all`: every position except padding. `targets`: positions whose output
            predicts a label, that is, the position before each label.
        mask_name: The input that marks padding.

    Returns:
        1 for positions that count, `[batch, positions]`. None if all count.

    Raises:
        CalibrationError: If targets are requested without labels.
    """
    mask = mask_named(inputs, mask_name)
    if decoder_rows != "targets":
        return mask
    labelled = labelled_rows(inputs)
    if labelled is None:
        raise missing_labels(inputs)
    predicts = torch.zeros_like(labelled)
    predicts[:, :-1] = labelled[:, 1:]
    return predicts if mask is None else predicts * (mask > 0)


def missing_labels(inputs: Any) -> CalibrationError:
    """Return the error for targets without labels."""
    return CalibrationError(
        "method.decoder_rows=targets needs labels, but the inputs are "
        f"{names_of(inputs)}. Give labels, or set method.decoder_rows=all"
    )


def names_of(inputs: Any) -> Any:
    """Return the names in a model's inputs, for messages."""
    return sorted(inputs) if isinstance(inputs, Mapping) else type(inputs).__name__
