"""Weights and biases of modules that share their input."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class Linear(NamedTuple):
    """Stacked weights and biases of modules that share their input. A missing bias is zero.

    Attributes:
        weight: `[g, m, d]` with `g` separate input maps (groups of a convolution, else 1). For a
            norm: its gain, `[1, 1, d]`.
        bias: `[g, m]`. For a norm: its shift, `[1, d]`.
    """

    weight: Float[Tensor, "g m d"]
    bias: Float[Tensor, "g m"]

    def minus(self, other: "Linear") -> "Linear":
        """Return the difference of both."""
        return Linear(self.weight - other.weight, self.bias - other.bias)

    def to(self, dtype: torch.dtype) -> "Linear":
        """Return both in another dtype."""
        return Linear(self.weight.to(dtype), self.bias.to(dtype))
