"""A subclass counts as the module it derives from where it computes the same."""

import torch
from torch import Tensor, nn
from torch.nn import functional

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


class Needy(nn.Linear):
    def __init__(self, sizes: tuple[int, int]) -> None:
        super().__init__(*sizes)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


def test_linear_is_told_by_what_it_computes():
    assert is_linear(nn.Linear(3, 2))
    assert is_linear(Renamed(3, 2)) and is_linear(Renamed(3, 2, bias=False))
    with torch.device("meta"):
        assert is_linear(Renamed(3, 2))
    for module in (Doubled(3, 2), Scaled(3, 2), Needy((3, 2)), nn.LayerNorm(3), nn.ReLU()):
        assert not is_linear(module)


class Wide(nn.LayerNorm):
    """As open_clip has it."""

    def forward(self, input: Tensor) -> Tensor:
        wide = functional.layer_norm(
            input.float(), self.normalized_shape, self.weight, self.bias, self.eps
        )
        return wide.to(input.dtype)


class OneMore(nn.LayerNorm):
    """As Nemotron has it."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.layer_norm(
            input, self.normalized_shape, self.weight + 1, self.bias, self.eps
        )


class Other(nn.LayerNorm):
    def __init__(self, *, width: int) -> None:
        super().__init__(width)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


def test_layer_norm_is_one_unless_it_computes_something_else():
    for module in (nn.LayerNorm(3), Wide(3), Other(width=3)):
        assert is_layer_norm(module)
    assert not is_layer_norm(OneMore(3))
    assert not is_layer_norm(nn.Linear(3, 3))
