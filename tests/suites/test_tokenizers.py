"""The suites' processors: every prompt or label word is one token, and any other text works."""

import json
from pathlib import Path
from typing import Any

import clip_processor
import numpy as np
import pytest
import text_tokenizer
import torch
from PIL import Image
from transformers import AutoTokenizer

from fusion_bench_featcal.suites import image, text

PROMPTS = [prompt for name in image.ALL8 for prompt in image.load_arrays(name).prompts()]
ROLES = {
    "flan-t5-mini": {"pad_token_id": 0, "eos_token_id": 1, "unk_token_id": 2},
    "llama-mini": {"unk_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3},
}


@pytest.fixture(scope="module")
def processor() -> Any:
    return image.load_processor()


@pytest.fixture(scope="module", params=text.SUITES)
def suite(request):
    return request.param


@pytest.fixture(scope="module")
def tokenizer(suite):
    return AutoTokenizer.from_pretrained(text.path(suite))


def test_the_shipped_clip_processor_is_the_builders(processor, tmp_path):
    vocabulary = clip_processor.write_processor(tmp_path, PROMPTS)
    assert processor.tokenizer.get_vocab() == vocabulary
    for name in ("tokenizer.json", "vocab.json", "merges.txt", "preprocessor_config.json"):
        assert Path(image.path(), name).read_bytes() == (tmp_path / name).read_bytes()


def test_each_prompt_word_is_one_token_and_prompts_differ(processor):
    vocabulary, encoded = processor.tokenizer.get_vocab(), set()
    for prompt in PROMPTS:
        ids = processor.tokenizer(prompt)["input_ids"]
        assert len(ids) == len(prompt.replace("-", " - ").split()) + 2
        assert ids[0] == vocabulary["<|startoftext|>"]
        assert ids[-1] == vocabulary["<|endoftext|>"] == max(vocabulary.values())
        assert processor.tokenizer(prompt.upper())["input_ids"] == ids
        encoded.add(tuple(ids))
    assert len(encoded) == len(set(PROMPTS))


def test_pictures_are_normalised_and_others_brought_to_size(processor):
    picture = image.load_split("mini_korean", "test")[0]["image"]
    pixels = processor(images=[picture], return_tensors="pt")["pixel_values"][0]
    expected = (np.asarray(picture).transpose(2, 0, 1) / 255 - 0.45) / 0.35
    torch.testing.assert_close(pixels, torch.from_numpy(expected).float(), atol=1e-6, rtol=1e-6)
    wide = processor(images=[Image.new("RGB", (90, 50))], return_tensors="pt")["pixel_values"]
    assert wide.shape == (1, 3, 28, 28)


def test_every_test_text_comes_back_from_its_tokens(tokenizer):
    for task in text.TA6:
        rows = text.load_text_split(task, "test")[:]
        for part in ("prompt", "target"):
            ids = tokenizer(rows[part])["input_ids"]
            assert tokenizer.unk_token_id not in {token for row in ids for token in row}
            assert tokenizer.batch_decode(ids, skip_special_tokens=True) == rows[part]


def test_each_label_word_is_one_token_that_no_prompt_has(tokenizer):
    ids = text_tokenizer.label_ids(tokenizer, text.TA6)
    words = sorted(text_tokenizer.label_words(text.TA6))
    assert tokenizer.batch_decode([[token] for token in ids]) == words
    prompts = text.load_text_split("banking77", "test")["prompt"]
    assert not set(ids) & {token for row in tokenizer(list(prompts))["input_ids"] for token in row}
    for task in text.TA6:
        for target in set(text.load_text_split(task, "test")["target"]):
            tokens = tokenizer(target, add_special_tokens=False)["input_ids"]
            assert len(tokens) == len(target.split())


def test_the_special_tokens_stand_where_the_models_expect_them(suite, tokenizer):
    assert {role: getattr(tokenizer, role) for role in ROLES[suite]} == ROLES[suite]
    file = Path(text.path(suite)) / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    assert config["vocab_size"] == len(tokenizer) == text_tokenizer.PLANS[suite].vocab_size
    for role, value in ROLES[suite].items():
        assert config.get(role, value) == value
    ids = tokenizer("home intent : stop")["input_ids"]
    if suite == "llama-mini":
        assert ids[0] == tokenizer.bos_token_id and ids[-1] != tokenizer.eos_token_id
    else:
        assert config["decoder_start_token_id"] == tokenizer.pad_token_id
        assert ids[-1] == tokenizer.eos_token_id
        assert tokenizer.convert_tokens_to_ids("<extra_id_7>") == len(tokenizer) - 1
