"""The text task pool: greedy answers, scores, loss and refusals."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from fusion_bench import BaseModelPool
from tiny_texts import WORDS, llama_model, word_tokenizer
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.suites import load_text_split, text
from fusion_bench_featcal.tasks import TextTaskPool

TASK = "clinc_home"
LOADERS = {
    "flan-t5-mini": AutoModelForSeq2SeqLM,
    "llama-mini": AutoModelForCausalLM,
    "qwen3moe-mini": AutoModelForCausalLM,
}


def alone(model, tokenizer, row) -> tuple[str, float]:
    """Answer to a prompt and loss of its target, without batches, caches or generate."""
    prompt, end = tokenizer(row["prompt"])["input_ids"], tokenizer.eos_token_id
    target = [*tokenizer(row["target"], add_special_tokens=False)["input_ids"], end]

    def logits(written: list[int]) -> torch.Tensor:
        with torch.no_grad():
            if not model.config.is_encoder_decoder:
                return model(torch.tensor([prompt + written])).logits[0, len(prompt) - 1 :]
            start = torch.tensor([[model.config.decoder_start_token_id, *written]])
            return model(torch.tensor([prompt]), decoder_input_ids=start).logits[0]

    written: list[int] = []
    while len(written) < 10 and (not written or written[-1] != end):
        written.append(int(logits(written)[-1].argmax()))
    losses = -logits(target[:-1]).log_softmax(dim=-1)[range(len(target)), target]
    return tokenizer.decode(written, skip_special_tokens=True), losses.mean().item()


@pytest.mark.parametrize("suite", LOADERS)
def test_answers_and_losses_are_those_of_each_row_alone(suite):
    expert = LOADERS[suite].from_pretrained(text.path(suite, TASK)).eval()
    tokenizer = AutoTokenizer.from_pretrained(text.path(suite))
    rows = load_text_split(TASK, "test").select(range(0, 432, 72))
    answers, losses = zip(*(alone(expert, tokenizer, row) for row in rows), strict=True)
    written = [bool(answer) for answer in answers]
    assert sum(written) > 4
    assert len({len(prompt.split()) for prompt in rows["prompt"]}) > 3  # padded in a batch
    targets = [answer or "NONE" for answer in answers]
    answered = Dataset.from_dict({"prompt": rows["prompt"], "target": targets})
    tasks = {TASK: rows, "answered": answered}
    pool = TextTaskPool(tasks, tokenizer=tokenizer, batch_size=4)
    report = pool.evaluate(expert, name="expert")
    assert pool.item_correct["answered"].tolist() == written
    right = [a.strip() == t.strip() for a, t in zip(answers, rows["target"], strict=True)]
    assert pool.item_correct[TASK].tolist() == right
    assert report[TASK]["accuracy"] == pytest.approx(sum(right) / 6) and sum(right) > 3
    assert report[TASK]["loss"] == pytest.approx(sum(losses) / 6, abs=5e-5)
    assert list(report) == ["model_info", *tasks, "average"]
    pool_for_models = TextTaskPool(tokenizer=tokenizer, batch_size=4, metrics={"x": "spearman"})
    with pytest.raises(ValueError, match=r"modelpool\.test_datasets"):
        pool_for_models.evaluate(expert)
    pool_for_models._program = SimpleNamespace(modelpool=SimpleNamespace(_test_datasets=tasks))
    with pytest.raises(ValueError, match=r"taskpool\.metrics\.x is unknown"):
        pool_for_models.evaluate(expert)
    pool_for_models.metrics = {}
    assert pool_for_models.evaluate(expert, name="expert") == report


@pytest.mark.parametrize(
    ("answers", "targets", "expected"),
    [
        # ranks 1, 2.5, 2.5, 4 against 1, 3, 2, 4: 4.5 / sqrt(4.5 * 5)
        (["0", "3", "3", "5"], ["1", "3", "2", "4"], (4.5 / 5) ** 0.5),
        (["inf", "1", "2"], ["1", "2", "3"], 1),  # no number counts as 0
        (["2", "2", "2"], ["1", "2", "3"], 0),
    ],
)
def test_rank_correlation_of_known_answers(answers, targets, expected):
    words = tuple(dict.fromkeys((*WORDS, *" ".join(answers).split())))
    tokenizer = word_tokenizer(words=words)
    model: Any = llama_model(rows=len(words))
    ids = [[words.index(word) for word in answer.split()] for answer in answers]
    answer_of = {n: [*row, 1, 1][:2] for n, row in enumerate(ids, start=3)}
    model.generate = lambda input_ids, **_: torch.tensor(
        [[*row, *answer_of[row[-1]]] for row in input_ids.tolist()]
    )
    rows = [{"prompt": WORDS[3 + n], "target": target} for n, target in enumerate(targets)]
    pool = TextTaskPool({"a": rows}, tokenizer=tokenizer, metrics={"a": "spearman"})
    assert pool.evaluate(model)["a"]["accuracy"] == pytest.approx(expected)


PAIR = {"prompt": "a b", "target": "c"}


@pytest.mark.parametrize(("rows", "options", "message"), [
    ([PAIR], {"model": nn.Linear(2, 2)}, "Linear cannot generate text"),
    ([], {}, "task 'a' has no test examples"),
    ([PAIR, {"prompt": "a"}], {}, r"task 'a', .*test_datasets\.a, example 1.*target"),
    ([PAIR], {"tokenizer": "nowhere/at-all"}, r"taskpool\.tokenizer=nowhere/at-all: "),
])  # fmt: skip
def test_rows_and_models_that_cannot_be_evaluated_are_refused(rows, options, message):
    model = options.get("model") or llama_model()
    tokenizer = options.get("tokenizer") or word_tokenizer()
    with pytest.raises((TypeError, CalibrationError), match=message):
        TextTaskPool({"a": rows}, tokenizer=tokenizer).evaluate(model)


LOADED: list[str] = []


def rows_by_loader(name: str, **row: str) -> list[dict[str, str]]:
    LOADED.append(name)
    return [row] if row else []


@pytest.mark.parametrize(("row", "message"), [
    ({}, r"task 'b' has no test examples\. Check taskpool\.test_datasets\.b"),
    ({"prompt": "a"}, r"taskpool\.test_datasets\.b, example 0 has no target"),
    ({"text": "a"}, r"taskpool\.test_datasets\.b, example 0 has no target"),
    (PAIR, ""),
])  # fmt: skip
def test_data_are_opened_once_up_to_the_first_row(row, message):
    LOADED.clear()
    loader = {"_target_": f"{__name__}.rows_by_loader"}
    data = {"a": {**loader, "name": "a", **PAIR}, "b": {**loader, "name": "b", **row}}
    pool = TextTaskPool(data, tokenizer=word_tokenizer())
    with pytest.raises(CalibrationError, match=message) if message else nullcontext():
        _ = pool.opened
        scores = [pool.evaluate(llama_model(seed))["average"] for seed in (0, 0)]
        assert scores[0] == scores[1]
    assert LOADED == ["a", "b"]


def test_targets_end_at_the_ends_of_all_models_of_the_pool():
    """As those of samples, whichever model is evaluated first."""
    models = [llama_model(), llama_model(1)]
    models[1].generation_config.eos_token_id = 5  # type: ignore[union-attr]
    modelpool: Any = BaseModelPool({"one": models[0], "two": models[1]})
    pool = TextTaskPool({"a": [PAIR]}, tokenizer=word_tokenizer())
    pool._program = SimpleNamespace(modelpool=modelpool)
    pool.setup()
    for model in models:
        batches, _ = pool._tokenize("a", model)
        assert batches.encoder.ends == {1, 5}
