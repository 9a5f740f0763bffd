"""Matrices nobody needs any more, kept for who needs such: fresh memory is slow to touch."""

from collections.abc import Iterable

import torch
from torch import Tensor

Kind = tuple[torch.Size, torch.dtype, torch.device]


class Spares:
    """Memory of matrices, by shape, dtype and device."""

    def __init__(self) -> None:
        """Have none."""
        self._kept: dict[Kind, list[Tensor]] = {}

    def zeros(self, like: Tensor, *shape: int) -> Tensor:
        """A matrix of zeros, in memory that was kept if there is some.

        Args:
            like: Tells dtype and device.
            shape: Its shape.
        """
        kept = self._kept.get((torch.Size(shape), like.dtype, like.device))
        return kept.pop().zero_() if kept else like.new_zeros(shape)

    def give(self, tensors: Iterable[Tensor]) -> None:
        """Keep matrices that nobody uses any more."""
        for tensor in tensors:
            kind = tensor.shape, tensor.dtype, tensor.device
            self._kept.setdefault(kind, []).append(tensor)

    def clear(self) -> None:
        """Let go of all."""
        self._kept.clear()
