"""Running a model of a family block by block equals the model's forward pass."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_convs
import tiny_models as tiny
import torch
import transformers
from model_types import suite_named
from omegaconf import OmegaConf
from torch import Tensor, nn

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.families import (
    CLIP,
    LLAMA,
    STAGES,
    VISION_LANGUAGE,
    WHISPER,
    ChainFamily,
    check_family,
    resolve_family,
    stages_of,
)

SENTENCES: dict[str, Any] = tiny.t5_batch([3, 7, 5], [4, 1, 3], seed=0, pad=(1, 1))
IMAGES = {"pixel_values": tiny.normal(0, 3, 3, 8, 8)}
PICTURES = tiny.normal(0, 2, 3, 16, 16)
PADDED: dict[str, Any] = tiny.sentences([5, 9, 7], 10, side="left")


class Net(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


def stack(number: int, width: int = 3) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(width, width) for _ in range(number))


def clip(**shape: Any) -> nn.Module:
    return tiny.scatter(tiny.clip_model(**shape), 5, 0.2)


def t5(**shape: Any) -> nn.Module:
    return tiny.scatter(tiny.t5_model(**shape).double(), 5, 0.3)


def decoder(make: str = "llama") -> nn.Module:
    return tiny.scatter(tiny.decoder_model(make), 5, 0.2)


# The table of model types, each of which is calibrated as by replay, lacks these.
CASES: dict[str, tuple[str, Callable[[], tuple[nn.Module, Any]]]] = {
    "clip": ("clip", lambda: (clip(width=4, heads=1, hidden=4, depth=12), IMAGES)),
    "umt5": ("t5", lambda: (t5(kind="umt5", gated=False, depths=(2, 3)), SENTENCES)),
    "qwen3": ("llama", lambda: (decoder("qwen3"), PADDED)),
    "smollm3": ("llama", lambda: (decoder("smollm3"), PADDED)),
    "segformer": ("stages", lambda: (
        tiny_convs.tower_suite("segformer").merged, {"pixel_values": PICTURES})),
}  # fmt: skip


def stepped(family: Any, model: nn.Module, inputs: Any) -> list[Tensor]:
    """Outputs of the blocks, run one by one."""
    outputs = []
    with torch.no_grad():
        for blocks in family.stages(model):
            call = family.begin(model, inputs, blocks[0])
            for block in blocks:
                hidden, call = family.step(model, block, call)
                outputs.append(hidden)
    return outputs


def assert_equal(one: Tensor, other: Tensor) -> None:
    """Compare all bits. Padding that sees no position is NaN in some versions of transformers."""
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def assert_untouched(model: nn.Module) -> None:
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("case", CASES)
def test_blocks_are_those_of_the_models_own_pass(case):
    name, make = CASES[case]
    model, inputs = make()
    model = model.double().eval()
    family = resolve_family("auto", model)
    assert family == resolve_family(name, model) and family.name == name
    stages: Any = family.stages(model)
    if family is STAGES:
        stages = [[block] for block in stages[0]]  # as features change their shape
    else:
        for stage in stages:
            assert [int(n.rpartition(".")[2]) for n in stage] == list(range(len(stage)))
    replay: Any = {"name": "replay", "blocks": stages, "mask": [None] * len(stages)}
    outputs, expected = (stepped(f, model, inputs) for f in (family, resolve_family(replay, model)))
    for output, right in zip(outputs, expected, strict=True):
        assert_equal(output, right)
    assert type(outputs[0]) is Tensor and not torch.equal(outputs[0], outputs[1])
    assert_untouched(model)


def test_forward_that_a_library_replaced_is_back_afterwards():
    model: Any = tiny.decoder_model()
    block, ran = model.model.layers[0], []
    plain = block.forward
    block.forward = lambda *args, **kwargs: ran.append(1) or 2 * plain(*args, **kwargs)
    replaced = block.forward
    call = LLAMA.begin(model, tiny.sentences([3], 3), "model.layers.0")
    assert block.forward is replaced and not ran  # no block runs before its turn
    hidden, _ = LLAMA.step(model, "model.layers.0", call)
    torch.testing.assert_close(hidden, 2 * plain(call.hidden, **call.kwargs["model.layers.0"]))


def both(layers: int, decoder_layers: int) -> nn.Module:
    """Encoder and decoder by structure alone."""
    model: Any = Net(encoder=Net(layers=stack(layers)), decoder=Net(layers=stack(decoder_layers)))
    model.config = SimpleNamespace(is_encoder_decoder=True)
    return model


NESTED = nn.ModuleList(Net(inner=stack(2)) for _ in range(2))


@pytest.mark.parametrize("model", [Net(layers=stack(2, 9), others=stack(2, 2)), Net(layers=NESTED)])
def test_the_list_that_is_clearly_the_largest_holds_the_blocks(model):
    ((first, *_),) = resolve_family("auto", model).stages(model)
    assert first == "layers.0"


@pytest.mark.parametrize(
    ("model", "families"),
    [
        (Net(layers=stack(2, 9), others=stack(2, 8)),
         ["{name: replay, blocks: [layers.*]}", "{name: replay, blocks: [others.*]}"]),
        (both(2, 3), ["{name: replay, blocks: [[encoder.layers.*], [decoder.layers.*]], "
                      "mask: [attention_mask, decoder_attention_mask]"]),
        (Net(layers=nn.ModuleList([nn.Linear(3, 3), nn.LayerNorm(3)])), []),
    ],
)  # fmt: skip
def test_without_such_a_list_families_are_suggested_that_can_be_set(model, families):
    with pytest.raises(CalibrationError, match=r"family=stack: .* no list of modules .*rep"):
        resolve_family("stack", model)
    with pytest.raises(ValueError, match=r"auto does not know Net .*clearly holds") as error:
        resolve_family("auto", model)
    suggested = re.findall(r"method\.family=(\{.*?\})(?: or |$)", str(error.value))
    assert len(suggested) == len(families)
    for family, expected in zip(suggested, families, strict=True):
        assert family.startswith(expected)
        config: Any = OmegaConf.to_container(OmegaConf.create(f"family: {family}"))
        check_family(config["family"])


SMALL: dict[str, Any] = {
    "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
TEXT = {"vocab_size": 10, "max_position_embeddings": 4}
TEXT |= dict.fromkeys(["eos_token_id", "bos_token_id", "pad_token_id"], 0)


def two_towers() -> nn.Module:
    image = SMALL | {"image_size": 8, "patch_size": 4}
    config = transformers.CLIPConfig(text_config=SMALL | TEXT, vision_config=image)
    return transformers.CLIPModel(config)


def flat(model: nn.Module) -> Any:
    return ["0"]


def unlabelled() -> dict[str, Any]:
    return tiny.without_labels(tiny.sentences([3, 5], 6))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: CLIP.stages(two_towers()), r"CLIPModel has a text tower.*vision_model"),
        (lambda: LLAMA.stages(tiny.clip_model()), r"CLIPVisionModel has no decoder layers.*family"),
        (lambda: WHISPER.stages(tiny.clip_model()), r"CLIPVisionModel has no .*replay, blocks"),
        (lambda: STAGES.stages(nn.Linear(2, 2)),
         r"stages does not fit Linear.*method\.family to \{name"),
        (lambda: LLAMA.row_weights(unlabelled(), 0, "targets"),
         r"method\.decoder_rows=targets.*labels.*input_ids"),
        (lambda: stages_of(ChainFamily("flat", flat), nn.ReLU()),
         r"method\.family=flat: stages gives \['0'\], but must give one list"),
        (lambda: VISION_LANGUAGE.begin(tiny.vision_language_model(), unlabelled(), "x"),
         r"pixel_values .* they are \['attention_mask', 'inp"),
    ],
)  # fmt: skip
def test_models_and_inputs_that_do_not_fit_are_refused(call, message):
    with pytest.raises((CalibrationError, ValueError), match=message):
        call()


def test_failing_forward_pass_is_not_swallowed():
    model, tokens = decoder(), {"input_ids": torch.full((1, 3), 99)}
    with pytest.raises(IndexError):
        LLAMA.begin(model, tokens, "model.layers.0")
    assert_untouched(model)


def test_labels_of_encoders_choose_no_positions():
    config = transformers.AutoConfig.for_model("bert", **SMALL, vocab_size=30)
    inputs = tiny.sentences([3, 5], 6)
    classifier = transformers.AutoModelForTokenClassification.from_config(config)
    family = resolve_family("auto", classifier)
    assert family.row_weights(inputs, 0, "targets") is inputs["attention_mask"]
    counted = resolve_family("auto", suite_named("gpt2").merged).row_weights(inputs, 0, "targets")
    assert counted is not None and not torch.equal(counted, inputs["attention_mask"])


def test_positions_of_whisper_that_count():
    batch = tiny.whisper_batch([4, 1], seed=0) | {"attention_mask": torch.ones(2, 12)}
    assert WHISPER.row_weights(batch, 0, "all") is None
    counted = WHISPER.row_weights(batch, 1, "all")
    assert counted is not None and counted.tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]
    assert WHISPER.other_rows(batch, 0) == {}
    assert set(WHISPER.other_rows(batch, 1).values()) == {None}
