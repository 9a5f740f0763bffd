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


def doubled(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model


X = torch.arange(6.0).view(2, 3)


def test_deepcopy_alone_runs_the_original() -> None:
    model = wrapped(nn.Linear(3, 2))
    assert torch.equal(doubled(copy.deepcopy(model))(X), model(X))


@pytest.mark.parametrize(
    "copied", [copied_module, lambda model: bind_own_functions(copy.deepcopy(model))]
)
def test_copy_runs_its_own_weights(copied: Any) -> None:
    model = wrapped(nn.Linear(3, 2))
    expected = model(X)
    made = doubled(copied(model))
    torch.testing.assert_close(made(X), 2 * expected)
    assert torch.equal(model(X), expected)


def net() -> Any:
    """Two linear maps, of which the second is wrapped twice, and a forward that adds the first."""
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), wrapped(wrapped(nn.Linear(3, 2))))
    whole, first = model.forward, model[0]
    model.forward = lambda x: whole(x) + first(x).sum()
    return model


def test_functions_inside_functions_and_of_parts_are_bound() -> None:
    made = doubled(copied_module(net()))
    plain = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    plain.load_state_dict(made.state_dict())
    torch.testing.assert_close(made(X), plain(X) + plain[0](X).sum())


def test_copy_by_others_whose_parts_cannot_be_told_apart_is_refused() -> None:
    message = r"Sequential\.forward .* runs a Linear of another model; this one has 2"
    with pytest.raises(CalibrationError, match=message):
        bind_own_functions(copy.deepcopy(net()))


def test_functions_of_the_model_itself_and_of_nothing_stay() -> None:
    model = wrapped(nn.Linear(3, 2))
    model.describe = lambda: "a linear map"
    before = dict(vars(model))
    assert bind_own_functions(model) is model
    assert vars(model) == before


def test_empty_copy_runs_what_is_loaded_into_it() -> None:
    hollow = hollow_copy(wrapped(nn.Linear(3, 2)))
    assert hollow(X.to("meta")).device.type == "meta"
