"""The family for any model: blocks by pattern, run inside the model's forward pass."""

from typing import Any

import pytest
import torch
from tiny_models import ResidualNet
from torch import Tensor, nn

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.families import ReplayFamily, resolve_family

REPLAY: dict[str, Any] = {"name": "replay", "blocks": ["a"]}
FAMILIES: list[tuple[Any, str]] = [
    ("clop", r"method\.family.*clip.*replay.*'clop'"),
    ({"_target_": "nowhere.Mine"}, r"_target_ 'nowhere\.Mine' cannot be imported"),
    ({"_target_": "fusion_bench_featcal.ReplayFamily", "block": 1},
     r"method\.family: fusion_bench_featcal\.ReplayFamily: .*'block'"),
    ({"blocks": ["a"]}, r"method\.family: \{'blocks': \['a'\]\} lacks the family's name"),
    (REPLAY | {"blocks": "layers.*"}, r"method\.family\.blocks must be a list"),
    (REPLAY | {"blocks": [["a"], ["b"]], "mask": "attention_mask"},
     r"method\.family\.mask.*2 stages.*'attention_mask'"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "message"), FAMILIES)
def test_families_that_cannot_be_made_are_refused(family, message):
    with pytest.raises((CalibrationError, TypeError, ValueError), match=message):
        resolve_family(family, ResidualNet())


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


class Nested(nn.Module):
    """A block without features in the place where they are expected."""

    def forward(self, x: Tensor) -> list:
        return [None, x]


@pytest.mark.parametrize(
    ("model", "blocks", "message"),
    [
        (ResidualNet(), ["layers.*", "layer.*"], r"family\.blocks.*no module.*Residual"),
        # the list of blocks is a module too, but nothing calls it
        (ResidualNet(), ["layers"], r"method\.family\.blocks.*layers"),
        (Ordered(2, 1, 0), ["layers.*"], r"layers\.0.*layers\.2.*once, in this order"),
        (Ordered(0, 0, 1), ["layers.0", "layers.1"], "once, in this order"),
        (nn.Sequential(Nested()), ["0"], "hidden features"),
    ],
)
def test_blocks_that_cannot_be_replayed_are_refused(model, blocks, message):
    family = ReplayFamily(blocks=blocks)
    with pytest.raises((CalibrationError, TypeError), match=message):
        (names,) = family.stages(model)
        call = family.begin(model, torch.ones(2, 4), names[0])
        for name in names:
            _, call = family.step(model, name, call)


def test_masks_that_are_no_inputs_are_named():
    mask, labels = {"attention_mask": torch.ones(2, 2)}, {"labels": torch.zeros(2, 2)}
    with pytest.raises(CalibrationError, match=r"method\.family\.mask.*'other'.*attention_mask"):
        ReplayFamily(blocks=["h.*"], mask="other").row_weights(mask, 0, "all")
    family = ReplayFamily(blocks=["h.*"], other_masks={"cross.k": "attention_mask"})
    with pytest.raises(CalibrationError, match=r"method\.family\.other_masks.*attention_mask"):
        family.other_rows(labels, 0)
