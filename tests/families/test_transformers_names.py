"""The installed transformers has every name on which the families depend."""

import inspect
import re
from typing import Any

import pytest
import tiny_models as tiny
import torch
from torch import nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from fusion_bench_featcal.families import T5, WHISPER
from fusion_bench_featcal.families import transformers_names as names


def names_in(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules()]


def arguments_of(module: nn.Module) -> list[str]:
    return list(inspect.signature(module.forward).parameters)


MODELS: dict[str, tuple[Any, Any, int]] = {  # model, pattern of its blocks, their number
    "clip": (tiny.clip_model, names.CLIP_BLOCK, 2),
    "llama": (tiny.model_of, names.LLAMA_BLOCK, 2),
    "t5": (tiny.t5_model, names.T5_BLOCK, 4),
    "whisper": (lambda: tiny.model_of("whisper"), names.WHISPER_BLOCK, 4),
}


@pytest.mark.parametrize("kind", MODELS)
def test_blocks_and_their_first_argument(kind: str):
    make, pattern, count = MODELS[kind]
    model = make()
    blocks = [name for name in names_in(model) if re.fullmatch(pattern, name)]
    assert len(blocks) == count
    assert {arguments_of(model.get_submodule(name))[0] for name in blocks} == {names.HIDDEN}


def test_modules_of_t5_and_whisper():
    t5, whisper = tiny.t5_model(), tiny.model_of("whisper")
    assert {names.T5_BIAS, names.T5_MASK} <= {*arguments_of(t5.get_submodule("encoder.block.0"))}
    for model, family, ends, norm in (
        (t5, T5, names.T5_KEYS_AND_VALUES, names.T5_ENCODER_NORM),
        (whisper, WHISPER, names.WHISPER_KEYS_AND_VALUES, names.WHISPER_ENCODER_NORM),
    ):
        assert names.ENCODED in arguments_of(model)
        blocks = family.stages(model)[1]
        assert len([n for n in names_in(model) if n.endswith(ends)]) == 2 * len(blocks)
        assert any(n.endswith(norm) and "encoder" in n for n in names_in(model))
    for model in (t5, tiny.model_of()):
        assert len({*names.FINAL_NORMS} & {*names_in(model)}) == 1
        assert any(name.endswith(names.VOCABULARY) for name in model.state_dict())


def test_the_bias_of_a_block_of_t5():
    block = tiny.t5_model().get_submodule("decoder.block.0")
    assert names.t5_bias(block, torch.zeros(2, 3, 5, 5)).shape[-2:] == (5, 5)


def test_a_cache_is_left_out_under_any_name():
    for cache in (DynamicCache(), EncoderDecoderCache(DynamicCache(), DynamicCache())):
        assert names.without_cache(cache) is names.without_cache(cache, "anything") is None
    assert names.without_cache(True, "use_cache") is False
    assert names.without_cache(1, "past_key_values") == 1
