"""Pools of language models: unequal vocabularies, mergers, and what is saved."""

import json
from typing import Any

import pytest
import torch
from configs import composed
from fusion_bench.modelpool import CausalLMPool as FusionBenchPool
from fusion_bench.modelpool import Seq2SeqLMPool
from image_pools import ARITHMETIC
from omegaconf import OmegaConf
from text_pools import causal_pool, llamas, t5_pool
from tiny_texts import word_tokenizer, write
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.algorithm import FeatCalAlgorithm
from fusion_bench_featcal.fusionbench.processors import load_input_processor
from fusion_bench_featcal.fusionbench.program import run_merger
from fusion_bench_featcal.fusionbench.saving import save_model
from fusion_bench_featcal.pools import CausalLMPool

RUN: dict[str, Any] = {
    "samples_per_task": 6, "calibrate_norm": False, "ridge_lambda": 1e-2, "base_method": ARITHMETIC
}  # fmt: skip


def same(ours: Any, theirs: Any) -> bool:
    pairs = zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


def test_unequal_vocabularies_are_refused_or_cut_to_common_rows(tmp_path):
    models = llamas(tmp_path / "a", {"two": 30})
    expected = r"expert 'two' has 30 embedding rows, the base 23.*vocabulary=common_rows"
    with pytest.raises(CalibrationError, match=expected):
        FeatCalAlgorithm(**RUN).run(causal_pool(models, FusionBenchPool))
    pool = causal_pool(models, vocabulary="common_rows")
    assert pool.vocabulary_rows == 23
    two: Any = AutoModelForCausalLM.from_pretrained(models["two"])
    for layer in (two.model.embed_tokens, two.lm_head):
        layer.weight = torch.nn.Parameter(layer.weight[:23].clone())
    two.config.vocab_size = 23
    cut = causal_pool(models | {"two": write(two, tmp_path / "cut")}, FusionBenchPool)
    expected = FeatCalAlgorithm(**RUN).run(cut)
    for stream in (True, False):
        model: Any = FeatCalAlgorithm(stream_experts=stream, **RUN).run(pool)
        assert same(model, expected) and model.config.vocab_size == 23
    pool = causal_pool(llamas(tmp_path / "b", {"one": 20}), vocabulary="common_rows")
    with pytest.raises(CalibrationError, match=r"tokens up to 22, but .* only 20 embedding rows"):
        load_input_processor(pool)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocabulary": "largest"}, r"modelpool\.vocabulary must be of .* got 'largest'"),
        ({"vocabulary": "common_rows", "enable_lazy_loading": True}, "enable_lazy_loading=false"),
    ],
)
def test_options_of_the_pool_are_checked(options: Any, message: str):
    with pytest.raises(ValueError, match=message):
        CausalLMPool({}, tokenizer=None, **options)


MERGERS = {
    "task_arithmetic": (),
    "simple_average": (),
    "ties_merging": (),
    "featcal_mergers/wudi_language_models": ("method.iter_num=2",),
    "linear/task_arithmetic_for_causallm": ("method.model_save_path=null",),
    "linear/simple_average_for_causallm": ("method.model_save_path=null",),
}


def test_mergers_that_documentation_names_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    t5s = t5_pool(tmp_path / "t5")
    decoders = causal_pool(llamas(tmp_path, {"two": 30}), vocabulary="common_rows")
    for method, words in MERGERS.items():
        config = composed(f"method={method}", *words).method
        for pool in (decoders,) if "causal" in method else (decoders, t5s):
            merged: Any = run_merger(None, config, pool, "method.base_method")
            assert not same(merged, pool.load_model("_pretrained_")), method
            if pool is t5s:
                assert not torch.equal(merged.lm_head.weight, merged.shared.weight), method


def test_t5s_are_saved_with_their_tokenizer_and_may_be_plain_names(tmp_path):
    pool = t5_pool(tmp_path)
    model: Any = FeatCalAlgorithm(**RUN).run(pool)
    assert not torch.equal(model.lm_head.weight, model.shared.weight)
    save_model(pool, model, tmp_path / "saved", load_input_processor(pool))
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "saved")
    assert same(loaded, model)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert tokenizer("a b")["input_ids"] == word_tokenizer(ends=True)("a b")["input_ids"]
    inputs = {name: torch.tensor([[3, 4]]) for name in ("input_ids", "labels")}
    torch.testing.assert_close(loaded(**inputs).logits, model(**inputs).logits)
    names = {n: entry["pretrained_model_name_or_path"] for n, entry in pool._models.items()}
    plain: Any = Seq2SeqLMPool(OmegaConf.create(names), tokenizer=pool._tokenizer)
    plain._train_datasets, plain.load_train_dataset = pool._train_datasets, pool.load_train_dataset
    assert same(FeatCalAlgorithm(**RUN).run(plain), model)


def test_tied_models_stay_tied_when_saved(tmp_path):
    models = llamas(tmp_path, {})
    config = AutoModelForCausalLM.from_pretrained(models["one"]).config
    config.tie_word_embeddings = True
    tied = AutoModelForCausalLM.from_config(config)
    save_model(causal_pool(models), tied, tmp_path / "saved", word_tokenizer())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert same(loaded, tied)
