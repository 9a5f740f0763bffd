"""Experts that are stored in one tensor are shown as modules, and put together again."""

from typing import Any

import pytest
import torch
from calibrations import replay
from model_types import MIXTURES, Row
from moe_oracle import find_mixture
from test_families import stepped
from tiny_models import decoder_model
from torch import Tensor, nn

from fusion_bench_featcal import InMemoryExpert
from fusion_bench_featcal.families import STACK, resolve_family
from fusion_bench_featcal.families.base import MIXTURES as VIEW


@pytest.mark.parametrize("row", MIXTURES, ids=lambda row: row.name)
def test_blocks_are_those_of_the_models_own_pass(row: Row):
    suite = row.suite()
    assert suite is not None
    model, inputs = suite.merged, suite.inputs["task_0"][0]
    shown = VIEW.shown(model)
    own = stepped(resolve_family(replay(suite), model), model, inputs)
    found = stepped(STACK, shown, inputs)
    for ours, theirs in zip(found, own, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    mixture = shown.get_submodule(find_mixture(shown, suite.blocks[0]))
    assert isinstance(mixture.experts, nn.ModuleList)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    restored = VIEW.restored(shown)
    assert type(restored) is type(model) and list(restored.state_dict()) == list(before)
    assert all(torch.equal(restored.state_dict()[name], value) for name, value in before.items())


def test_dense_models_are_shown_as_they_are():
    model = decoder_model("llama")
    source = InMemoryExpert(model)
    assert VIEW.shown(model) is model and VIEW.source(source) is source
    assert VIEW.restored(model) is model


class Fused(nn.Module):
    """Experts in one tensor, as transformers 5 stores them; `swapped` ones compute otherwise."""

    def __init__(self, *, swapped: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 10, 4))
        self.down_proj = nn.Parameter(torch.randn(3, 4, 5))
        self.act_fn, self.swapped = nn.SiLU(), swapped

    def forward(self, hidden: Tensor, places: Tensor, shares: Tensor) -> Tensor:
        total = torch.zeros_like(hidden)
        for row, number in ((r, n) for r in range(len(hidden)) for n in range(3)):
            gate, up = (self.gate_up_proj[number] @ hidden[row]).chunk(2)
            inner = self.act_fn(up) * gate if self.swapped else self.act_fn(gate) * up
            share = shares[row][places[row] == number].sum()
            total[row] += share * (self.down_proj[number] @ inner)
        return total


def test_experts_in_one_tensor_are_taken_apart_if_that_computes_the_same():
    fused = Fused()
    model = nn.Sequential(fused)
    split: Any = VIEW.shown(model).get_submodule("0")
    assert isinstance(split, nn.ModuleList) and model[0] is fused
    down = split.get_submodule("2").get_parameter("down_proj.weight")
    assert down.data_ptr() == fused.down_proj[2].data_ptr()  # nothing is copied
    hidden, places = torch.randn(6, 4), torch.tensor([[0, 2], [1, 0], [2, 1]] * 2)
    shares = torch.rand(6, 2)
    torch.testing.assert_close(split(hidden, places, shares), fused(hidden, places, shares))
    other = nn.Sequential(Fused(swapped=True))
    assert VIEW.shown(other) is other


@pytest.mark.parametrize(("name", "stored"), [("2.up_proj", "gate_up"), ("0.down_proj", "down")])
def test_slices_of_a_source_are_the_experts_matrices(name: str, stored: str):
    model = nn.Sequential(Fused())
    source, shown = VIEW.source(InMemoryExpert(model)), VIEW.shown(model).state_dict()
    assert source.names() >= set(shown)
    key = f"0.{name}.weight"
    assert torch.equal(source.tensor(key), shown[key])
    assert source.shape(key) == tuple(shown[key].shape)
    assert source.nbytes(key) == shown[key].nbytes
    assert source.nbytes(f"0.{stored}_proj") == getattr(model[0], f"{stored}_proj").nbytes
