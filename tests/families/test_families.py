"""Blocks that families find, positions that count, and models that do not fit."""

from dataclasses import replace
from typing import Any

import pytest
import tiny_models as tiny
import torch
from calibrations import PLUS, assert_same, run_fast, run_slow
from encoder_pools import encoder
from model_types import suite_named
from tiny_models import ResidualNet, model_of, normal, sentences, suite_of
from torch import nn
from tricky_models import Remembering, Sharing, net_suite

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.families import (
    LLAMA,
    STACK,
    STAGES,
    WHISPER,
    Stack,
    resolve_family,
    stages_of,
)


class Net(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


class Peeking(Stack):
    """Its step uses a weight outside the block, without effect."""

    def step(self, model: Any, block: str, call: Any) -> Any:
        after = super().step(model, block, call)
        outside = next(p for n, p in model.named_parameters() if not n.startswith("layers."))
        return replace(after, hidden=after.hidden + 0 * outside.sum())


class Unlisted(Stack):
    """Returns names of blocks in place of lists of them."""

    def stages(self, model: nn.Module) -> Any:
        return ["a"]


def linears(number: int, width: int = 3) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(width, width) for _ in range(number))


NESTED = nn.ModuleList(Net(inner=linears(2)) for _ in range(2))
UNEQUAL = nn.ModuleList([nn.Linear(3, 3), nn.LayerNorm(3)])


@pytest.mark.parametrize(
    "model", [Net(layers=linears(2, 9), others=linears(2, 2)), Net(layers=NESTED)]
)
def test_the_list_that_is_clearly_the_largest_has_the_blocks(model: nn.Module):
    ((first, *_),) = resolve_family("auto", model).stages(model)
    assert first == "layers.0"


@pytest.mark.parametrize("model", [Net(layers=linears(2, 9), others=linears(2, 8)), Net(l=UNEQUAL)])
def test_without_such_a_list_a_family_must_be_written(model: nn.Module):
    with pytest.raises(CalibrationError, match=r"family=stack .*Net: it has no list .*write one"):
        STACK.stages(model)
    with pytest.raises(ValueError, match=r"auto does not know Net .*clearly holds.*_target_"):
        resolve_family("auto", model)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: run_fast(net_suite(Remembering())), r"of Remembering cannot .*layers\.1"),
        (lambda: run_fast(net_suite(Sharing())), r"of Sharing cannot .*layers\.1"),
        (lambda: run_fast(net_suite(ResidualNet()), family=Peeking()),
         r"family=Peeking: the step of layers\.0 needs .*begin"),
        (lambda: LLAMA.stages(tiny.clip_model()), r"no blocks in CLIPVision.*layers.*family"),
        (lambda: WHISPER.stages(tiny.clip_model()), r"no blocks in CLIPVision.*method\.family"),
        (lambda: STAGES.stages(nn.Linear(2, 2)), r"stages does not fit Linear.*a family"),
        (lambda: stages_of(Unlisted(), nn.Linear(2, 2)), r"Unlisted: stages gives \['a'\].*\[\[b"),
        (lambda: LLAMA.masks(model_of(), tiny.without_labels(sentences([3], 6)), 0, "targets"),
         r"method\.decoder_rows=targets.*labels.*input_ids"),
    ],
)  # fmt: skip
def test_models_and_inputs_that_do_not_fit_are_refused(call: Any, message: str):
    with pytest.raises((CalibrationError, ValueError), match=message):
        call()


def test_a_forward_pass_that_a_library_replaced_or_that_fails_leaves_the_model_as_it_was():
    model: Any = model_of()
    block, ran = model.model.layers[0], []
    plain = block.forward
    block.forward = lambda *args, **kwargs: ran.append(1) or 2 * plain(*args, **kwargs)
    replaced = block.forward
    call = LLAMA.begin(model, sentences([3], 3), "model.layers.0")
    assert block.forward is replaced and not ran  # no block runs before its turn
    hidden = LLAMA.step(model, "model.layers.0", call).hidden
    torch.testing.assert_close(hidden, 2 * plain(call.hidden, **call.kwargs["model.layers.0"]))
    model = model_of()
    with pytest.raises(IndexError):
        LLAMA.begin(model, {"input_ids": torch.full((1, 3), 99)}, "model.layers.0")
    for module in model.modules():
        assert not (module._forward_hooks or module._forward_pre_hooks)
        assert "forward" not in module.__dict__


def dino_suite() -> Any:
    images = {task: [{"pixel_values": normal(task, 5, 3, 28, 28)}] for task in (1, 2)}
    inputs = {str(task): batches for task, batches in images.items()}
    return suite_of(encoder("dino"), inputs, [f"encoder.layer.{n}" for n in range(2)], 1)


# Whether the head or the pooled output uses only the first position of the last block.
@pytest.mark.parametrize(
    ("name", "is_first"),
    [("bert", True), ("distilbert", True), ("gpt2", False), ("bert, bare", False), ("dino", True)],
)
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # transformers' own modules
def test_plus_uses_the_first_position_alone_where_the_head_does(name: str, is_first: bool):
    suite = dino_suite() if name == "dino" else suite_named(name)
    tasks = run_fast(suite, **PLUS).log.of_kind("task")
    rows = {(r["block"] == suite.blocks[-1], r["rows"] == r["samples"]) for r in tasks}
    assert rows == {(False, False), (True, is_first)}


def test_labels_choose_positions_of_decoders_only():
    inputs: dict[str, list] = {"a": [sentences([3, 6], 7)], "b": [sentences([5, 4], 6, seed=1)]}
    suite = suite_of(model_of("bert"), inputs, [f"bert.encoder.layer.{n}" for n in range(2)], 1)
    assert_same(run_fast(suite, decoder_rows="targets").model, run_slow(suite).model)
    batch = tiny.whisper_batch([4, 1], seed=0) | {"attention_mask": torch.ones(2, 12)}
    of_encoder, of_decoder = (dict(WHISPER.masks(nn.Module(), batch, n, "all")) for n in (0, 1))
    counted: Any = of_decoder.pop("")
    assert counted.tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]
    assert {*of_encoder.values(), *of_decoder.values()} == {None}
