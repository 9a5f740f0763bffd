"""Telling whether large tensors hold NaN or infinity."""

import torch
from torch import Tensor


def all_finite(tensor: Tensor) -> bool:
    """Whether no entry is NaN or infinite, in one pass: a sum of finite ones does not overflow.

    Sums that nearly do are looked at entry by entry.
    """
    if tensor.is_floating_point() and tensor.dtype.itemsize < 4:
        total = tensor.sum(dtype=torch.float32)
    else:
        total = tensor.sum()
    return bool(torch.isfinite(total)) or bool(torch.isfinite(tensor).all())
