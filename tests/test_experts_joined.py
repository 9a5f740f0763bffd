"""Experts of mixtures that files hold one by one and models in one tensor."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusion_bench_featcal import InMemoryExpert
from fusion_bench_featcal.experts.expert_model import fitted_to

WORDS = {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "qwen": ("mlp", *("gate_proj", "up_proj", "down_proj")),
}
SHAPES = {"gate": (5, 4), "up": (5, 4), "down": (4, 5)}
FUSED = ["layers.0.mlp.experts.gate_up_proj", "layers.0.mlp.experts.down_proj"]


class Stored(InMemoryExpert):
    """A source of tensors that no module has."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__(nn.Identity())
        self._tensors = tensors


def stored(kind: str) -> dict[str, Tensor]:
    owner, *leaves = WORDS[kind]
    matrices = {
        f"layers.0.{owner}.experts.{number}.{leaf}.weight": torch.randn(shape)
        for number in range(3)
        for leaf, shape in zip(leaves, SHAPES.values(), strict=True)
    }
    return matrices | {
        f"layers.0.{owner}.gate.weight": torch.randn(3, 4),
        "norm.weight": torch.ones(4),
    }


@pytest.mark.parametrize("kind", WORDS)
def test_matrices_are_joined_as_the_model_has_them(kind: str):
    tensors = stored(kind)
    source: Any = fitted_to(FUSED, Stored(tensors))
    assert source.names() == {*FUSED, "layers.0.mlp.gate.weight", "norm.weight"}
    owner, gate, up, down = WORDS[kind]
    for number in range(3):
        of_expert = {
            leaf: tensors[f"layers.0.{owner}.experts.{number}.{leaf}.weight"]
            for leaf in (gate, up, down)
        }
        both = torch.cat([of_expert[gate], of_expert[up]])
        assert torch.equal(source.tensor(FUSED[0])[number], both)
        assert torch.equal(source.tensor(FUSED[1])[number], of_expert[down])
    assert torch.equal(source.rows(FUSED[0], 1, 2), source.tensor(FUSED[0])[1:2])
    for name in source.names():
        assert source.shape(name) == tuple(source.tensor(name).shape)
        assert source.nbytes(name) == source.tensor(name).nbytes
