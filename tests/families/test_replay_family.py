"""The family for any model: blocks by pattern, run inside the model's own forward pass."""

from typing import Any

import pytest
import torch
from tiny_models import ResidualNet, clip_model, gpt2_suite, normal, text_inputs
from torch import Tensor, nn

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.families import CLIP, ReplayFamily, resolve_family


def replayed(model: nn.Module, inputs: Any, patterns: list[str]) -> list[Tensor]:
    family = ReplayFamily(blocks=patterns)
    (blocks,) = family.stages(model)
    call = family.begin(model, inputs, blocks[0])
    found = []
    with torch.no_grad():
        for block in blocks:
            hidden, call = family.step(model, block, call)
            found.append(hidden)
    return found


def test_plain_tensors_run_through_a_module_list():
    model, x = ResidualNet().double().eval(), normal(0, 5, 4)
    found = replayed(model, x, ["layers.*"])
    with torch.no_grad():
        hidden = model.embed(x)
        for layer, ours in zip(model.layers, found, strict=True):
            hidden = layer(hidden)
            assert torch.equal(ours, hidden)


@pytest.mark.parametrize("patterns", [["h.*"], ["h.0", "h.1"], ["h.[01]"]], ids=str)
def test_gpt2_blocks_are_the_hidden_states_that_transformers_reports(patterns: list[str]):
    suite = gpt2_suite()
    inputs = suite.inputs["task_0"][0]
    with torch.no_grad():
        reported = suite.base(**inputs, output_hidden_states=True).hidden_states
    found = replayed(suite.base, inputs, patterns)
    assert len(found) == 2
    torch.testing.assert_close(found[0], reported[1], rtol=0, atol=0)
    final = suite.base.get_submodule("ln_f")(found[1])  # the last one is reported after ln_f
    torch.testing.assert_close(final.detach(), reported[2], rtol=0, atol=1e-12)


def test_tuple_of_arguments_is_passed_on_in_order():
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 3)])

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return self.layers[0](x * scale)

    model, x, scale = Weighted(), torch.ones(2, 3), torch.full((2, 1), 3.0)
    (found,) = replayed(model, (x, scale), ["layers.0"])
    assert torch.equal(found, model(x, scale))


def test_mask_counts_positions_and_can_have_another_name():
    inputs = text_inputs([2, 4], 5, seed=0)
    assert ReplayFamily(blocks=["h.*"]).row_weights(inputs, 0, "all") is inputs["attention_mask"]
    with pytest.raises(CalibrationError, match=r"method\.family\.mask.*'other'.*attention_mask"):
        ReplayFamily(blocks=["h.*"], mask="other").row_weights(inputs, 0, "all")
    renamed = {"other": inputs["attention_mask"]}
    assert ReplayFamily(blocks=["h.*"], mask="other").row_weights(renamed, 0, "all") is not None
    assert ReplayFamily(blocks=["h.*"]).row_weights(torch.ones(2, 3), 0, "all") is None


def test_mask_that_cannot_tell_padding_is_refused():
    inputs = {"attention_mask": torch.ones(2, 1, 5, 5)}
    with pytest.raises(CalibrationError, match=r"attention_mask.*\(2, 1, 5, 5\)"):
        ReplayFamily(blocks=["h.*"]).row_weights(inputs, 0, "all")


def test_pattern_names_whole_parts_only():
    model = ResidualNet(depth=11)
    (blocks,) = ReplayFamily(blocks=["layers.*"]).stages(model)
    assert blocks == [f"layers.{index}" for index in range(11)]


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
    inputs = text_inputs([2, 4], 5, seed=0) | {"labels": torch.tensor([[3, -100], [0, 5]])}
    assert family.row_weights(inputs, 0, "all") is inputs["attention_mask"]
    labelled = family.row_weights(inputs, 1, "all")
    assert labelled is not None
    assert labelled.tolist() == [[1, 0], [1, 1]]
    fed = family.other_rows(inputs, 1)
    assert fed["cross.k"] is inputs["attention_mask"]
    assert fed["cross.v"] is None
    everything = ReplayFamily(blocks=TWO_STAGES["blocks"], mask=[None, "labels"])
    assert everything.row_weights(inputs, 0, "all") is None


@pytest.mark.parametrize("gone", ["attention_mask", "labels"])
def test_mask_of_a_stage_that_is_missing_is_refused(gone: str):
    inputs = text_inputs([2, 4], 5, seed=0) | {"labels": torch.zeros(2, 2)}
    del inputs[gone]
    family = ReplayFamily(**TWO_STAGES)
    with pytest.raises(CalibrationError, match=rf"method\.family\.mask.*no '{gone}'"):
        for stage in (0, 1):
            family.row_weights(inputs, stage, "all")
    if gone == "attention_mask":
        with pytest.raises(CalibrationError, match=r"method\.family\.other_masks.*attention_mask"):
            family.other_rows(inputs, 0)


def test_targets_are_the_positions_before_a_label():
    inputs = text_inputs([3, 5], 5, seed=0)
    family = ReplayFamily(blocks=["h.*"])
    with pytest.raises(CalibrationError, match=r"method\.decoder_rows=targets.*labels"):
        family.row_weights(inputs, 0, "targets")
    labels = [[4, -100, 7, -100, 6], [-100, -100, -100, 8, 9]]
    inputs["labels"] = torch.tensor(labels)
    found = family.row_weights(inputs, 0, "targets")
    assert found is not None
    # the last label of the first sentence follows padding, which predicts nothing
    assert found.tolist() == [[0, 1, 0, 0, 0], [0, 0, 1, 1, 0]]
    del inputs["attention_mask"]
    found = family.row_weights(inputs, 0, "targets")
    assert found is not None
    assert found.tolist() == [[0, 1, 0, 1, 0], [0, 0, 1, 1, 0]]


@pytest.mark.parametrize("pattern", ["layer.*", "layers.*.*.x", "*.0.nothing"])
def test_pattern_that_matches_nothing_is_refused(pattern: str):
    with pytest.raises(CalibrationError, match=r"method\.family\.blocks.*no module.*ResidualNet"):
        ReplayFamily(blocks=["layers.*", pattern]).stages(ResidualNet())


def test_block_that_never_runs_is_refused():
    # the list of blocks is a module too, but nothing calls it
    with pytest.raises(CalibrationError, match=r"method\.family\.blocks.*layers"):
        ReplayFamily(blocks=["layers"]).step(ResidualNet(), "layers", torch.ones(2, 4))


def test_blocks_that_run_in_another_order_are_refused():
    class Backwards(ResidualNet):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.embed(x)
            for layer in reversed(list(self.layers)):
                hidden = layer(hidden)
            return self.head(hidden)

    family, x = ReplayFamily(blocks=["layers.*"]), torch.ones(2, 4)
    with pytest.raises(CalibrationError, match=r"layers\.0.*layers\.2.*once, in this order"):
        family.step(Backwards(), "layers.0", x)


def test_block_that_runs_twice_is_refused():
    class Looped(ResidualNet):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.embed(x)
            for layer in [self.layers[0], self.layers[0], self.layers[1]]:
                hidden = layer(hidden)
            return hidden

    family, x = ReplayFamily(blocks=["layers.0", "layers.1"]), torch.ones(2, 4)
    with pytest.raises(CalibrationError, match="once, in this order"):
        for block in ("layers.0", "layers.1"):
            family.step(Looped(), block, x)


def test_output_without_features_in_first_place_is_refused():
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> list:
            return [None, x]

    model = nn.Sequential(Odd())
    with pytest.raises(TypeError, match="hidden features"):
        ReplayFamily(blocks=["0"]).step(model, "0", torch.ones(2))


def test_family_is_found_from_settings():
    model = ResidualNet()
    family = resolve_family({"name": "replay", "blocks": ["layers.*"]}, model)
    assert isinstance(family, ReplayFamily)
    assert resolve_family(family, model) is family
    assert resolve_family(CLIP, model) is CLIP


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("clop", r"method\.family.*clip.*replay.*'clop'"),
        ("auto", r"method\.family=auto does not know ResidualNet"),
        ({"name": "clip", "blocks": []}, r"method\.family"),
        ({"name": "replay"}, r"method\.family.*blocks"),
        ({"name": "replay", "blocks": "layers.*"}, r"method\.family\.blocks must be a list"),
        ({"name": "replay", "blocks": []}, r"method\.family\.blocks"),
        ({"name": "replay", "blocks": ["a"], "block": 1}, r"method\.family.*block"),
        ({"name": "replay", "blocks": [["a"], []]}, r"method\.family\.blocks"),
        ({"name": "replay", "blocks": [["a"], [3]]}, r"method\.family\.blocks"),
        ({"name": "replay", "blocks": [["a"], ["b"]]}, r"method\.family\.mask.*2 stages"),
        (
            {"name": "replay", "blocks": [["a"], ["b"]], "mask": "attention_mask"},
            r"method\.family\.mask.*2 stages.*'attention_mask'",
        ),
        ({"name": "replay", "blocks": ["a"], "mask": ["m", "n"]}, r"method\.family\.mask"),
        ({"name": "replay", "blocks": ["a"], "other_masks": ["k"]}, r"method\.family\.other_masks"),
        (3, r"method\.family.*3"),
    ],
    ids=str,
)
def test_unknown_family_is_refused(family: Any, message: str):
    with pytest.raises(ValueError, match=message):
        resolve_family(family, ResidualNet())


def test_auto_does_not_take_another_transformer_for_clip():
    with pytest.raises(ValueError, match=r"GPT2Model.*gpt2.*replay"):
        resolve_family("auto", gpt2_suite().base)
    assert resolve_family("auto", clip_model()).name == "clip"
