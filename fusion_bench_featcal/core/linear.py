"""Weights and biases of modules that share their input, and the precision of features."""

from typing import NamedTuple

import torch
from torch import Tensor


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return a tensor in float32, or as it is if its dtype is not a less precise one."""
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize < 4 else tensor


class Linear(NamedTuple):
    """Stacked weights and biases of modules that share their input. A missing bias is zero.

    Attributes:
        weight: `[m, d]`. For a norm: its gain, `[d]`.
        bias: `[m]`. For a norm: its shift, `[d]`.
    """

    weight: Tensor
    bias: Tensor

    def minus(self, other: "Linear") -> "Linear":
        """Return the difference of both."""
        return Linear(self.weight - other.weight, self.bias - other.bias)

    def to(self, dtype: torch.dtype) -> "Linear":
        """Return both in another dtype."""
        return Linear(self.weight.to(dtype), self.bias.to(dtype))
