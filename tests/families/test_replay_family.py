"""The family for any model: blocks by pattern, run inside the model's forward pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import ResidualNet
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


REPLAY: dict[str, Any] = {"name": "replay", "blocks": ["a"]}
FAMILIES: list[tuple[Any, str]] = [
    ("clop", r"method\.family.*clip.*replay.*'clop'"),
    ({"_target_": "nowhere.Mine"}, r"_target_ 'nowhere\.Mine' cannot be imported"),
    ({"_target_": "fusion_bench_featcal.ReplayFamily", "block": 1},
     r"method\.family: fusion_bench_featcal\.ReplayFamily: .*'block'"),
    ({"blocks": ["a"]}, r"method\.family: \{'blocks': \['a'\]\} lacks the family's name"),
    (ReplayFamily, r"method\.family is the class ReplayFamily: give an object of it"),
    (REPLAY | {"blocks": "layers.*"}, r"method\.family\.blocks must be a list"),
    (REPLAY | {"block": 1}, r"method\.family.*block"),
    (REPLAY | {"blocks": [["a"], ["b"]], "mask": "attention_mask"},
     r"method\.family\.mask.*2 stages.*'attention_mask'"),
    (REPLAY | {"other_masks": ["k"]}, r"method\.family\.other_masks"),
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


class Nested(nn.Module):
    """A block without features in the place where they are expected."""

    def forward(self, x: Tensor) -> list:
        return [None, x]


def step(model: nn.Module, *blocks: str) -> Callable[[], Any]:
    return lambda: replayed(model, torch.ones(2, 4), list(blocks))


MASK = {"attention_mask": torch.ones(2, 2)}
LABELS = {"labels": torch.zeros(2, 2)}
MASKS: Any = {"cross.k": "attention_mask"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *((lambda f=family: resolve_family(f, ResidualNet()), m) for family, m in FAMILIES),
        (step(ResidualNet(), "layers.*", "layer.*"), r"family\.blocks.*no module.*Residual"),
        # the list of blocks is a module too, but nothing calls it
        (step(ResidualNet(), "layers"), r"method\.family\.blocks.*layers"),
        (step(Ordered(2, 1, 0), "layers.*"), r"layers\.0.*layers\.2.*once, in this order"),
        (step(Ordered(0, 0, 1), "layers.0", "layers.1"), "once, in this order"),
        (step(nn.Sequential(Nested()), "0"), "hidden features"),
        (lambda: ReplayFamily(blocks=["h.*"], mask="other").row_weights(MASK, 0, "all"),
         r"method\.family\.mask.*'other'.*attention_mask"),
        (lambda: ReplayFamily(["h.*"], other_masks=MASKS).other_rows(LABELS, 0),
         r"method\.family\.other_masks.*attention_mask"),
        (lambda: ReplayFamily(blocks=["h.*"]).row_weights(MASK, 0, "targets"),
         r"method\.decoder_rows=targets.*labels"),
    ],
)  # fmt: skip
def test_families_models_and_masks_that_do_not_fit_are_refused(call, message):
    with pytest.raises((CalibrationError, TypeError, ValueError), match=message):
        call()
