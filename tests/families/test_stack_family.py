"""Models with one list of blocks are recognised by their structure."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_types import ROWS, Row
from omegaconf import OmegaConf
from test_families import assert_untouched, stepped
from tiny_models import sentences, t5_model, without_labels
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForTokenClassification,
)

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.families import STACK, check_family, resolve_family
from fusion_bench_featcal.families.structure import find_stack, suggested_families


class Net(nn.Module):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def stack(number: int, width: int = 3) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(width, width) for _ in range(number))


def row(name: str) -> Row:
    return next(row for row in ROWS if row.name == name)


def made(name: str) -> tuple[nn.Module, Any]:
    """A model in float64 and its first batch."""
    torch.manual_seed(0)
    result = row(name).make()
    assert result is not None
    model, inputs = result
    return model.double().eval(), inputs["task_0"][0]


def test_list_that_is_clearly_the_largest_holds_the_blocks():
    assert find_stack(Net(body=Net(h=nn.Sequential(*stack(3))), few=stack(1, 9))) == "body.h"
    assert find_stack(Net(layers=stack(2, 9), others=stack(2, 2))) == "layers"
    assert find_stack(Net(layers=stack(2, 9), others=stack(2, 8))) is None
    mixed = nn.ModuleList([nn.Linear(3, 3), nn.LayerNorm(3)])
    assert find_stack(Net(layers=mixed)) is None
    nested = nn.ModuleList(Net(inner=stack(2)) for _ in range(2))
    assert find_stack(Net(layers=nested)) == "layers"
    assert find_stack(Net(empty=nn.ModuleList([nn.GELU(), nn.GELU()]))) is None
    assert find_stack(t5_model()) is None


def test_several_lists_are_suggested_for_replay_by_size():
    assert suggested_families(Net(layers=stack(2), others=stack(5, 4))) == [
        "{name: replay, blocks: [others.*]}",
        "{name: replay, blocks: [layers.*]}",
    ]
    assert suggested_families(Net(one=nn.Linear(2, 2))) == []
    both: Any = Net(encoder=Net(layers=stack(2)), decoder=Net(layers=stack(3)))
    both.config = SimpleNamespace(is_encoder_decoder=True)
    (family,) = suggested_families(both)
    assert "blocks: [[encoder.layers.*], [decoder.layers.*]]" in family
    assert "mask: [attention_mask, decoder_attention_mask]" in family
    check_family(OmegaConf.to_container(OmegaConf.create(f"family: {family}"))["family"])  # type: ignore[index, call-overload]


@pytest.mark.parametrize("model", [t5_model(), Net(one=nn.Linear(2, 2))])
def test_stack_is_refused_where_there_is_none(model: nn.Module):
    with pytest.raises(
        CalibrationError, match=r"method\.family=stack: .* no list of modules .*rep"
    ):
        resolve_family("stack", model)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # transformers' own modules
@pytest.mark.parametrize(
    "name",
    [
        "gpt2",  # arguments without names, a tuple of results
        "bloom",  # alibi
        "gpt_neox",  # a cache under another name
        "distilbert",  # a tuple of one result
        "deberta-v2",  # two results, unpacked
        "cohere2",  # two masks in turn
        "beit",
    ],
)
def test_blocks_run_one_by_one_are_those_of_the_models_own_pass(name: str):
    model, inputs = made(name)
    family = resolve_family("auto", model)
    assert family == resolve_family("stack", model) == resolve_family({"name": "stack"}, model)
    blocks = family.stages(model)[0]
    replay = resolve_family({"name": "replay", "blocks": blocks}, model)
    found, wanted = stepped(family, model, inputs), stepped(replay, model, inputs)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))
    assert not torch.equal(found[0], found[1])
    assert type(found[0]) is Tensor
    assert_untouched(model)


def test_labels_of_encoders_choose_no_positions():
    config = AutoConfig.for_model(
        "bert", hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8,
        vocab_size=30,
    )  # fmt: skip
    inputs = sentences([3, 5], 6)
    for kind in (AutoModelForMaskedLM, AutoModelForTokenClassification):
        family = resolve_family("auto", kind.from_config(config))
        for rows in ("all", "targets"):
            assert family.row_weights(inputs, 0, rows) is inputs["attention_mask"]
    for model in (made("gpt2")[0], AutoModel.from_config(config)):
        counted = resolve_family("auto", model).row_weights(inputs, 0, "targets")
        assert counted is not None and not torch.equal(counted, inputs["attention_mask"])


def test_features_without_padding_do_not_fit_their_mask():
    class Unpads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layers = nn.Embedding(30, 4), stack(2, 4)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            hidden = self.embed(input_ids)[attention_mask > 0]
            for layer in self.layers:
                hidden = layer(hidden)
            return hidden

    with pytest.raises(CalibrationError, match=r"layers\.0 of Unpads.*\(8, 4\).*\(2, 6\).*sdpa"):
        STACK.begin(Unpads(), without_labels(sentences([3, 5], 6)), "layers.0")
