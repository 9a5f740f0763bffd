"""NaN and infinity in large tensors, and the one way in which the host looks at a device."""

from collections.abc import Sequence

import torch
from torch import Tensor

_PART = 2**22
"""Entries of a narrow tensor that are added up at once."""


def all_finite(tensor: Tensor) -> bool:
    """Return whether no entry is NaN or infinite, in one pass.

    A sum of finite entries seldom overflows; where it does, they are looked at one by one.
    """
    return not bool(not_finite(tensor)) or bool(torch.isfinite(tensor).all())


def is_sound(tensor: Tensor, *, is_parameter: bool) -> bool:
    """Tell whether a stored tensor can be meant: no NaN, and in parameters no infinity.

    Infinity in a buffer may be meant, as in an attention mask.
    """
    if is_parameter or not tensor.is_floating_point():
        return all_finite(tensor)
    return not bool(torch.isnan(tensor).any())


def not_finite(tensor: Tensor) -> Tensor:
    """1 where an entry is NaN or infinite, or the sum of all is; else 0.

    A scalar on the tensor's device, at which the host need not look at once. It takes one pass and
    no memory of the tensor's size.
    """
    if tensor.is_floating_point() and tensor.dtype.itemsize < 4:
        parts = tensor.flatten().split(_PART)  # torch makes a wide copy of each
        total = torch.stack([part.sum(dtype=torch.float32) for part in parts]).sum()
    else:
        total = tensor.sum()
    return torch.isfinite(total).logical_not()


def read_back(values: Sequence[Tensor]) -> list[float]:
    """Copy numbers to the host, all at once: on a GPU it waits, once, for what computes them.

    Args:
        values: Scalars or vectors, of one device and any dtypes.

    Returns:
        Their entries in order.
    """
    if not values:
        return []
    wide = torch.float32 if values[0].device.type == "mps" else torch.float64
    return torch.cat([value.reshape(-1).to(wide) for value in values]).tolist()
