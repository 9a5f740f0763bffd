"""A subclass of a linear module counts as one if it computes the same."""

import torch
from torch import Tensor, nn

from fusion_bench_featcal.modules.kinds import is_linear


class Renamed(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        product = input @ self.weight.T
        return product if self.bias is None else product + self.bias


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Scaled(Renamed):
    """Linear with a scale of one, which could be another."""

    def __init__(self, width: int, wide: int, scale: float = 1.0) -> None:
        super().__init__(width, wide)
        self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        return self.scale * super().forward(input)


def test_kind_is_that_of_the_computation():
    with torch.device("meta"):
        assert is_linear(Renamed(3, 2)) and is_linear(Renamed(3, 2, bias=False))
    assert not is_linear(Doubled(3, 2)) and not is_linear(Scaled(3, 2))
