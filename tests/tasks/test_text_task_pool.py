"""The text task pool: greedy answers, scores, loss, and what it refuses."""

import copy
import math
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.data.text_samples import TextEncoder, TextKind
from fusion_bench_featcal.fusionbench.evaluation import evaluate
from fusion_bench_featcal.suites import load_text_split, text
from fusion_bench_featcal.tasks import TextTaskPool
from fusion_bench_featcal.tasks.text_generation import answer_texts, target_loss

TASK = "clinc_home"
LOADERS = {"flan-t5-mini": AutoModelForSeq2SeqLM, "llama-mini": AutoModelForCausalLM}
KINDS: dict[str, TextKind] = {"flan-t5-mini": "seq2seq", "llama-mini": "causal"}


@pytest.fixture(scope="module", params=list(LOADERS))
def suite(request):
    return request.param


@pytest.fixture(scope="module")
def expert(suite):
    return LOADERS[suite].from_pretrained(text.path(suite, TASK)).eval()


@pytest.fixture(scope="module")
def tokenizer(suite):
    return AutoTokenizer.from_pretrained(text.path(suite))


@pytest.fixture(scope="module")
def rows() -> Any:
    return load_text_split(TASK, "test").select(range(0, 432, 18))


def test_token_ids_that_a_model_lacks_name_task_and_row(expert, tokenizer):
    rows = [{"input_ids": [9, 9], "labels": [-100, 8]}, {"input_ids": [9, 99_999]}]
    rows[1]["labels"] = [-100, 99_999]
    pool = TextTaskPool({TASK: rows}, tokenizer=tokenizer)
    with pytest.raises(CalibrationError, match=rf"task '{TASK}', test row 1: .* token id 99999"):
        evaluate(pool, expert, name="expert")


def one_by_one(model, tokenizer, suite, prompt):
    """The answer without batches, caches or generate."""
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    written = [model.config.decoder_start_token_id] if suite == "flan-t5-mini" else []
    start = len(written)
    for _ in range(10):
        tail = torch.tensor([written], dtype=torch.long)
        with torch.no_grad():
            if suite == "flan-t5-mini":
                logits = model(input_ids=ids, decoder_input_ids=tail).logits
            else:
                logits = model(torch.cat([ids, tail], dim=1)).logits
        written.append(int(logits[0, -1].argmax()))
        if written[-1] == tokenizer.eos_token_id:
            break
    return tokenizer.decode(written[start:], skip_special_tokens=True)


def test_answers_are_those_of_each_prompt_alone(suite, expert, tokenizer, rows):
    prompts = list(rows["prompt"])
    encoder = TextEncoder(tokenizer, KINDS[suite])
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    assert len({len(row) for row in ids}) > 5  # most rows of a batch are padded
    together = answer_texts(expert, encoder, ids, batch_size=24, most=10)
    assert together == answer_texts(expert, encoder, ids, batch_size=7, most=10)
    some = range(0, 24, 4)
    assert [together[row] for row in some] == [
        one_by_one(expert, tokenizer, suite, prompts[row]) for row in some
    ]


def test_the_loss_is_the_targets_own(suite, expert, tokenizer, rows):
    encoder = TextEncoder(tokenizer, KINDS[suite])
    chosen = list(rows.select(range(6)))
    samples = [encoder.sample(row, "row") for row in chosen]
    expected = []
    for row in chosen:
        ids = tokenizer(row["prompt"])["input_ids"]
        due = [*tokenizer(row["target"], add_special_tokens=False)["input_ids"]]
        due.append(tokenizer.eos_token_id)
        with torch.no_grad():
            if suite == "flan-t5-mini":
                start = [expert.config.decoder_start_token_id, *due[:-1]]
                out = expert(torch.tensor([ids]), decoder_input_ids=torch.tensor([start]))
            else:
                out = expert(torch.tensor([ids + due[:-1]]))
        chances = out.logits[0, -len(due) :].log_softmax(dim=-1)
        expected.append(-chances[range(len(due)), due].mean().item())
    measured = target_loss(expert, encoder, samples, batch_size=4)
    assert measured == pytest.approx(sum(expected) / 6, abs=5e-5)


def test_it_reports_accuracy_loss_and_each_row(suite, expert, tokenizer, rows):
    pool = TextTaskPool({TASK: rows, "again": rows}, tokenizer=tokenizer, batch_size=16)
    side = tokenizer.padding_side
    report = pool.evaluate(expert, name="expert")
    assert list(report) == ["model_info", TASK, "again", "average"]
    assert report["model_info"]["name"] == "expert"
    correct = pool.item_correct[TASK]
    assert correct.dtype == torch.bool and correct.shape == (24,)
    assert report[TASK]["accuracy"] == pytest.approx(correct.double().mean().item())
    assert report[TASK]["accuracy"] > 0.7 and 0 < report[TASK]["loss"] < 2
    assert report["average"] == pytest.approx(report[TASK]) and report["again"] == report[TASK]
    assert tokenizer.padding_side == side


def test_the_experts_own_answers_match_on_the_tasks_asked_for(suite, expert, tokenizer, rows):
    encoder = TextEncoder(tokenizer, KINDS[suite])
    ids = [tokenizer(prompt)["input_ids"] for prompt in rows["prompt"]]
    answers = answer_texts(expert, encoder, ids, batch_size=24, most=10)
    own = Dataset.from_dict({"prompt": rows["prompt"], "target": [a or "NONE" for a in answers]})
    written = sum(bool(answer) for answer in answers) / 24
    assert written > 0.9
    pool = TextTaskPool({TASK: own}, tokenizer=tokenizer)
    assert pool.evaluate(expert)[TASK]["accuracy"] == written
    # one task of several, as our algorithm asks an expert for its own
    wrong = Dataset.from_dict({"prompt": rows["prompt"], "target": ["NO SUCH"] * 24})
    pool = TextTaskPool({TASK: own, "wrong": wrong}, tokenizer=tokenizer)
    found = evaluate(pool, expert, name="expert", tasks=[TASK])
    assert found.accuracy == {TASK: written} and set(found.correct or {}) == {TASK}
    assert set(pool.item_classes) == {TASK}
    assert evaluate(pool, expert, name="expert").accuracy == {TASK: written, "wrong": 0}
    evaluate(pool, expert, name="expert", tasks=[TASK])
    assert set(pool.item_classes) == {TASK, "wrong"}  # classes do not depend on the model


def test_tokenised_rows_score_like_their_texts(suite, expert, tokenizer, rows):
    encoder = TextEncoder(tokenizer, KINDS[suite])
    samples = [encoder.sample(row, "row") for row in rows]
    width = max(len(sample.ids) for sample in samples)
    tokenised = [
        {
            "input_ids": sample.ids + [tokenizer.pad_token_id] * (width - len(sample.ids)),
            "attention_mask": [1] * len(sample.ids) + [0] * (width - len(sample.ids)),
            "labels": (sample.labels or []) + [-100] * (width - len(sample.labels or [])),
        }
        for sample in samples
    ]
    pool = TextTaskPool({"text": rows, "tokens": tokenised}, tokenizer=tokenizer)
    report = pool.evaluate(expert)
    assert report["tokens"] == pytest.approx(report["text"])
    assert torch.equal(pool.item_correct["tokens"], pool.item_correct["text"])
    assert pool.item_classes["tokens"] == pool.item_classes["text"]
    assert pool.item_classes["text"] == [target.strip() for target in rows["target"]]


def test_numbers_are_scored_by_rank(suite, expert, tokenizer):
    rows = [{"prompt": f"intent : {n}", "target": str(n)} for n in (1, 2, 3)]
    pool = TextTaskPool(
        {"numbers": rows}, tokenizer=tokenizer, metrics={"numbers": "spearman"}, max_new_tokens=3
    )
    report = pool.evaluate(expert)
    assert report["numbers"]["accuracy"] == 0  # words, each of which counts as 0
    assert math.isfinite(report["numbers"]["loss"])
    assert pool.item_correct == {} == pool.item_classes


def test_sampling_defaults_of_a_model_are_not_used(suite, expert, tokenizer, rows):
    sampling = copy.deepcopy(expert)
    sampling.generation_config.update(do_sample=True, temperature=50.0, top_k=5)
    first, second = TextTaskPool({TASK: rows}, tokenizer=tokenizer), None
    report = first.evaluate(expert)
    second = TextTaskPool({TASK: rows}, tokenizer=tokenizer).evaluate(sampling)
    assert report[TASK] == second[TASK]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batchsize": 8}, r"unknown key 'batchsize' \(nearest: 'batch_size'\)"),
        ({"batch_size": 0}, "taskpool.batch_size must be a whole number >= 1, got 0"),
        ({"max_new_tokens": 1.5}, "taskpool.max_new_tokens must be a whole number >= 1, got 1.5"),
        ({"metrics": {"stsb": "spearman"}}, "taskpool.metrics: unknown key 'stsb'"),
        ({"metrics": {"a": "pearson"}}, r"taskpool.metrics.a: unknown key 'pearson'"),
        ({"test_datasets": {}}, "taskpool has no tasks"),
    ],
)
def test_wrong_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TextTaskPool(**{"test_datasets": {"a": []}, "tokenizer": "nowhere", **options})


def test_what_cannot_be_evaluated_is_refused(suite, expert, tokenizer):
    row = {"prompt": "intent : play it", "target": "PLAY MUSIC"}
    with pytest.raises(TypeError, match="Linear cannot generate text"):
        TextTaskPool({"a": [row]}, tokenizer=tokenizer).evaluate(nn.Linear(2, 2))
    with pytest.raises(CalibrationError, match="task 'a' has no test rows"):
        TextTaskPool({"a": []}, tokenizer=tokenizer).evaluate(expert)
    with pytest.raises(CalibrationError, match=r"task 'a', test row 1.*target"):
        rows = [row, {"prompt": "intent : stop"}]
        TextTaskPool({"a": rows}, tokenizer=tokenizer).evaluate(expert)
    with pytest.raises(CalibrationError, match=r"taskpool\.tokenizer=nowhere/at-all: "):
        TextTaskPool({"a": [row]}, tokenizer="nowhere/at-all").evaluate(expert)
