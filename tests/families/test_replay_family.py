"""The family for any model: blocks by pattern, run inside the model's forward pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import ResidualNet, normal, sentences
from torch import Tensor, nn

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.families import ReplayFamily, resolve_family


def replayed(model: nn.Module, inputs: Any, patterns: list[str]) -> list[Tensor]:
    family = ReplayFamily(blocks=patterns)
    (blocks,) = family.stages(model)
    call = family.begin(model, inputs, blocks[0])
    outputs = []
    with torch.no_grad():
        for block in blocks:
            hidden, call = family.step(model, block, call)
            outputs.append(hidden)
    return outputs


def test_plain_tensors_run_through_a_module_list():
    model, x = ResidualNet(depth=11).double().eval(), normal(0, 5, 4)
    outputs = replayed(model, x, ["layers.*"])
    with torch.no_grad():
        hidden = model.embed(x)
        for layer, ours in zip(model.layers, outputs, strict=True):
            hidden = layer(hidden)
            assert torch.equal(ours, hidden)


TWO_STAGES: dict[str, Any] = {
    "blocks": [["encoder.*"], ["decoder.0", "decoder.1"]],
    "mask": ["attention_mask", "labels"],
    "other_masks": {"cross.k": "attention_mask", "cross.v": None},
}


def test_stages_have_their_own_blocks_and_masks():
    halves = {h: nn.ModuleList([nn.Linear(2, 2) for _ in range(2)]) for h in ("encoder", "decoder")}
    model = nn.ModuleDict(halves)
    family = ReplayFamily(**TWO_STAGES)
    assert family.stages(model) == [["encoder.0", "encoder.1"], ["decoder.0", "decoder.1"]]
    inputs = sentences([2, 4], 5) | {"labels": torch.tensor([[3, -100], [0, 5]])}
    assert family.row_weights(inputs, 0, "all") is inputs["attention_mask"]
    labelled = family.row_weights(inputs, 1, "all")
    assert labelled is not None and labelled.tolist() == [[1, 0], [1, 1]]
    cross = family.other_rows(inputs, 1)
    assert cross["cross.k"] is inputs["attention_mask"] and cross["cross.v"] is None
    everything = ReplayFamily(blocks=TWO_STAGES["blocks"], mask=[None, "labels"])
    assert everything.row_weights(inputs, 0, "all") is None


REPLAY: dict[str, Any] = {"name": "replay", "blocks": ["a"]}
FAMILIES: list[tuple[Any, str]] = [
    ("clop", r"method\.family.*clip.*replay.*'clop'"),
    ({"_target_": "nowhere.Mine"}, r"_target_ 'nowhere\.Mine' cannot be imported"),
    ({"_target_": "collections.Counter"}, r"Counter made Counter\(\), which is no Family"),
    ({"_target_": "fusion_bench_featcal.ReplayFamily", "block": 1},
     r"method\.family: fusion_bench_featcal\.ReplayFamily: .*'block'"),
    ({"blocks": ["a"]}, r"method\.family: \{'blocks': \['a'\]\} lacks the family's name"),
    (ReplayFamily, r"method\.family is the class ReplayFamily: give an object of it"),
    ({"name": "replay"}, r"method\.family.*blocks"),
    (REPLAY | {"blocks": "layers.*"}, r"method\.family\.blocks must be a list"),
    (REPLAY | {"block": 1}, r"method\.family.*block"),
    (REPLAY | {"blocks": [["a"], [3]]}, r"method\.family\.blocks"),
    (REPLAY | {"blocks": [["a"], ["b"]], "mask": "attention_mask"},
     r"method\.family\.mask.*2 stages.*'attention_mask'"),
    (REPLAY | {"mask": ["m", "n"]}, r"method\.family\.mask"),
    (REPLAY | {"other_masks": ["k"]}, r"method\.family\.other_masks"),
    (3, r"method\.family.*3"),
]  # fmt: skip


class Ordered(nn.Module):
    """Residual blocks that run in any order."""

    def __init__(self, *order: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.layers[index](x)
        return x


class Odd(nn.Module):
    def forward(self, x: Tensor) -> list:
        return [None, x]


def step(model: nn.Module, *blocks: str) -> Callable[[], Any]:
    return lambda: replayed(model, torch.ones(2, 4), list(blocks))


def rows(stage: int, inputs: Any, **family: Any) -> Callable[[], Any]:
    settings: dict[str, Any] = {"blocks": ["h.*"]} | family
    return lambda: ReplayFamily(**settings).row_weights(inputs, stage, "all")


MASK = {"attention_mask": torch.ones(2, 2)}
LABELS = {"labels": torch.zeros(2, 2)}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *((lambda f=family: resolve_family(f, ResidualNet()), m) for family, m in FAMILIES),
        *((step(ResidualNet(), "layers.*", pattern), r"family\.blocks.*no module.*Residual")
          for pattern in ("layer.*", "*.0.nothing")),
        # the list of blocks is a module too, but nothing calls it
        (step(ResidualNet(), "layers"), r"method\.family\.blocks.*layers"),
        (step(Ordered(2, 1, 0), "layers.*"), r"layers\.0.*layers\.2.*once, in this order"),
        (step(Ordered(0, 0, 1), "layers.0", "layers.1"), "once, in this order"),
        (step(nn.Sequential(Odd()), "0"), "hidden features"),
        (rows(0, MASK, mask="other"), r"method\.family\.mask.*'other'.*attention_mask"),
        (rows(0, LABELS, **TWO_STAGES), r"method\.family\.mask.*no 'attention_mask'"),
        (lambda: ReplayFamily(**TWO_STAGES).other_rows(LABELS, 0),
         r"method\.family\.other_masks.*attention_mask"),
        (lambda: ReplayFamily(blocks=["h.*"]).row_weights(MASK, 0, "targets"),
         r"method\.decoder_rows=targets.*labels"),
    ],
)  # fmt: skip
def test_families_models_and_masks_that_do_not_fit_are_refused(call, message):
    with pytest.raises((CalibrationError, TypeError, ValueError), match=message):
        call()
