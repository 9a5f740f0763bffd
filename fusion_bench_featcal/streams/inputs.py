"""Batches of model inputs: mappings, tuples or single tensors, batch first."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.core.finite import all_finite
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.families.base import NO_TARGET
from fusion_bench_featcal.families.lists import is_encoder_decoder

_BATCHES = (Tensor, Mapping, tuple)


def to_device(inputs: Any, device: torch.device) -> Any:
    """Return a batch with all its tensors on a device."""
    return _map_tensors(inputs, lambda value: value.to(device))


def part_of(inputs: Any, size: int, samples: slice | Tensor) -> Any:
    """Return some samples of a batch of `size`, by a slice or their numbers."""

    def cut(value: Tensor) -> Tensor:
        return value[samples] if value.ndim > 0 and len(value) == size else value

    return _map_tensors(inputs, cut)


def size_and_rank(label: str, inputs: Any) -> tuple[int, int]:
    """Return the number of samples in a batch, and the most dimensions of its tensors.

    Args:
        label: Names the batch in messages.
        inputs: The batch.

    Raises:
        CalibrationError: If there is no tensor with samples in it.
    """
    named = _named_tensors(inputs) if isinstance(inputs, _BATCHES) else {}
    media = media_in(inputs)
    # The number of images may differ from the number of texts.
    tensors = [named["input_ids"]] if media else [*named.values()]
    if not tensors or tensors[0].ndim == 0 or len(tensors[0]) == 0:
        raise CalibrationError(
            f"{label} must be a tensor, or a mapping or tuple with tensors, batch first, of at "
            f"least one sample; got {inputs!r:.80}"
        )
    size = len(tensors[0])
    for name in media:
        if size > 1 and len(named[name]) != size:
            raise CalibrationError(
                f"{label} has {size} samples, but {name} has {len(named[name])} entries, so it is "
                "unknown which belong to which sample: give batches of one sample"
            )
    return size, max(tensor.ndim for tensor in tensors)


def media_in(inputs: Any) -> list[str]:
    """Return the names of a batch's images and sounds beside its texts."""
    if not isinstance(inputs, Mapping) or not isinstance(inputs.get("input_ids"), Tensor):
        return []
    return [
        name
        for name, value in _named_tensors(inputs).items()
        if value.is_floating_point() and not name.endswith(("mask", "embeds"))
    ]


def largest_tensor(inputs: Any) -> int:
    """Return the number of entries of a batch's largest tensor."""
    return max(value.numel() for value in _named_tensors(inputs).values())


def check_finite_inputs(inputs: Any, start: int) -> None:
    """Refuse a batch with NaN or infinity in its floating-point inputs.

    Args:
        inputs: The batch.
        start: Number of its first sample in the task, from 0, for the message.

    Raises:
        CalibrationError: Naming sample and input.
    """
    for name, value in _named_tensors(inputs).items():
        if value.is_floating_point() and not all_finite(value):
            wrong = (~value.isfinite()).reshape(len(value) if value.ndim else 1, -1)
            row = int(wrong.any(1).nonzero()[0])
            raise CalibrationError(
                f"sample {start + row}, input {name!r}, has NaN or infinite values. Check the data"
            )


def check_token_ids(inputs: Any, model: nn.Module, label_of: Callable[[int], str]) -> None:
    """Refuse token ids outside a language model's embeddings.

    Args:
        inputs: One batch.
        model: The model. Nothing is checked if it has no token embeddings.
        label_of: Names a row of the batch in messages.

    Raises:
        CalibrationError: For ids that are floating point, negative, or beyond the vocabulary.
    """
    size = vocabulary_size(model)
    if size is None or not isinstance(inputs, Mapping):
        return
    labels = ("labels",) if is_encoder_decoder(model) else ()
    for name in ("input_ids", "decoder_input_ids", *labels):
        ids = inputs.get(name)
        if not isinstance(ids, Tensor):
            continue
        if ids.is_floating_point():
            raise CalibrationError(f"{label_of(0)}: {name} are {ids.dtype}, not integers")
        wrong = (ids < 0) | (ids >= size)
        if name == "labels":
            wrong &= ids != NO_TARGET
        if ids.ndim == 2 and wrong.any():
            row, column = wrong.nonzero()[0].tolist()
            raise CalibrationError(
                f"{label_of(row)}: {name} has the token id {ids[row, column].item()}, but the "
                f"model's vocabulary is 0..{size - 1}. Check that the ids come from its own "
                "tokenizer"
            )


def vocabulary_size(model: nn.Module) -> int | None:
    """Return the rows of a language model's token embeddings, or None for any other model."""
    find = getattr(model, "get_input_embeddings", None)
    try:
        table = None if find is None else find()
    except NotImplementedError:
        return None
    return table.num_embeddings if isinstance(table, nn.Embedding) else None


def _named_tensors(inputs: Any) -> dict[Any, Tensor]:
    values = [inputs] if isinstance(inputs, Tensor) else inputs
    named = values.items() if isinstance(values, Mapping) else enumerate(values)
    return {name: value for name, value in named if isinstance(value, Tensor)}


def _map_tensors(inputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    def apply(value: Any) -> Any:
        return change(value) if isinstance(value, Tensor) else value

    if isinstance(inputs, Mapping):
        return {key: apply(value) for key, value in inputs.items()}
    return tuple(map(apply, inputs)) if isinstance(inputs, tuple) else apply(inputs)
