"""Models with one list of blocks are recognised by their structure."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_types import ROWS, Row
from omegaconf import OmegaConf
from test_families import assert_untouched, stepped
from tiny_models import ResidualNet, decoder_model, normal, sentences, t5_model, without_labels
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForTokenClassification,
)

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.families import STACK, StackFamily, check_family, resolve_family
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


def test_no_cache_reaches_a_block():
    for name in ("gpt2", "gpt_neox", "falcon"):
        model, inputs = made(name)
        call: Any = STACK.begin(model, inputs | {"use_cache": True}, STACK.stages(model)[0][0])
        for block in STACK.stages(model)[0]:
            arguments = [*call.args[block], *call.kwargs[block].values()]
            assert not any("Cache" in type(value).__name__ for value in arguments)
            assert not call.kwargs[block].get("use_cache")


def test_plain_modules_are_a_stack():
    model, x = ResidualNet(depth=3).double().eval(), normal(0, 5, 4)
    family = resolve_family("auto", model)
    assert family.stages(model) == [["layers.0", "layers.1", "layers.2"]]
    hidden = model.embed(x)
    for layer, found in zip(model.layers, stepped(family, model, x), strict=True):
        hidden = layer(hidden)
        assert torch.equal(found, hidden)


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


def test_passes_end_early_only_in_blocks_without_a_choice_of_modules():
    def net(**parts: nn.Module) -> nn.Module:
        return Net(layers=nn.ModuleList(Net(one=nn.Linear(3, 3), **parts) for _ in range(2)))

    assert StackFamily().fitted(net()).same_calls
    assert not StackFamily().fitted(net(experts=stack(2))).same_calls


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


def test_blocks_that_are_left_out_are_refused():
    class Skips(ResidualNet):
        def forward(self, x: Tensor) -> Tensor:
            return self.layers[2](self.layers[0](self.embed(x)))

    with pytest.raises(CalibrationError, match=r"Skips runs the blocks \['layers\.0', 'layers\.2'"):
        STACK.begin(Skips(), normal(0, 5, 4).float(), "layers.0")


def test_known_types_need_no_comparison():
    assert not resolve_family("auto", decoder_model("llama")).compared
    assert resolve_family("auto", made("gpt2")[0]).compared
