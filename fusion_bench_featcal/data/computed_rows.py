"""Datasets whose rows are computed when they are read."""

from collections.abc import Callable, Iterator
from typing import Any

import torch


class ComputedRows(torch.utils.data.Dataset[Any]):
    """A map-style dataset of a number of rows and a function of their position."""

    def __init__(self, number: int, make: Callable[[int], object]) -> None:
        """Store number and function."""
        self.number, self.make = number, make

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.number:
            raise IndexError(index)
        return self.make(index)

    def __iter__(self) -> Iterator[Any]:
        return map(self.make, range(self.number))
