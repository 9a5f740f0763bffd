"""NaN and infinity in large tensors, and the one way in which the host reads a device."""

from collections.abc import Sequence

import torch
from torch import Tensor


def solve_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of solves on a device: float64 wherever there is one."""
    return torch.float32 if device.type == "mps" else torch.float64


def all_finite(tensor: Tensor) -> bool:
    """Return whether no entry is NaN or infinite, in one pass.

    A sum of finite entries seldom overflows. If it does, each entry is tested.
    """
    return not bool(not_finite(tensor)) or bool(torch.isfinite(tensor).all())


def is_sound(tensor: Tensor, *, is_parameter: bool) -> bool:
    """Return whether a stored tensor has no NaN, and as a parameter no infinity.

    Infinity in a buffer may be meant, as in an attention mask.
    """
    if is_parameter or not tensor.is_floating_point():
        return all_finite(tensor)
    return not bool(torch.isnan(tensor).any())


def not_finite(tensor: Tensor) -> Tensor:
    """Return 1 if an entry is NaN or infinite, or the sum of all is, else 0.

    A scalar on the tensor's device, which the host need not read at once. It takes one pass and no
    memory of the tensor's size.
    """
    narrow = tensor.is_floating_point() and tensor.dtype.itemsize < 4
    total = tensor.sum(dtype=torch.float32) if narrow else tensor.sum()
    return torch.isfinite(total).logical_not()


def read_back(values: Sequence[Tensor]) -> list[float]:
    """Copy numbers to the host in one synchronisation.

    Args:
        values: Scalars or vectors, of one device and any dtypes.

    Returns:
        Their entries in order.
    """
    if not values:
        return []
    wide = solve_dtype(values[0].device)
    return torch.cat([value.reshape(-1).to(wide) for value in values]).tolist()
