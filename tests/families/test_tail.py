"""Linear modules behind the blocks, calibrated after them, against the oracle."""

from dataclasses import replace
from typing import Any

import pytest
import tiny_models as tiny
import torch
from calibrations import PLUS, assert_identical, assert_same, run_fast, run_slow
from oracle import Knobs
from plus_slow import trained
from torch import Tensor, nn
from tricky_models import Block, linear

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.families import Stack

TAIL = ["first", "second", "aside"]
MERGED_ANCHOR: Any = {"knobs": Knobs(rho=1.0)}  # as without a base


class Headed(nn.Module):
    """Blocks, a norm, and a head whose last map receives what the first one does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.layers = nn.ModuleList(
            Block(lambda b, x: x + b.only(x).tanh(), {"only": linear()}) for _ in range(2)
        )
        self.norm, self.second, self.aside = nn.LayerNorm(4), nn.Linear(6, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        pooled = self.norm(x[:, 0])  # one vector per sample
        hidden = self.second(self.first(pooled).tanh())
        return hidden + self.aside(pooled)


def headed(tail: list[str] | None = None) -> tiny.Suite:
    torch.manual_seed(0)
    blocks, tail = ["layers.0", "layers.1"], TAIL if tail is None else tail
    suite = tiny.suite_of(Headed(), tiny.samples_by_task(2, (9, 6), 5, 4), [*blocks, *tail], 1)
    return replace(suite, family=Stack(blocks, tail=tail))


def test_the_tail_is_solved_as_the_oracle_solves_it():
    suite = headed()
    result, expected = run_fast(suite, **MERGED_ANCHOR), run_slow(suite, **MERGED_ANCHOR)
    assert_same(result.model, expected.model)
    for (block, task), drift in expected.drift.items():
        records = result.log.select("task")
        (record,) = (r for r in records if (r["block"], r["task"]) == (block, task))
        assert [record["drift"], record["relative_drift"]] == pytest.approx(drift, rel=1e-9)


@pytest.mark.parametrize("rule", [{}, PLUS])
def test_the_tail_uses_samples_alone_and_leaves_blocks_as_they_are(rule: dict[str, Any]):
    """A base may have begun with another head."""
    experts = trained(headed([])).experts  # whose blocks fit their samples
    suite, other = (replace(headed(), experts=experts) for _ in range(2))
    without = run_fast(replace(headed([]), merged=suite.merged, experts=experts), **rule).model
    for name in TAIL:
        other.base.get_parameter(f"{name}.weight").data.normal_()
    results = [run_fast(one, **rule).model for one in (suite, other)]
    assert_identical(*results)
    for name, tensor in without.state_dict().items():
        same = torch.equal(tensor, results[0].state_dict()[name])
        assert same is not name.startswith(tuple(TAIL)), name


def test_a_tail_in_another_order_is_refused():
    with pytest.raises(CalibrationError, match=r"it runs .*'first', 'second'.*'second', 'first'"):
        run_fast(headed(["second", "first"]))
