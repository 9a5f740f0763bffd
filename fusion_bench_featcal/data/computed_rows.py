"""Datasets whose examples are computed when they are read."""

from collections.abc import Callable, Iterator
from typing import Any

import torch


class ComputedRows(torch.utils.data.Dataset[Any]):
    """A map-style dataset of a length and a function from an index to an example."""

    def __init__(self, length: int, make: Callable[[int], object]) -> None:
        """Store length and function."""
        self.length, self.make = length, make

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return self.make(index)

    def __iter__(self) -> Iterator[Any]:
        return map(self.make, range(self.length))
