"""The shipped tokenizers: texts come back, and each label word is one token."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from fusion_bench_featcal.suites import text, text_tokenizer

ROLES = {
    "flan-t5-mini": {"pad_token_id": 0, "eos_token_id": 1, "unk_token_id": 2},
    "llama-mini": {"unk_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3},
}


@pytest.fixture(scope="module", params=text.SUITES)
def suite(request):
    return request.param


@pytest.fixture(scope="module")
def tokenizer(suite):
    return AutoTokenizer.from_pretrained(text.path(suite))


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


def test_a_vocabulary_too_small_for_the_label_words_is_refused(tmp_path, monkeypatch):
    small = text_tokenizer.TokenizerPlan(110, {"unk_token": "<unk>"}, "$A")
    monkeypatch.setitem(text_tokenizer.PLANS, "small", small)
    with pytest.raises(ValueError, match=r"label word .* is not one token of 110"):
        text_tokenizer.write_tokenizer(tmp_path, "small", ["clinc_auto"])
