"""Calibration samples of text pools: drawn as images are, and answered by experts if asked."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fusion_bench.modelpool import CausalLMPool, Seq2SeqLMPool
from omegaconf import OmegaConf
from tiny_texts import (
    TASKS,
    llama_model,
    load_t5,
    sentences,
    t5_model,
    with_data,
    word_tokenizer,
    write,
)

from fusion_bench_featcal import CalibrationError, FeatCalSettings
from fusion_bench_featcal.calibration_data import calibration_batches, draw_samples
from fusion_bench_featcal.fusionbench.processors import load_input_processor

SETTINGS = FeatCalSettings(samples_per_task=6, batch_size=4)
kinds = pytest.mark.parametrize("kind", ["causal", "seq2seq"])


def pool_of(kind: str, models: dict[str, Any]) -> Any:
    pool = Seq2SeqLMPool if kind == "seq2seq" else CausalLMPool
    return with_data(pool(OmegaConf.create(models), tokenizer=None))  # type: ignore[arg-type]


def batches(kind: str = "causal", rows: Any = sentences, pool: Any = None, **changes: Any) -> Any:
    chosen = with_data(pool or pool_of(kind, dict.fromkeys(TASKS, "x")), rows)
    tokenizer = word_tokenizer(ends=kind == "seq2seq")
    drawn = calibration_batches(chosen, TASKS, SETTINGS.replace(**changes), tokenizer)
    return {task: list(drawn[task]) for task in TASKS}


def texts(batches: list[dict], key: str) -> list[list[int]]:
    """One list of tokens per sample, without padding."""
    rows = []
    for batch in batches:
        keep = batch["attention_mask"].bool() if key == "input_ids" else batch[key] != -100
        rows += [row[used].tolist() for row, used in zip(batch[key], keep, strict=True)]
    return rows


def test_samples_are_drawn_as_images_are_whatever_the_batch_size():
    drawn, tokenizer = batches(), word_tokenizer()
    assert [batch["input_ids"].shape[0] for batch in drawn["one"]] == [4, 2]
    rows = [sentences("one")[index] for index in draw_samples(12, "one", SETTINGS)]
    expected = [[*tokenizer(f"{r['prompt']} {r['target']}")["input_ids"], 1] for r in rows]
    assert texts(drawn["one"], "input_ids") == expected
    assert texts(batches(batch_size=5)["one"], "input_ids") == expected
    assert texts(batches(samples_per_task=3)["one"], "input_ids") == expected[:3]
    assert texts(batches(seed=1)["one"], "input_ids") != expected


@kinds
def test_generated_targets_are_the_experts_greedy_answers(kind: str, tmp_path: Path):
    make = llama_model if kind == "causal" else t5_model
    experts = {task: make(seed).float() for seed, task in enumerate(TASKS, start=1)}
    paths = {task: write(expert, tmp_path / task) for task, expert in experts.items()}
    pool = pool_of(kind, paths if kind == "causal" else load_t5(paths))
    unlabeled = lambda task: [{"prompt": row["prompt"]} for row in sentences(task)]  # noqa: E731
    drawn = batches(kind, unlabeled, pool, calibration_targets="generated", generated_tokens=3)
    tokenizer = word_tokenizer(ends=kind == "seq2seq")
    for task, expert in experts.items():
        answers = texts(drawn[task], "labels")
        for index, labels in zip(draw_samples(12, task, SETTINGS), answers, strict=True):
            ids = torch.tensor([tokenizer(sentences(task)[index]["prompt"])["input_ids"]])
            answer: Any = expert.generate(ids, max_new_tokens=3, do_sample=False)  # type: ignore[operator]
            answer = answer[0, 1:] if kind == "seq2seq" else answer[0, ids.shape[1] :]
            assert labels == answer.tolist()[: len(labels)]
            assert len(labels) == 3 or labels[-1] == 1


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"train": []}, r"got a mapping of train: set"),
        (iter([]), "Load it without streaming"),
        (["a"] * 12, r"item \d+: a text is a mapping, got str"),
        ([], "task 'one' has 0 samples"),
    ],
)
def test_data_of_another_kind(rows: Any, message: str):
    with pytest.raises(CalibrationError, match=message):
        batches(rows=lambda task: rows)


def test_prompts_beyond_an_experts_vocabulary(tmp_path: Path):
    pool = pool_of("causal", {task: write(llama_model(), tmp_path / task) for task in TASKS})
    rows = [{"input_ids": [3, 4]}] * 5 + [{"input_ids": [3, 99]}]
    with pytest.raises(CalibrationError, match=r"task 'one', .*item 5: input_ids has .* id 99"):
        batches("causal", lambda _: rows, pool, calibration_targets="generated")


@kinds
def test_tokenizer_is_loaded_and_compared_with_the_experts(kind: str, tmp_path: Path):
    tokenizer, folder, more = word_tokenizer(ends=True), str(tmp_path / "a"), tmp_path / "b"
    tokenizer.save_pretrained(folder)
    word_tokenizer(words=(*tokenizer.convert_ids_to_tokens(range(23)), "extra")).save_pretrained(
        more
    )
    pool = pool_of(kind, {"_pretrained_": folder, "one": folder, "two": str(more)})
    entry = {"_target_": "transformers.AutoTokenizer.from_pretrained"}
    entry["pretrained_model_name_or_path"] = folder
    for named in (folder, OmegaConf.create(entry)):
        setattr(pool, "_tokenizer" if kind == "seq2seq" else "tokenizer", named)
        assert load_input_processor(pool).get_vocab() == tokenizer.get_vocab()
    words = ("<pad>", "</s>", "<unk>", *reversed("abcdefghijklmnopqrst"))
    word_tokenizer(words=words).save_pretrained(more)
    with pytest.raises(CalibrationError, match=r"'two' has another.* 20 of 23.*'a' \(3 here"):
        load_input_processor(pool)


def test_a_tokenizer_that_is_missing_is_named(tmp_path: Path):
    pool = pool_of("causal", {"one": str(tmp_path)})
    for tokenizer, message in (
        (None, r"set modelpool\.tokenizer"),
        ("nowhere", r"modelpool\.tokenizer=nowhere: there is no"),
    ):
        pool.tokenizer = tokenizer
        with pytest.raises(CalibrationError, match=message):
            load_input_processor(pool)
