"""Sizes of calibration batches: the user's choice, or a default for the device."""

import torch

_ON_CPU = 16
# The CPU launches each GPU kernel, which takes longer than the kernel of a small batch.
_ON_GPU = 64
# Padded tokens of a batch, because features within a block grow with the length of texts.
_TOKENS_ON_GPU = 8_192


def batch_size_of(
    chosen: int | str, device: torch.device | str | None = None, longest: int | None = None
) -> int:
    """Return the number of samples that run through a block together.

    Args:
        chosen: The setting `batch_size`, an integer or `auto`.
        device: The device of the calibration, by default a CPU.
        longest: Tokens of the longest text, or None for images.
    """
    if chosen != "auto":
        return int(chosen)
    if device is None or torch.device(device).type == "cpu":
        return _ON_CPU
    return _ON_GPU if longest is None else max(_ON_CPU, min(_ON_GPU, _TOKENS_ON_GPU // longest))
