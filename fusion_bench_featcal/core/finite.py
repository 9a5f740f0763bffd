"""Checks for NaN and infinity in large tensors, and one transfer of many scalars to the host."""

from collections.abc import Sequence

import torch
from torch import Tensor

_PART = 2**22
"""Entries of a half-precision tensor that are added up at once."""


def all_finite(tensor: Tensor) -> bool:
    """Return whether no entry is NaN or infinite, in one pass.

    A sum of finite entries seldom overflows. If it does, the entries are checked one by one.
    """
    return not bool(not_finite(tensor)) or bool(torch.isfinite(tensor).all())


def is_sound(tensor: Tensor, *, is_parameter: bool) -> bool:
    """Return whether a stored tensor has no NaN and, if it is a parameter, no infinity.

    Buffers may have infinite entries on purpose, such as an attention mask.
    """
    if is_parameter or not tensor.is_floating_point():
        return all_finite(tensor)
    return not bool(torch.isnan(tensor).any())


def not_finite(tensor: Tensor) -> Tensor:
    """Return 1 if an entry is NaN or infinite, or if the sum of all entries is, else 0.

    The result is a scalar on the tensor's device, so that nothing is synchronised here. It takes
    one pass and no memory of the tensor's size.
    """
    if tensor.is_floating_point() and tensor.dtype.itemsize < 4:
        chunks = tensor.flatten().split(_PART)  # torch makes a wide copy of each
        total = torch.stack([chunk.sum(dtype=torch.float32) for chunk in chunks]).sum()
    else:
        total = tensor.sum()
    return torch.isfinite(total).logical_not()


def read_back(values: Sequence[Tensor]) -> list[float]:
    """Copy scalars and vectors to the host at once: one synchronisation instead of one for each.

    Args:
        values: Scalars or vectors, of one device and any dtypes.

    Returns:
        All entries, in order.
    """
    if not values:
        return []
    wide = torch.float32 if values[0].device.type == "mps" else torch.float64
    return torch.cat([value.reshape(-1).to(wide) for value in values]).tolist()
