"""Experts that cannot do their task, and tasks that end worse than in the merged model."""

import math
from typing import Any

import pytest
import torch
from made_folders import words, write_models, write_rows
from reports import featcal
from tiny_models import NO_TARGET
from tiny_texts import TASKS, WORDS, word_tokenizer
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from fusion_bench_featcal.data import scoring
from fusion_bench_featcal.data.comparing import compare_scores, experts_below_merged
from fusion_bench_featcal.results.advice import REJECT, Averages, Comparison, advise, task_verdicts
from fusion_bench_featcal.results.names import LOSS, WORD_ERRORS

NOISE = torch.linspace(-0.02, 0.02, 20).double()


def score(losses: Any, right: float) -> scoring.Score:
    return scoring.Score(right, torch.as_tensor(losses, dtype=torch.float64), None)


def noisy(loss: float, right: int | None = None) -> scoring.Score:
    flags = None if right is None else torch.arange(20) < right
    return scoring.Score((right or 0) / 20, loss + NOISE, flags)


@pytest.mark.parametrize(
    ("losses", "right", "is_weak"),
    [
        ([4, 5, 4, 5], 0.1, True),
        ([math.nan] * 4, 0, True),
        ([4, 5, 4, 5], 0.3, False),  # right more often
        ([9, 1, 2, 2], 0, False),  # within the interval
    ],
)
def test_an_expert_that_loses_to_the_merged_model_is_noted(losses, right, is_weak):
    expert, merged = score(losses, right), score([2, 3, 2, 2], 0.2)
    text = f"a (loss {expert.loss:.2f} on 4 examples, merged model: 2.25)"
    assert experts_below_merged({"a": expert}, {"a": merged}) == [text] * is_weak


def comparison(merged: scoring.Score, repaired: scoring.Score) -> Comparison:
    (result,), *_ = compare_scores({"a": repaired}, {"a": merged}, {"a": repaired})
    return result


def by_loss(losses: Any) -> scoring.Score:
    return score(losses, 0)._replace(metric=LOSS)


MERGED = noisy(1.0, 10)
# A mean of -0.005 with a standard error of 0.005.
UNCLEAR = by_loss(0.99 + NOISE + 0.1 * (torch.arange(20) == 0))
# The half interval of four more right of twenty, with an example more that each model alone
# answers, and the change of the mean by these.
HALF = 100 * (1.959964 * ((6 / 22 - (4 / 22) ** 2) / 22) ** 0.5 + 4 / 20 - 4 / 22)


@pytest.mark.parametrize(
    ("merged", "repaired", "verdict", "change"),
    [
        (MERGED, noisy(0.75, 14), "better (loss)",
         f"+20.0 ± {HALF:.1f} points, loss -0.250 ± 0.000"),
        (MERGED, MERGED, "unclear", "+0.0 ± 12.6 points, loss +0.000 ± 0.000"),
        (by_loss(1 + NOISE), by_loss([math.nan] * 20), "worse", "+nan"),
        (noisy(1.0, 15), noisy(0.9, 5), "worse", "-50.0 ± 28.9 points, loss -0.100"),
        (by_loss(1 + NOISE), by_loss(1.1 + NOISE), "worse", "-0.100 ± 0.000 in loss"),
        (by_loss(1 + NOISE), UNCLEAR, "level", "+0.005 ± 0.010 in loss"),
        (by_loss(0.001 + NOISE), by_loss(0.003 + NOISE), "level", "-0.002 ± 0.000 in loss"),
        (by_loss([1.0]), by_loss([0.5]), "too few", "+0.500 in loss"),
    ],
)  # fmt: skip
def test_a_task_changes_if_its_interval_says_so(merged, repaired, verdict, change):
    result = comparison(merged, repaired)
    assert task_verdicts([result])["a"] == verdict
    assert change in result.change_text
    averages = Averages(result.gain, result.gap, result.rest)
    assert (advise([result], averages).kind == REJECT) == (verdict == "worse")


@pytest.mark.parametrize("more", [0.25, -0.25])
def test_word_error_rates_are_compared_by_example(more):
    """Losses do not change. The interval is that of the differences of the terms."""
    terms = 0.5 + NOISE
    before = noisy(1.0)._replace(metric=WORD_ERRORS, terms=terms)
    after = before._replace(terms=terms + more + 0.1 * NOISE)
    result = comparison(before, after)
    half = 10 * 2.0930240544 * float(NOISE.std()) / 20**0.5
    assert result.change_text == f"{100 * more:+.1f} ± {half:.1f} points"
    assert task_verdicts([result])["a"] == ("better" if more > 0 else "worse")
    assert math.isclose(result.merged, 0.5) and math.isclose(result.repaired, 0.5 - more)


def test_answers_that_lack_the_end_token_alone_are_counted():
    logits = torch.eye(5)[torch.tensor([[2, 3, 1], [2, 3, 4], [2, 4, 4], [4, 1, 4]])]
    targets = torch.tensor([[2, 3, 1]] * 3 + [[4, 1, NO_TARGET]])
    batch = {"x": logits}
    tests = scoring.Tests(lambda _: [batch], lambda *_: (logits, targets), ends=[1])
    score = tests.score(nn.Linear(1, 1))
    assert score.unended == 1 and score.correct is not None
    assert score.correct.tolist() == [True, False, False, True]


def test_an_expert_that_never_ends_its_answers_is_named_once(tmp_path):
    """It writes "c" whatever the prompt is."""
    config = GPT2Config(vocab_size=len(WORDS), n_embd=8, n_layer=2, n_head=2, n_positions=32)
    torch.manual_seed(0)
    base = GPT2LMHeadModel(config)
    nn.init.zeros_(base.transformer.ln_f.weight)
    base.transformer.ln_f.bias.data = 100 * base.transformer.wte.weight.data[WORDS.index("c")]
    experts: Any = dict.fromkeys(TASKS, base)
    write_models(tmp_path, base, word_tokenizer(), experts, base)
    for task in TASKS:
        rows = [{"prompt": f"{a} {b}", "target": "c"} for a in "abcdef" for b in "abcdef"]
        write_rows(tmp_path / f"{task}.jsonl", rows)
    done = featcal(*words(tmp_path))
    sentence = (
        "7 of 7 answers of the expert of one are right except for the end token, which it does"
    )
    assert done.code == 0, done.err
    assert done.out.count(sentence) == 1 and "a tenth of their own examples" not in done.out
