"""A subclass counts as the module it derives from if it computes the same."""

import torch
from torch import Tensor, nn

from fusion_bench_featcal.modules.kinds import is_layer_norm, is_linear


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


class Wide(nn.LayerNorm):
    """LayerNorm of open_clip."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.float()).to(input.dtype)


def test_kind_is_that_of_the_computation():
    with torch.device("meta"):
        assert is_linear(Renamed(3, 2)) and is_linear(Renamed(3, 2, bias=False))
    for module in (Doubled(3, 2), Scaled(3, 2), nn.LayerNorm(3), nn.ReLU()):
        assert not is_linear(module)
    assert is_layer_norm(Wide(3)) and not is_layer_norm(nn.Linear(3, 3))
