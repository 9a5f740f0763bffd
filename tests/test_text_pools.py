"""Pools of language models: samples, generated answers, vocabularies, mergers, and saving."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import composed
from fusion_bench.modelpool import CausalLMPool as FusionBenchPool
from fusion_bench.modelpool import Seq2SeqLMPool
from omegaconf import OmegaConf
from tiny_pools import ARITHMETIC
from tiny_texts import (
    TASKS,
    causal_pool,
    llama_model,
    llamas,
    load_t5,
    sentences,
    t5_model,
    t5_pool,
    with_data,
    word_tokenizer,
    write,
)
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from fusion_bench_featcal import CalibrationError, FeatCalSettings
from fusion_bench_featcal.algorithm import FeatCalAlgorithm
from fusion_bench_featcal.fusionbench import load_input_processor, run_merger, save_model
from fusion_bench_featcal.fusionbench.data import calibration_batches, draw_samples

SETTINGS = FeatCalSettings(samples_per_task=6, batch_size=4)
kinds = pytest.mark.parametrize("kind", ["causal", "seq2seq"])


def pool_of(kind: str, models: dict[str, Any]) -> Any:
    pool = Seq2SeqLMPool if kind == "seq2seq" else FusionBenchPool
    return with_data(pool(OmegaConf.create(models), tokenizer=None))  # type: ignore[arg-type]


@kinds
def test_generated_targets_are_the_experts_greedy_answers(kind: str, tmp_path: Path):
    make = llama_model if kind == "causal" else t5_model
    experts = {task: make(seed).float() for seed, task in enumerate(TASKS, start=1)}
    paths = {task: write(expert, tmp_path / task) for task, expert in experts.items()}
    pool = pool_of(kind, paths if kind == "causal" else load_t5(paths))
    pool.load_train_dataset = lambda task: [{"prompt": r["prompt"]} for r in sentences(task)]
    generated = SETTINGS.replace(calibration_targets="generated", generated_tokens=3)
    tokenizer = word_tokenizer(ends=kind == "seq2seq")
    batches = calibration_batches(pool, TASKS, generated, tokenizer)
    for task, expert in experts.items():
        rows = [row for batch in batches[task] for row in batch["labels"]]
        for index, row in zip(draw_samples(12, task, SETTINGS), rows, strict=True):
            ids = torch.tensor([tokenizer(sentences(task)[index]["prompt"])["input_ids"]])
            answer: Any = expert.generate(ids, max_new_tokens=3, do_sample=False)  # type: ignore[operator]
            answer = answer[0, 1:] if kind == "seq2seq" else answer[0, ids.shape[1] :]
            labels = row[row != -100].tolist()
            assert labels == answer.tolist()[: len(labels)]
            assert len(labels) == 3 or labels[-1] == 1


@kinds
def test_tokenizer_is_loaded_and_compared_with_the_experts(kind: str, tmp_path: Path):
    tokenizer, folder, more = word_tokenizer(ends=True), str(tmp_path / "a"), tmp_path / "b"
    tokenizer.save_pretrained(folder)
    words = *tokenizer.convert_ids_to_tokens(range(23)), "extra"
    word_tokenizer(words=words).save_pretrained(more)
    pool = pool_of(kind, {"_pretrained_": folder, "one": folder, "two": str(more)})
    entry = {"_target_": "transformers.AutoTokenizer.from_pretrained"}
    entry["pretrained_model_name_or_path"] = folder
    setattr(pool, "_tokenizer" if kind == "seq2seq" else "tokenizer", OmegaConf.create(entry))
    assert load_input_processor(pool).get_vocab() == tokenizer.get_vocab()
    words = ("<pad>", "</s>", "<unk>", *reversed("abcdefghijklmnopqrst"))
    word_tokenizer(words=words).save_pretrained(more)
    with pytest.raises(CalibrationError, match=r"'two' .*has another.* 20 of 23.*'a' \(3 here"):
        load_input_processor(pool)


def test_a_tokenizer_that_is_missing_is_named(tmp_path: Path):
    pool = pool_of("causal", {"one": str(tmp_path)})
    with pytest.raises(CalibrationError, match=r"set modelpool\.tokenizer"):
        load_input_processor(pool)


RUN: dict[str, Any] = {
    "samples_per_task": 6, "calibrate_norm": False, "ridge_lambda": 1e-2, "base_method": ARITHMETIC
}  # fmt: skip


def are_equal(first: Any, second: Any) -> bool:
    pairs = zip(first.state_dict().items(), second.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


def test_unequal_vocabularies_are_refused_or_cut_to_common_rows(tmp_path):
    models = llamas(tmp_path / "a", {"two": 30})
    with pytest.raises(CalibrationError, match=r"expert 'two': .*embed_tokens.* shape \(30, 8\)"):
        FeatCalAlgorithm(**RUN).run(causal_pool(models, FusionBenchPool))
    pool = causal_pool(models, vocabulary="common_rows")
    assert pool.vocabulary_rows == 23
    two: Any = AutoModelForCausalLM.from_pretrained(models["two"])
    for layer in (two.model.embed_tokens, two.lm_head):
        layer.weight = torch.nn.Parameter(layer.weight[:23].clone())
    two.config.vocab_size = 23
    cut = causal_pool(models | {"two": write(two, tmp_path / "cut")}, FusionBenchPool)
    model: Any = FeatCalAlgorithm(**RUN).run(pool)
    assert are_equal(model, FeatCalAlgorithm(**RUN).run(cut)) and model.config.vocab_size == 23
    pool = causal_pool(llamas(tmp_path / "b", {"one": 20}), vocabulary="common_rows")
    with pytest.raises(CalibrationError, match=r"tokens up to 22, but .* only 20 embedding rows"):
        load_input_processor(pool)


def test_mergers_that_documentation_names_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    t5s = t5_pool(tmp_path / "t5")
    decoders = causal_pool(llamas(tmp_path, {"two": 30}), vocabulary="common_rows")
    for pool, method, *words in (
        (t5s, "ties_merging"),
        (decoders, "featcal_mergers/wudi_language_models", "method.iter_num=2"),
    ):
        config = composed(f"method={method}", *words).method
        merged: Any = run_merger(None, config, pool, "method.base_method")
        assert not are_equal(merged, pool.load_model("_pretrained_")), method
        if pool is t5s:
            assert not torch.equal(merged.lm_head.weight, merged.shared.weight)


def test_t5s_are_saved_with_their_tokenizer(tmp_path):
    pool = t5_pool(tmp_path)
    model: Any = FeatCalAlgorithm(**RUN).run(pool)
    assert not torch.equal(model.lm_head.weight, model.shared.weight)
    save_model(pool, model, tmp_path / "saved", load_input_processor(pool))
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "saved")
    assert are_equal(loaded, model)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert tokenizer("a b")["input_ids"] == word_tokenizer(ends=True)("a b")["input_ids"]
