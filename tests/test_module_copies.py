"""Models whose forward was set on the instance: copies run their own weights."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from variations import wrapped

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.experts import hollow_copy
from fusion_bench_featcal.module_copies import bind_own_functions, copied_module

X = torch.arange(6.0).view(2, 3)


def net() -> Any:
    """Two linear maps, of which the second is wrapped twice, and a forward that adds the first."""
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), wrapped(wrapped(nn.Linear(3, 2))))
    whole, first = model.forward, model[0]
    model.forward = lambda x: whole(x) + first(x).sum()
    return model


@pytest.mark.parametrize(
    "copied", [copied_module, lambda model: bind_own_functions(copy.deepcopy(model))]
)
def test_copy_runs_its_own_weights(copied: Any) -> None:
    model = wrapped(nn.Linear(3, 2))
    before, made = model(X), copied(model)
    nn.init.zeros_(made.weight)
    torch.testing.assert_close(made(X), made.bias.expand(2, 2))
    assert torch.equal(model(X), before)
    assert hollow_copy(model)(X.to("meta")).device.type == "meta"


def test_functions_inside_functions_and_of_parts_are_bound() -> None:
    made = copied_module(net())
    for parameter in made.parameters():
        parameter.data.mul_(2)
    plain = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    plain.load_state_dict(made.state_dict())
    torch.testing.assert_close(made(X), plain(X) + plain[0](X).sum())


def test_copies_by_others_are_bound_or_refused_and_originals_stay() -> None:
    message = r"Sequential\.forward .* runs a Linear of another model; this one has 2"
    with pytest.raises(CalibrationError, match=message):
        bind_own_functions(copy.deepcopy(net()))
    model = wrapped(nn.Linear(3, 2))
    model.describe = lambda: "a linear map"
    before = dict(vars(model))
    assert bind_own_functions(model) is model
    assert vars(model) == before
