"""Models of each family: blocks and rows that are found, and models that are refused."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models as tiny
import torch
import transformers
from calibrations import assert_same, run_fast, run_slow
from model_types import SIZES, TEXT, suite_named
from omegaconf import OmegaConf
from torch import nn

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.families import (
    CLIP,
    LLAMA,
    STAGES,
    VISION_LANGUAGE,
    WHISPER,
    check_family,
    resolve_family,
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
    hidden, _ = LLAMA.step(model, "model.layers.0", call)
    torch.testing.assert_close(hidden, 2 * plain(call.hidden, **call.kwargs["model.layers.0"]))


def test_failing_forward_pass_is_not_swallowed_and_leaves_no_hooks():
    model = tiny.model_of()
    with pytest.raises(IndexError):
        LLAMA.begin(model, {"input_ids": torch.full((1, 3), 99)}, "model.layers.0")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any("forward" in module.__dict__ for module in model.modules())


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


def two_towers() -> nn.Module:
    image = SIZES | {"image_size": 8, "patch_size": 4}
    config = transformers.CLIPConfig(text_config=SIZES | TEXT, vision_config=image)
    return transformers.CLIPModel(config)


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
        (lambda: VISION_LANGUAGE.begin(tiny.vision_language_model(), unlabelled(), "x"),
         r"pixel_values .* they are \['attention_mask', 'inp"),
    ],
)  # fmt: skip
def test_models_and_inputs_that_do_not_fit_are_refused(call, message):
    with pytest.raises((CalibrationError, ValueError), match=message):
        call()


def test_labels_of_encoders_choose_no_positions():
    inputs = tiny.sentences([3, 5], 6)
    bert, gpt2 = (
        resolve_family("auto", suite_named(name).merged).row_weights(inputs, 0, "targets")
        for name in ("bert", "gpt2")
    )
    assert bert is inputs["attention_mask"]
    assert bert is not None and gpt2 is not None and not torch.equal(gpt2, bert)


def test_positions_of_whisper_that_count():
    batch = tiny.whisper_batch([4, 1], seed=0) | {"attention_mask": torch.ones(2, 12)}
    assert WHISPER.row_weights(batch, 0, "all") is None
    counted = WHISPER.row_weights(batch, 1, "all")
    assert counted is not None and counted.tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]
    assert WHISPER.other_rows(batch, 0) == {}
    assert set(WHISPER.other_rows(batch, 1).values()) == {None}


def test_single_images_are_cut_to_the_number_of_samples():
    suite = suite_named("qwen2_vl")
    for number, task in enumerate(suite.inputs):
        suite.inputs[task] = [tiny.vision_language_batch([n], 10 * number + n) for n in (3, 4, 5)]
    calibrated = run_fast(suite, samples_per_task=2).model
    suite.inputs = {task: batches[:2] for task, batches in suite.inputs.items()}
    assert_same(calibrated, run_slow(suite).model)
