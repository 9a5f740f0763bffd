"""Calibration samples of text pools: drawn as images are, and answered by experts if asked."""

from typing import Any

import datasets
import pytest
import torch
from fusion_bench.modelpool import CausalLMPool, Seq2SeqLMPool
from omegaconf import OmegaConf
from tiny_texts import TASKS, llama_model, sentences, t5_model, with_data, word_tokenizer, write

from fusion_bench_featcal import CalibrationError, FeatCalSettings
from fusion_bench_featcal.calibration_data import calibration_batches, draw_samples
from fusion_bench_featcal.fusionbench.processors import load_input_processor

SETTINGS = FeatCalSettings(samples_per_task=6, batch_size=4)
T5 = {"_target_": "transformers.AutoModelForSeq2SeqLM.from_pretrained"}


def pool_of(kind: str, models: dict[str, Any], **options: Any) -> Any:
    pool = Seq2SeqLMPool if kind == "seq2seq" else CausalLMPool
    return with_data(pool(OmegaConf.create(models), tokenizer=None, **options))  # type: ignore[arg-type]


def batches(kind="causal", pool=None, rows: Any = sentences, **changes) -> dict[str, list]:
    chosen = with_data(pool or pool_of(kind, {"one": "x", "two": "x"}), rows)
    tokenizer = word_tokenizer(ends=kind == "seq2seq")
    found = calibration_batches(chosen, TASKS, SETTINGS.replace(**changes), tokenizer)
    return {task: list(found[task]) for task in TASKS}


def texts(parts: list[dict], key: str) -> list[list[int]]:
    """One list of tokens a sample, without padding."""
    mask = "attention_mask" if key == "input_ids" else None
    return [
        row[keep.bool()].tolist()
        for part in parts
        for row, keep in zip(part[key], part[mask] if mask else part[key] != -100, strict=True)
    ]


def test_prompts_beyond_an_experts_vocabulary(tmp_path):
    models = {task: write(llama_model(), tmp_path / task) for task in TASKS}
    pool = pool_of("causal", models)
    given = [{"input_ids": [3, 4]}] * 5 + [{"input_ids": [3, 99]}]
    with pytest.raises(CalibrationError, match=r"task 'one', .*item 5: input_ids has .* id 99"):
        batches(pool=pool, rows=lambda _: given, calibration_targets="generated")


def test_samples_are_drawn_as_images_are_whatever_the_batch_size():
    found = batches()
    assert [part["input_ids"].shape[0] for part in found["one"]] == [4, 2]
    order = draw_samples(12, "one", SETTINGS)
    tokenizer = word_tokenizer()
    expected = [
        [*tokenizer(f"{row['prompt']} {row['target']}")["input_ids"], 1]
        for row in (sentences("one")[index] for index in order)
    ]
    assert texts(found["one"], "input_ids") == expected
    assert texts(batches(batch_size=5)["one"], "input_ids") == expected
    assert texts(batches(samples_per_task=3)["one"], "input_ids") == expected[:3]
    assert texts(batches(seed=1)["one"], "input_ids") != expected


def test_tokenised_rows_give_the_same_batches_as_plain_texts():
    tokenizer = word_tokenizer(ends=True)

    def tokenised(task):
        padded = {"padding": "max_length", "max_length": 16}
        rows = []
        for row in sentences(task):
            labels = tokenizer(row["target"], **padded)["input_ids"]
            rows.append(
                {**tokenizer(row["prompt"], **padded), "labels": [i if i else -100 for i in labels]}
            )
        return datasets.Dataset.from_list(rows).with_format("torch")

    plain, ready = batches("seq2seq"), batches("seq2seq", rows=tokenised)
    for ours, theirs in zip(plain["two"], ready["two"], strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("name", ["completion", "response", "output", "answer"])
def test_answers_in_columns_of_other_names(name):
    def renamed(task):
        return [{"prompt": row["prompt"], name: row["target"], "x": 3} for row in sentences(task)]

    for kind in ("causal", "seq2seq"):
        for ours, other in zip(
            batches(kind)["one"], batches(kind, rows=renamed)["one"], strict=True
        ):
            assert ours.keys() == other.keys()
            assert all(torch.equal(ours[key], other[key]) for key in ours)


@pytest.mark.parametrize("kind", ["causal", "seq2seq"])
def test_generated_targets_are_the_experts_own_greedy_answers(kind, tmp_path):
    make = llama_model if kind == "causal" else t5_model
    experts = {task: make(seed).float() for seed, task in enumerate(TASKS, start=1)}
    entry = {} if kind == "causal" else T5
    models = {
        task: {**entry, "pretrained_model_name_or_path": write(expert, tmp_path / task)}
        if entry
        else write(expert, tmp_path / task)
        for task, expert in experts.items()
    }
    pool = pool_of(kind, models)
    unlabeled = lambda task: [{"prompt": row["prompt"]} for row in sentences(task)]  # noqa: E731
    found = batches(kind, pool, rows=unlabeled, calibration_targets="generated", generated_tokens=3)
    tokenizer = word_tokenizer(ends=kind == "seq2seq")
    for task, expert in experts.items():
        for index, labels in zip(
            draw_samples(12, task, SETTINGS), texts(found[task], "labels"), strict=True
        ):
            ids = torch.tensor([tokenizer(sentences(task)[index]["prompt"])["input_ids"]])
            answer: Any = expert.generate(ids, max_new_tokens=3, do_sample=False)  # type: ignore[operator]
            answer = answer[0, 1:] if kind == "seq2seq" else answer[0, ids.shape[1] :]
            assert labels == answer.tolist()[: len(labels)]
            assert len(labels) == 3 or labels[-1] == 1


def test_an_encoder_decoder_without_targets_is_told_what_to_set():
    rows = lambda task: [{"prompt": row["prompt"]} for row in sentences(task)]  # noqa: E731
    with pytest.raises(CalibrationError, match=r"task 'one', modelpool\.train_datasets\.one, item"):
        batches("seq2seq", rows=rows)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"train": []}, r"got a mapping of train: set"),
        (iter([]), "Load it without streaming"),
        (["a"] * 12, r"item \d+: a text is a mapping, got str"),
        ([], "task 'one' has 0 samples"),
    ],
)
def test_data_of_another_kind(rows, message):
    with pytest.raises(CalibrationError, match=message):
        batches(rows=lambda task: rows)


@pytest.mark.parametrize("kind", ["causal", "seq2seq"])
def test_tokenizer_is_loaded_and_compared_with_the_experts_own(kind, tmp_path):
    tokenizer = word_tokenizer(ends=True)
    folder = str(tmp_path / "base")
    tokenizer.save_pretrained(folder)
    more = word_tokenizer(words=(*tokenizer.convert_ids_to_tokens(range(23)), "extra"))
    more.save_pretrained(tmp_path / "more")
    pool = pool_of(kind, {"_pretrained_": folder, "one": folder, "two": str(tmp_path / "more")})
    name = "_tokenizer" if kind == "seq2seq" else "tokenizer"
    for entry in (
        folder,
        OmegaConf.create(
            {
                "_target_": "transformers.AutoTokenizer.from_pretrained",
                "pretrained_model_name_or_path": folder,
            }
        ),
    ):
        setattr(pool, name, entry)
        assert load_input_processor(pool).get_vocab() == tokenizer.get_vocab()
    other = word_tokenizer(words=("<pad>", "</s>", "<unk>", *reversed("abcdefghijklmnopqrst")))
    other.save_pretrained(tmp_path / "more")
    with pytest.raises(CalibrationError, match=r"'two' has another.* 20 of 23.*'a' \(3 here"):
        load_input_processor(pool)


def test_a_tokenizer_that_is_missing_is_named(tmp_path):
    pool = pool_of("causal", {"one": str(tmp_path)})
    with pytest.raises(CalibrationError, match=r"set modelpool\.tokenizer"):
        load_input_processor(pool)
    pool.tokenizer = str(tmp_path / "nowhere")
    with pytest.raises(CalibrationError, match=r"modelpool\.tokenizer=.*nowhere: there is no"):
        load_input_processor(pool)
