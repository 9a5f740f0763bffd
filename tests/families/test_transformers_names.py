"""The installed transformers has every name on which the families depend."""

import inspect
import re
from typing import Any

import pytest
import tiny_models as tiny
import torch
from torch import nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from fusion_bench_featcal.experts.vocabulary import VOCABULARY
from fusion_bench_featcal.families import CLIP, LLAMA, T5, WHISPER
from fusion_bench_featcal.families.base import HIDDEN, without_cache
from fusion_bench_featcal.families.t5 import BIAS, MASK, t5_bias
from fusion_bench_featcal.lab.rivals.features import FINAL_NORMS


def names_in(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules()]


def arguments_of(module: nn.Module) -> list[str]:
    return list(inspect.signature(module.forward).parameters)


MODELS: dict[str, tuple[Any, Any, int]] = {  # model, pattern of its blocks, their number
    "clip": (tiny.clip_model, CLIP.pattern, 2),
    "llama": (tiny.model_of, LLAMA.pattern, 2),
    "t5": (tiny.t5_model, T5.block, 4),
    "whisper": (lambda: tiny.model_of("whisper"), WHISPER.block, 4),
}


@pytest.mark.parametrize("kind", MODELS)
def test_blocks_and_their_first_argument(kind: str):
    make, pattern, count = MODELS[kind]
    model = make()
    blocks = [name for name in names_in(model) if re.fullmatch(pattern, name)]
    assert len(blocks) == count
    assert {arguments_of(model.get_submodule(name))[0] for name in blocks} == {HIDDEN}


def test_modules_of_t5_and_whisper():
    t5, whisper = tiny.t5_model(), tiny.model_of("whisper")
    assert {BIAS, MASK} <= {*arguments_of(t5.get_submodule("encoder.block.0"))}
    for model, family in ((t5, T5), (whisper, WHISPER)):
        assert "encoder_outputs" in arguments_of(model)
        blocks = family.stages(model)[1]
        assert len([n for n in names_in(model) if n.endswith(tuple(family.encoded))]) == 2 * len(
            blocks
        )
        assert any(n.endswith(f"encoder.{family.norm}") for n in names_in(model))
    for model in (t5, tiny.model_of()):
        assert len({*FINAL_NORMS} & {*names_in(model)}) == 1
        assert any(name.endswith(VOCABULARY) for name in model.state_dict())


def test_the_bias_of_a_block_of_t5():
    block = tiny.t5_model().get_submodule("decoder.block.0")
    assert t5_bias(block, torch.zeros(2, 3, 5, 5)).shape[-2:] == (5, 5)


def test_a_cache_is_left_out_under_any_name():
    for cache in (DynamicCache(), EncoderDecoderCache(DynamicCache(), DynamicCache())):
        assert without_cache(cache) is without_cache(cache, "anything") is None
    assert without_cache(True, "use_cache") is False
    assert without_cache(1, "past_key_values") == 1
