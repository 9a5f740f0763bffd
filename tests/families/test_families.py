"""Models of each family: blocks and rows that are found, and models that are refused."""

from typing import Any

import pytest
import tiny_models as tiny
import torch
from model_types import suite_named
from torch import nn

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
            setattr(self, name, child)


def stack(number: int, width: int = 3) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(width, width) for _ in range(number))


def test_forward_that_a_library_replaced_is_back_afterwards():
    model: Any = tiny.model_of()
    block, ran = model.model.layers[0], []
    plain = block.forward
    block.forward = lambda *args, **kwargs: ran.append(1) or 2 * plain(*args, **kwargs)
    replaced = block.forward
    call = LLAMA.begin(model, tiny.sentences([3], 3), "model.layers.0")
    assert block.forward is replaced and not ran  # no block runs before its turn
    hidden = LLAMA.step(model, "model.layers.0", call).hidden
    torch.testing.assert_close(hidden, 2 * plain(call.hidden, **call.kwargs["model.layers.0"]))


def test_failing_forward_pass_is_not_swallowed_and_leaves_no_hooks():
    model = tiny.model_of()
    with pytest.raises(IndexError):
        LLAMA.begin(model, {"input_ids": torch.full((1, 3), 99)}, "model.layers.0")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any("forward" in module.__dict__ for module in model.modules())


NESTED = nn.ModuleList(Net(inner=stack(2)) for _ in range(2))


@pytest.mark.parametrize("model", [Net(layers=stack(2, 9), others=stack(2, 2)), Net(layers=NESTED)])
def test_the_list_that_is_clearly_the_largest_holds_the_blocks(model):
    ((first, *_),) = resolve_family("auto", model).stages(model)
    assert first == "layers.0"


@pytest.mark.parametrize(
    "model",
    [
        Net(layers=stack(2, 9), others=stack(2, 8)),
        Net(layers=nn.ModuleList([nn.Linear(3, 3), nn.LayerNorm(3)])),
    ],
)
def test_without_such_a_list_a_family_of_ones_own_is_needed(model: nn.Module):
    with pytest.raises(CalibrationError, match=r"family=stack .*Net: it has no list .*write one"):
        resolve_family("stack", model).stages(model)
    with pytest.raises(ValueError, match=r"auto does not know Net .*clearly holds.*_target_"):
        resolve_family("auto", model)


class Unlisted(Stack):
    def stages(self, model: nn.Module) -> Any:
        return ["a"]


def unlabelled() -> dict[str, Any]:
    return tiny.without_labels(tiny.sentences([3, 5], 6))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LLAMA.stages(tiny.clip_model()), r"no blocks in CLIPVision.*layers.*family"),
        (lambda: WHISPER.stages(tiny.clip_model()), r"no blocks in CLIPVision.*method\.family"),
        (lambda: stages_of(Unlisted(), nn.Linear(2, 2)), r"Unlisted: stages gives \['a'\].*\[\[b"),
        (lambda: STAGES.stages(nn.Linear(2, 2)),
         r"stages does not fit Linear.*a family"),
        (lambda: LLAMA.masks(tiny.model_of(), unlabelled(), 0, "targets"),
         r"method\.decoder_rows=targets.*labels.*input_ids"),
    ],
)  # fmt: skip
def test_models_and_inputs_that_do_not_fit_are_refused(call, message):
    with pytest.raises((CalibrationError, ValueError), match=message):
        call()


def test_labels_of_encoders_choose_no_positions():
    inputs = tiny.sentences([3, 5], 6)
    models = (suite_named(name).merged for name in ("bert", "gpt2"))
    bert, gpt2 = (STACK.masks(model, inputs, 0, "targets")[""] for model in models)
    assert bert is inputs["attention_mask"]
    assert bert is not None and gpt2 is not None and not torch.equal(gpt2, bert)


def test_positions_of_whisper_that_count():
    batch = tiny.whisper_batch([4, 1], seed=0) | {"attention_mask": torch.ones(2, 12)}
    encoder, decoder = (dict(WHISPER.masks(nn.Module(), batch, n, "all")) for n in (0, 1))
    counted = decoder.pop("")
    assert counted is not None and counted.tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]
    assert {*encoder.values(), *decoder.values()} == {None}
