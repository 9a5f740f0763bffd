"""A chain of linear blocks: every module receives what its block does, in every model."""

import torch
from tiny_models import Suite, batched, normal, suite_of
from torch import Tensor, nn


class Chain(nn.Module):
    """Blocks of one linear module each: its input is the block's input, in every model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def chain_suite() -> Suite:
    torch.manual_seed(0)
    inputs: dict[str, list] = {
        f"task_{i}": batched((1 + i) * normal(i, 40, 5), (25, 15)) for i in range(3)
    }
    return suite_of(Chain(), inputs, ["layers.0", "layers.1", "layers.2"], 0)
