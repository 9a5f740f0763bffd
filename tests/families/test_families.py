"""Running a model of a family block by block is the model's own forward pass."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tiny_models import (
    MAKES,
    REPLAY,
    VISION_LANGUAGE_REPLAY,
    WHISPER_REPLAY,
    clip_model,
    decoder_model,
    normal,
    scatter,
    sentences,
    t5_batch,
    t5_model,
    vision_language_batch,
    vision_language_model,
    whisper_batch,
    whisper_model,
)
from torch import Tensor, nn
from transformers import (
    CLIPConfig,
    CLIPModel,
    T5EncoderModel,
)

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.families import (
    CLIP,
    T5,
    VISION_LANGUAGE,
    WHISPER,
    ChainFamily,
    Family,
    resolve_family,
    stages_of,
)
from fusion_bench_featcal.families.llama import LLAMA

DECODER = ["model.layers.0", "model.layers.1"]
SENTENCES: dict[str, Any] = t5_batch([3, 7, 5], [4, 1, 3], seed=0, pad=(1, 1))
IMAGES = {"pixel_values": normal(0, 3, 3, 8, 8)}


def clip(attention: str = "sdpa", **shape: Any) -> nn.Module:
    model = scatter(clip_model(**shape), 5, 0.2).double()
    model.set_attn_implementation(attention)  # pyright: ignore[reportCallIssue]
    return model


def decoder(make: str = "llama") -> nn.Module:
    return scatter(decoder_model(make), 5, 0.2)


def t5(**shape: Any) -> nn.Module:
    return scatter(t5_model(**shape).double(), 5, 0.3)


def whisper() -> nn.Module:
    return scatter(whisper_model().double(), 5, 0.2)


def vision_language(kind: str = "qwen2_vl") -> nn.Module:
    return scatter(vision_language_model(kind).double(), 5, 0.2)


CASES: dict[str, tuple[Family, Callable[[], nn.Module], Any]] = {
    "clip": (CLIP, partial(clip), IMAGES),
    "clip, eager": (CLIP, partial(clip, "eager", width=8, heads=4, hidden=5, depth=3), IMAGES),
    "clip, twelve blocks": (CLIP, partial(clip, width=4, heads=1, hidden=4, depth=12), IMAGES),
    "t5, gated": (T5, partial(t5, untied=True), SENTENCES),
    "t5": (T5, partial(t5, gated=False, depths=(1, 3)), SENTENCES),
    "mt5": (T5, partial(t5, kind="mt5", depths=(3, 1), heads=1, width=5), SENTENCES),
    "whisper": (WHISPER, partial(whisper), whisper_batch([4, 1, 3], seed=0)),
    "qwen2_vl": (VISION_LANGUAGE, vision_language, vision_language_batch([4, 2], seed=0)),
    "qwen2_5_vl": (
        VISION_LANGUAGE,
        partial(vision_language, "qwen2_5_vl"),
        vision_language_batch([4, 2], seed=0),
    ),
    "umt5": (T5, partial(t5, kind="umt5", gated=False, depths=(2, 3)), SENTENCES),
}
for _make in MAKES:
    for _side in ("left", "right"):
        CASES[f"{_make}, {_side}"] = (
            LLAMA,
            partial(decoder, _make),
            sentences([5, 9, 7], 10, side=_side),
        )


def stepped(family: Any, model: nn.Module, inputs: Any) -> list[Tensor]:
    """Outputs of the blocks, run one by one."""
    found = []
    with torch.no_grad():
        for blocks in family.stages(model):
            call = family.begin(model, inputs, blocks[0])
            for block in blocks:
                hidden, call = family.step(model, block, call)
                found.append(hidden)
    return found


def assert_untouched(model: nn.Module) -> None:
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("case", CASES)
def test_blocks_are_those_of_the_models_own_pass(case: str):
    family, make, inputs = CASES[case]
    model = make()
    stages = family.stages(model)
    for stage in stages:
        assert [int(name.rpartition(".")[2]) for name in stage] == list(range(len(stage)))
    several = {T5: REPLAY, WHISPER: WHISPER_REPLAY, VISION_LANGUAGE: VISION_LANGUAGE_REPLAY}
    replay = several.get(family, {"name": "replay", "blocks": stages[0]})
    assert resolve_family("auto", model) is resolve_family(family.name, model) is family
    found, wanted = (stepped(f, model, inputs) for f in (family, resolve_family(replay, model)))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("case", ["clip", "llama, right", "mistral, left", "gemma2, right", "t5"])
def test_stepping_leaves_its_inputs_and_the_model_alone(case: str):
    family, make, inputs = CASES[case]
    model = make()
    asked = inputs if family is CLIP else inputs | {"use_cache": True}
    for first_block, *_ in family.stages(model):
        with torch.no_grad():
            call = family.begin(model, asked, first_block)
            before = call.hidden.clone()
            first, following = family.step(model, first_block, call)
            second, _ = family.step(model, first_block, call)
        assert torch.equal(call.hidden, before) and torch.equal(first, second)
        assert torch.equal(following.hidden, first)
        assert_untouched(model)
        for kwargs in call.kwargs.values() if family is LLAMA else [call.kwargs]:
            assert kwargs.get("past_key_values") is None and not kwargs.get("use_cache")
    assert asked.get("use_cache", True)  # the caller's inputs are its own


def test_forward_that_a_library_replaced_is_back_afterwards():
    model: Any = decoder_model()
    block, ran = model.model.layers[0], []
    plain = block.forward
    block.forward = lambda *args, **kwargs: ran.append(1) or 2 * plain(*args, **kwargs)
    replaced = block.forward
    call = LLAMA.begin(model, sentences([3], 3), DECODER[0])
    assert block.forward is replaced and not ran  # no block runs before its turn
    found, _ = LLAMA.step(model, DECODER[0], call)
    torch.testing.assert_close(found, 2 * plain(call.hidden, **call.kwargs[DECODER[0]]))


def test_bare_decoder_and_plain_tensors_give_the_same():
    model, inputs = decoder(), sentences([4, 4], 4)
    wanted = stepped(LLAMA, model, inputs)
    bare = model.get_submodule("model")
    for again in (stepped(LLAMA, bare, inputs), stepped(LLAMA, model, inputs["input_ids"])):
        for ours, theirs in zip(again, wanted, strict=True):
            torch.testing.assert_close(ours, theirs)


SMALL: dict[str, Any] = {
    "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
TEXT = {"vocab_size": 10, "max_position_embeddings": 4}
TEXT |= dict.fromkeys(["eos_token_id", "bos_token_id", "pad_token_id"], 0)
BOTH = CLIPConfig(
    text_config=SMALL | TEXT, vision_config=SMALL | {"image_size": 8, "patch_size": 4}
)
MASK = torch.ones(2, 1, 5, 5)
IDS = {"input_ids": torch.ones(2, 3, dtype=torch.long)}
NO_LABELS: dict[str, Any] = IDS | {"decoder_input_ids": IDS["input_ids"]}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: CLIP.stages(CLIPModel(BOTH)), r"CLIPModel has a text tower.*vision_model"),
        (lambda: CLIP.stages(nn.Linear(2, 2)), r"Linear has no vision encoder layers.*family"),
        (lambda: LLAMA.stages(clip_model()), r"CLIPVisionModel has no decoder layers.*family"),
        (
            lambda: T5.stages(T5EncoderModel(t5_model().config)),  # type: ignore[arg-type]
            r"T5EncoderModel has no.*decoder\.block.*replay",
        ),
        (
            lambda: T5.begin(t5(), IDS | {"labels": None}, "encoder.block.0"),
            r"labels, or decoder_input_ids",
        ),
        (
            lambda: T5.begin(t5(), IDS["input_ids"], "encoder.block.0"),
            r"labels, or decoder_input_ids",
        ),
        (
            lambda: LLAMA.row_weights(IDS, 0, "targets"),
            r"method\.decoder_rows=targets.*labels.*input_ids",
        ),
        (
            lambda: LLAMA.row_weights(IDS["input_ids"], 0, "targets"),
            r"method\.decoder_rows=targets.*Tensor",
        ),
        (
            lambda: T5.row_weights(NO_LABELS, 1, "targets"),
            r"method\.decoder_rows=targets.*labels.*=all",
        ),
        (
            lambda: LLAMA.row_weights({"attention_mask": MASK}, 0, "all"),
            r"attention_mask.*\(2, 1, 5, 5\)",
        ),
        (
            lambda: stages_of(ChainFamily("flat", Mock(return_value=["0"])), nn.ReLU()),
            r"method\.family=flat: stages gives \['0'\], but must give one list",
        ),
        (
            lambda: stages_of(ChainFamily("other", lambda _: [["x"]]), nn.ReLU()),
            r"method\.family=other: ReLU has no block 'x'",
        ),
    ],
)
def test_models_and_inputs_that_do_not_fit_are_refused(call: Any, message: str):
    with pytest.raises(CalibrationError, match=message):
        call()


@pytest.mark.parametrize(
    ("case", "inputs", "error"),
    [
        ("clip", {"pixel_values": torch.zeros(1, 3, 16, 16)}, ValueError),
        ("llama, right", {"input_ids": torch.full((1, 3), 99)}, IndexError),
    ],
)
def test_failing_forward_pass_is_not_swallowed(case: str, inputs: Any, error: type[Exception]):
    family, make, _ = CASES[case]
    model = make()
    with pytest.raises(error):
        family.begin(model, inputs, family.stages(model)[0][0])
    assert_untouched(model)
