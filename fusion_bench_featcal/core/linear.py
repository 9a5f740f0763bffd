"""Weights and biases of modules that share their input."""

from typing import NamedTuple

import torch
from torch import Tensor


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
