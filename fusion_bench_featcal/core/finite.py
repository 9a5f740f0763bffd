"""Checks for NaN and infinity in large tensors, and one transfer of many scalars to the host."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_PART = 2**22
"""Entries of a half-precision tensor that are added up at once."""


def all_finite(tensor: Tensor) -> bool:
    """Return whether no entry is NaN or infinite, in one pass.

    A sum of finite entries seldom overflows. If it does, the entries are checked one by one.
    """
    return math.isfinite(_sum_of(tensor).item()) or bool(torch.isfinite(tensor).all())


def is_sound(tensor: Tensor, *, is_parameter: bool) -> bool:
    """Return whether a stored tensor has no NaN and, if it is a parameter, no infinity.

    Buffers may have infinite entries on purpose, such as an attention mask.
    """
    if is_parameter or not tensor.is_floating_point():
        return all_finite(tensor)
    return not bool(torch.isnan(tensor).any())


def finiteness(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return a scalar for each floating-point tensor, NaN or infinite if one of its entries is.

    On the CPU it also is if the sum of all entries overflows. Scalars stay on the device, for
    `read_back`. It takes one pass and no memory of a tensor's size, and on a GPU one operation.
    """
    if all(tensor.is_cpu for tensor in tensors):  # whose maxima are slower than sums
        return [_sum_of(tensor) for tensor in tensors]
    entries = [tensor if tensor.numel() else tensor.new_zeros(1) for tensor in tensors]
    return list(torch._foreach_norm(entries, math.inf))


def _sum_of(tensor: Tensor) -> Tensor:
    """Return the sum of all entries, of half-precision ones in float32."""
    if not tensor.is_floating_point() or tensor.dtype.itemsize >= 4:
        return tensor.sum()
    chunks = tensor.flatten().split(_PART)  # torch makes a wide copy of each
    return torch.stack([chunk.sum(dtype=torch.float32) for chunk in chunks]).sum()


def read_back(values: Sequence[Tensor]) -> list[float]:
    """Copy scalars and vectors to the host at once: one synchronisation instead of one for each.

    Args:
        values: Scalars or vectors, of one device and any dtypes.

    Returns:
        All entries, in order.
    """
    return torch.cat([value.reshape(-1) for value in values]).tolist() if values else []
