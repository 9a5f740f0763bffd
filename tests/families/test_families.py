"""Blocks that families find, positions that count, and models that do not fit."""

from typing import Any

import pytest
import tiny_models as tiny
import torch
import transformers
from calibrations import PLUS, assert_same, run_fast, run_slow
from model_types import DECODER, suite_named
from tiny_convs import tower_suite
from tiny_languages import NEEDS_RELEASE_5
from tiny_models import decoder_suite, sentences, suite_of
from torch import nn
from tricky_models import Between, biased
from variations import models_of

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.families import (
    LLAMA,
    STACK,
    STAGES,
    encoder_decoder,
    resolve_family,
)
from fusion_bench_featcal.families.base import captured
from fusion_bench_featcal.streams.batch import CountedPositions, Positions
from fusion_bench_featcal.streams.streams import Streams


def model_with_lists(**lists: nn.ModuleList) -> nn.Module:
    model = nn.Module()
    for name, modules in lists.items():
        model.add_module(name, modules)
    return model


def linears(number: int, width: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(width, width) for _ in range(number))


def test_the_list_that_is_clearly_the_largest_has_the_blocks():
    model = model_with_lists(layers=linears(2, 9), others=linears(2, 2))
    for name in ("auto", "stack"):
        assert resolve_family(name, model).stages(model) == [["layers.0", "layers.1"]]
    equal = model_with_lists(layers=linears(2, 9), others=linears(2, 8))
    with pytest.raises(CalibrationError, match=r"family=stack .*Module: it has no list .*write"):
        STACK.stages(equal)
    with pytest.raises(
        ValueError, match=r"auto does not support Module .*Give the names of the blocks"
    ):
        resolve_family("auto", equal)


@NEEDS_RELEASE_5
def test_layers_of_several_classes_are_blocks_of_one_list():
    sizes: Any = {"num_experts": 1, "attn_layer_period": 2, "attn_layer_offset": 1,
                  "mamba_d_state": 4, "mamba_d_conv": 2, "use_mamba_kernels": False}  # fmt: skip
    config = transformers.JambaConfig(**DECODER, **sizes)
    inputs = tiny.by_task(lambda task, n: sentences([4, 6], 7, seed=2 * task + n))
    layers = ["model.layers.0", "model.layers.1"]
    suite = suite_of(transformers.JambaForCausalLM(config), inputs, layers, 1)
    with pytest.raises(CalibrationError, match=r"Exclude them: modules=\['!mamba.dt_proj'\]"):
        run_fast(suite)
    result = run_fast(suite, modules=["!mamba.dt_proj"])
    assert list(dict.fromkeys(r["block"] for r in result.log.select("module"))) == layers


def changing_between() -> None:
    inputs: Any = tiny.samples_by_task(2, (4, 5), 4)
    run_fast(suite_of(Between(biased, 2, 4), inputs, ["layers.0", "layers.1"], 1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (changing_between, r"of Between cannot .*layers\.1"),
        (lambda: LLAMA.stages(tiny.clip_model()), r"no blocks in CLIPVision.*layers.*family"),
        (lambda: STAGES.stages(nn.Linear(2, 2)), r"stages does not fit Linear.*a family"),
        (lambda: LLAMA.masks(nn.Module(), tiny.without_labels(sentences([3], 6)), 0, "targets"),
         r"decoder_rows=targets.*labels.*input_ids"),
    ],
)  # fmt: skip
def test_models_and_inputs_that_do_not_fit_are_refused(call: Any, message: str):
    with pytest.raises((CalibrationError, ValueError), match=message):
        call()


# Whether the head or the pooled output uses only the first position of the last block.
@pytest.mark.parametrize(("name", "is_first"), [("bert", True), ("gpt2", False)])
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # transformers' own modules
def test_plus_uses_the_first_position_alone_where_the_head_does(name: str, is_first: bool):
    suite = suite_named(name)
    tasks = run_fast(suite, **PLUS).log.select("task")
    rows = {(r["block"] == suite.blocks[-1], r["rows"] == r["samples"]) for r in tasks}
    assert rows == {(False, False), (True, is_first)}


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("bert", ("key", "value")),
        ("electra", ("key", "value")),
        ("distilbert", ("k_lin", "v_lin")),
        ("modernbert", ("Wqkv",)),
        ("vit", ("key", "value", "k_proj", "v_proj")),  # releases of transformers differ
    ],
)
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # transformers' own modules
def test_only_keys_and_values_of_the_last_block_count_other_positions(name, ends, monkeypatch):
    suite, counted = suite_named(name), list[set[str]]()

    def restrict_positions(self: Streams, block: str, names: Any) -> None:
        original(self, block, names)
        batches = [b for task in self.tasks for b in self.iter_batches(task)]
        counted.extend({*b.positions.mixing} for b in batches if b.positions.is_last_block)

    original = Streams.restrict_positions
    monkeypatch.setattr(Streams, "restrict_positions", restrict_positions)
    run_fast(suite, **PLUS)
    assert counted and all(len(names) == min(len(ends), 2) for names in counted)
    assert all(n.endswith(ends) for names in counted for n in names)


def test_all_blocks_of_a_decoder_have_the_keys_and_values_of_the_first(monkeypatch):
    suite, fed, asked = decoder_suite(), dict[str, set[str]](), list[str]()

    def restrict_positions(self: Streams, block: str, names: Any) -> None:
        fed[block] = {*names}
        narrowed(self, block, fed[block])

    def feeding_in(self: Streams, batch: Any, block: str, names: Any) -> Any:
        asked.append(block)
        return found(self, batch, block, names)

    narrowed, found = Streams.restrict_positions, Streams._mixing_in
    monkeypatch.setattr(Streams, "restrict_positions", restrict_positions)
    monkeypatch.setattr(Streams, "_mixing_in", feeding_in)
    auto: dict[str, Any] = PLUS | {"decoder_rows": "auto"}
    run_fast(suite, **auto)
    ends = ("self_attn.k_proj", "self_attn.v_proj")
    assert fed == {block: {f"{block}.{end}" for end in ends} for block in suite.blocks}
    assert {*asked} == {suite.blocks[0]} and len(suite.blocks) > 1


def test_keys_and_values_are_found_in_bfloat16_beside_a_large_residual_stream(monkeypatch):
    suite, found = decoder_suite(), set[str]()
    for model in models_of(suite):  # bfloat16 rounds what a block adds away
        model.get_parameter("model.embed_tokens.weight").data.mul_(1000)

    def restrict_positions(self: Streams, block: str, names: Any) -> None:
        found.update(names)

    monkeypatch.setattr(Streams, "restrict_positions", restrict_positions)
    auto: dict[str, Any] = PLUS | {"decoder_rows": "auto"}
    run_fast(suite.to(torch.bfloat16), **auto)
    ends = ("self_attn.k_proj", "self_attn.v_proj")
    assert found == {f"{block}.{end}" for block in suite.blocks for end in ends}


def test_labels_choose_positions_of_decoders_only():
    suite = suite_named("bert")
    for batch in (batch for batches in suite.inputs.values() for batch in batches):
        batch["labels"] = torch.ones(len(batch["input_ids"]), dtype=torch.long)
    assert_same(run_fast(suite, decoder_rows="targets").model, run_slow(suite).model)


def test_images_get_the_dtype_of_the_model():
    images = torch.rand(2, 3, 32, 32)
    model = tower_suite("resnet").merged.half()
    hidden = captured(model, {"pixel_values": images}, "resnet.embedder").hidden
    assert torch.equal(hidden, images.half())


def test_sounds_get_the_dtype_of_the_model():
    suite = suite_named("whisper")
    batch = next(iter(suite.inputs.values()))[0]
    model, sounds = suite.merged.bfloat16(), batch["input_features"].float()
    hidden = captured(model, batch | {"input_features": sounds}, suite.blocks[0]).hidden
    assert hidden.dtype == torch.bfloat16 and sounds.dtype == torch.float32


def test_keys_of_an_encoder_keep_its_positions_if_they_seem_to_feed_nothing():
    sounds, targets = Positions(torch.Size((1, 50))), Positions(torch.Size((1, 6)))
    by_end = {"": targets, "encoder_attn.k_proj": sounds}
    positions = CountedPositions(by_end, read=targets, is_last_block=True)
    assert positions.of("layers.1.encoder_attn.k_proj") is sounds
    assert positions.of("layers.1.fc1") is targets


def test_a_reader_of_the_encoder_with_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(encoder_decoder, "ENCODED", ("other_attn.k_proj",))
    with pytest.raises(CalibrationError, match=r"encoder_attn.k_proj receives .*modules=\['!enc"):
        run_fast(suite_named("bart"))


class InATuple(nn.Linear):
    """A block whose features are inside a tuple, with their height and width."""

    def forward(self, input: torch.Tensor) -> Any:
        return (super().forward(input), 1, 1), None


class OfTuples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(InATuple(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)[0][0]
        return x


def test_blocks_that_return_no_features_first_are_named():
    with pytest.raises(CalibrationError, match=r"OfTuples, layers.0: a block returned tuple .*Wri"):
        run_fast(suite_of(OfTuples(), tiny.samples_by_task(2, (2,), 3, 4), [], 1, "stack"))


def test_a_list_of_the_decoder_alone_with_images_is_refused():
    suite = suite_named("llava", "images")
    blocks = [f"model.language_model.layers.{n}" for n in range(2)]
    with pytest.raises(
        CalibrationError, match=r"the begin of model.* weights of blocks, .*use family=auto"
    ):
        run_fast(suite, family=blocks)
