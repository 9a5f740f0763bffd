"""Samples, generated answers and vocabularies of pools, and `method.calibration_data`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import assert_identical
from fusion_bench.modelpool import CausalLMPool, CLIPVisionModelPool
from model_types import model_named
from omegaconf import DictConfig, OmegaConf
from PIL import Image
from sample_pools import Pool, batches_of
from tiny_images import channels_first, picture
from tiny_models import add_up, scatter
from tiny_pools import ARITHMETIC, inputs_of
from tiny_texts import (
    NAMES,
    TASKS,
    causal_pool,
    llama_model,
    llamas,
    sentences,
    t5_pool,
    with_data,
    word_tokenizer,
    write,
)
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from fusion_bench_featcal import CalibrationError, FeatCalSettings
from fusion_bench_featcal.algorithm import FeatCalAlgorithm
from fusion_bench_featcal.data.draws import sample_order
from fusion_bench_featcal.fusionbench.saved_model import save_model
from fusion_bench_featcal.tasks import corrupted

# --- samples ---


def numbered(count: int) -> list[dict]:
    """Items without labels, whose picture shows their number."""
    return [{"image": Image.new("RGB", (4, 4), 3 * (number,))} for number in range(count)]


FEW: dict[str, Any] = {"samples_per_task": 10, "batch_size": 4}


def numbers_of(pool: Any, tasks: Any = ("a",), **changes: Any) -> dict[str, list[int]]:
    """The numbers of the pictures in each task's batches."""
    batches = batches_of(pool, tasks, channels_first, **FEW | changes)
    pixels = {task: torch.cat([b["pixel_values"] for b in batches[task]]) for task in tasks}
    return {t: (values[:, 0, 0, 0] * 255).round().int().tolist() for t, values in pixels.items()}


def test_samples_depend_on_seed_and_task_alone():
    alone = numbers_of(Pool(a=numbered(50)))["a"]
    assert len(set(alone)) == 10
    pool: Any = Pool(z=numbered(20), a=numbered(50), b=numbered(50))
    assert numbers_of(pool, ("b", "z", "a"))["a"] == alone
    assert numbers_of(pool, ("a", "b"), batch_size=7)["a"] == alone
    assert numbers_of(pool, samples_per_task=20)["a"][:10] == alone
    assert numbers_of(pool, ("a", "b"))["b"] != alone
    assert numbers_of(pool, seed=43)["a"] != alone
    pool.val_dataset_names, pool.load_val_dataset = ["a"], lambda _: numbered(10)
    assert sorted(numbers_of(pool, calibration_split="val")["a"]) == list(range(10))
    published = numbers_of(Pool(mini_mnist=numbered(100)), ["mini_mnist"], samples_per_task=5)
    assert published == {"mini_mnist": [55, 45, 44, 90, 39]}  # the samples of every number in docs


def test_corrupted_samples_are_the_same_samples_corrupted():
    rows = [{"image": picture(number)} for number in range(6)]
    change: Any = {"kind": "gaussian_noise", "severity": 3}

    def pixels(data: Any, **changes: Any) -> torch.Tensor:
        chosen = FEW | {"samples_per_task": 4, "seed": 5} | changes
        (batch,) = batches_of(Pool(a=data), ["a"], channels_first, **chosen)["a"]
        return batch["pixel_values"]

    changed = pixels(rows, calibration_corruption=change)
    assert torch.equal(changed, pixels(corrupted(rows, *change.values(), seed=5, task="a")))
    assert not torch.equal(changed, pixels(rows))


def test_too_few_samples_are_all_used_with_one_warning(caplog: pytest.LogCaptureFixture):
    pool: Any = Pool(a=numbered(9), b=numbered(10))
    assert sorted(numbers_of(pool, ("a", "b"))["a"]) == list(range(9))
    numbers_of(pool)  # a run opens its data more than once
    assert [record.getMessage() for record in caplog.records] == [
        "task a has 9 samples, fewer than samples_per_task=10: all of them are used"
    ]


LOAD = {"_target_": "fusion_bench_featcal.tasks.load_images", "path": "./nowhere"}
UNEQUAL = [{"image": picture(n, (4 + (n == 7), 4))} for n in range(10)]


def configured(entry: Any) -> Any:
    return CLIPVisionModelPool(DictConfig({}), train_datasets=OmegaConf.create({"a": entry}))


REFUSED: list[tuple[Any, str, str]] = [
    (Pool(abc=[], d=[]), "abd", r"task 'abd' has no calibration data \(nearest: 'abc'\): set "
     r"modelpool\.train_datasets\.abd or method\.calibration_split \(now train\).*are: abc, d"),
    (Pool(a=[]), "a", r"'a' has no samples in modelpool\.train_datasets\.a"),
    (Pool(a=UNEQUAL), "a", r"task 'a'.*processor must return .* one size.*\[3, 4, [45]\]"),
    (configured(LOAD), "a",
     r"(?s)modelpool\.train_datasets\.a.*cannot be loaded: data './nowhere' is neither"),
]  # fmt: skip


@pytest.mark.parametrize(("pool", "task", "message"), REFUSED)
def test_data_that_cannot_be_used_is_named(pool: Any, task: str, message: str):
    with pytest.raises(CalibrationError, match=message):
        list(batches_of(pool, [task], channels_first, samples_per_task=10, batch_size=10)[task])


# --- language models ---

RUN: dict[str, Any] = {
    "samples_per_task": 6, "calibrate_norm": False, "ridge_lambda": 1e-2, "base_method": ARITHMETIC
}  # fmt: skip


@pytest.mark.parametrize("kind", ["causal", "seq2seq"])
def test_generated_targets_are_the_greedy_answers_of_the_experts(kind: str, tmp_path: Path):
    pool = causal_pool(llamas(tmp_path, {})) if kind == "causal" else t5_pool(tmp_path)
    pool.load_train_dataset = lambda task: [{"prompt": r["prompt"]} for r in sentences(task)]
    generated = {"samples_per_task": 6, "calibration_targets": "generated", "generated_tokens": 3}
    tokenizer = word_tokenizer(ends=kind == "seq2seq")
    batches = batches_of(pool, TASKS, tokenizer, **FEW | generated)
    for task in TASKS:
        expert = pool.load_model(task)
        rows = [row for batch in batches[task] for row in batch["labels"]]
        for index, row in zip(sample_order(12, task, 42)[:6], rows, strict=True):
            ids = torch.tensor([tokenizer(sentences(task)[index]["prompt"])["input_ids"]])
            answer: Any = expert.generate(ids, max_new_tokens=3, do_sample=False)
            answer = answer[0, 1:] if kind == "seq2seq" else answer[0, ids.shape[1] :]
            labels = row[row != -100].tolist()
            assert labels == answer.tolist()[: len(labels)]
            assert len(labels) == 3 or labels[-1] == 1


def test_an_expert_of_another_vocabulary_is_refused_or_cut_to_common_rows(tmp_path: Path):
    models = llamas(tmp_path / "a", {"two": 30})
    with pytest.raises(CalibrationError, match=r"expert 'two': .*embed_tokens.* shape \(30, 8\)"):
        FeatCalAlgorithm(**RUN).run(causal_pool(models, CausalLMPool))
    pool = causal_pool(models, vocabulary="common_rows")
    assert pool.vocabulary_rows == 23
    two: Any = AutoModelForCausalLM.from_pretrained(models["two"])
    for layer in (two.model.embed_tokens, two.lm_head):
        layer.weight = torch.nn.Parameter(layer.weight[:23].clone())
    two.config.vocab_size = 23
    cut = causal_pool(models | {"two": write(two, tmp_path / "cut")}, CausalLMPool)
    model: Any = FeatCalAlgorithm(**RUN).run(pool)
    assert_identical(model, FeatCalAlgorithm(**RUN).run(cut))
    assert model.config.vocab_size == 23


@pytest.mark.parametrize("name", ["gemma3", pytest.param("mistral3", marks=pytest.mark.slow)])
def test_a_plain_name_of_a_model_of_images_and_texts(name: str, tmp_path: Path):
    """It is loaded whole, and its text part is calibrated."""
    models = {n: scatter(model_named(name), k, 0.05) for k, n in enumerate(NAMES)}
    pool = causal_pool({n: write(model, tmp_path / n) for n, model in models.items()})
    base = models.pop("_pretrained_")
    assert type(pool.load_model("one")) is type(base)
    model: Any = FeatCalAlgorithm(**RUN).run(pool)
    merged = add_up(base, models, ARITHMETIC["scaling_factor"]).state_dict()
    for tensor, value in model.state_dict().items():
        is_calibrated = ".language_model." in tensor and tensor.endswith("_proj.weight")
        assert torch.allclose(value, merged[tensor], atol=1e-6) != is_calibrated, tensor
    rows = causal_pool(dict.fromkeys(NAMES, str(tmp_path / "one")), vocabulary="common_rows")
    assert rows.vocabulary_rows == 30


def test_an_expert_of_another_tokenizer_is_refused(tmp_path: Path):
    models = llamas(tmp_path, {})
    words = ("<pad>", "</s>", "<unk>", *reversed("abcdefghijklmnopqrst"))
    word_tokenizer(words=words).save_pretrained(models["two"])
    message = r"'two' .*has a different.* 20 of 23.*'a' \(22 instead of 3\)"
    with pytest.raises(CalibrationError, match=message):
        inputs_of(causal_pool(models)).batches(FeatCalSettings())
    pool: Any = with_data(CausalLMPool(OmegaConf.create(models), tokenizer=None))
    with pytest.raises(CalibrationError, match=r"set modelpool\.tokenizer"):
        inputs_of(pool).batches(FeatCalSettings())


def test_calibrated_t5s_are_saved_with_their_tokenizer(tmp_path: Path):
    pool = t5_pool(tmp_path)
    model: Any = FeatCalAlgorithm(**RUN).run(pool)
    assert not torch.equal(model.lm_head.weight, model.shared.weight)
    save_model(pool, model, tmp_path / "saved", inputs_of(pool).processor)
    assert_identical(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "saved"), model)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert tokenizer("a b")["input_ids"] == word_tokenizer(ends=True)("a b")["input_ids"]


def test_data_of_the_user_gives_the_model_of_the_same_data_of_the_pool(tmp_path: Path):
    models = {n: write(llama_model(k), tmp_path / n, word_tokenizer()) for k, n in enumerate(NAMES)}

    def calibrated(with_rows: bool, **more: Any) -> Any:
        base, lazy = models["_pretrained_"], not with_rows
        pool: Any = CausalLMPool(OmegaConf.create(models), tokenizer=base, enable_lazy_loading=lazy)
        pool = with_data(pool) if with_rows else pool
        return FeatCalAlgorithm(base_method=ARITHMETIC, samples_per_task=4, **more).run(pool)

    for task in TASKS:
        lines = "\n".join(map(json.dumps, sentences(task)))
        (tmp_path / f"{task}.jsonl").write_text(lines)
    first, second = (str(tmp_path / f"{task}.jsonl") for task in TASKS)
    table = {"_target_": "datasets.load_dataset", "path": "json", "split": "train"}
    own = OmegaConf.create({TASKS[0]: first, TASKS[1]: table | {"data_files": second}})
    assert_identical(calibrated(False, calibration_data=own), calibrated(True))
    with pytest.raises(CalibrationError, match=r"task 'one' .*\+method\.calibration_data\.one"):
        calibrated(False)
    with pytest.raises(ValueError, match=r"calibration_data\.onne is unknown \(nearest: 'one'\)"):
        calibrated(False, calibration_data={"onne": "a.jsonl"})
