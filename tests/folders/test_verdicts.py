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
from fusion_bench_featcal.folders.verdict import compare, experts_below_merged
from fusion_bench_featcal.results.notes import WARNING, notes_of

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
    text = f"a (loss {expert.loss:.2f} on 4 rows, the merged model 2.25)"
    assert experts_below_merged({"a": expert}, {"a": merged}) == [text] * is_weak


MERGED = noisy(1.0, 10)
# A mean of -0.005 with a standard error of 0.005.
UNCLEAR = score(0.99 + NOISE + 0.1 * (torch.arange(20) == 0), 0)
# The half interval of four more right of twenty, by Student's t of 19 degrees of freedom, with an
# example more that each model alone answers, and the change of the mean by these.
HALF = 100 * (2.0930240544 * ((6 / 22 - (4 / 22) ** 2) / 22) ** 0.5 + 4 / 20 - 4 / 22)
MORE_RIGHT = f"accuracy +20.0 ± {HALF:.1f} points, loss -0.250 ± 0.000"


@pytest.mark.parametrize(
    ("merged", "calibrated", "is_good", "sentence", "gain"),
    [
        (MERGED, noisy(0.75, 14), True, "better than the merged model on 1 of 1 task", MORE_RIGHT),
        (MERGED, MERGED, True, "; no clear change: a", "loss +0.000 ± 0.000"),
        (MERGED, noisy(math.nan), False, "on 0 of 1 task by Student's 95 % interval; worse: a "
         "(loss +nan). Try", "+nan"),
        (noisy(1.0, 15), noisy(0.9, 5), False, "; worse: a (accuracy -50.0 ± 30.5", "-50.0"),
        (noisy(1.0), noisy(1.1), False, "; worse: a (loss +0.100 ± 0.000). Try this.", "+0.100"),
        (noisy(1.0), UNCLEAR, True, "no clear change: a", "loss -0.005 ± 0.010"),
        (noisy(0.001), noisy(0.003), True, "on 0 of 1 task by Student's 95 % interval; no clear "
         "change: a", "loss +0.002 ± 0.000"),
        (score([1.0], 0), score([0.5], 0), True, "too few rows to compare (below 5): a (1 row)",
         "loss -0.500"),
    ],
)  # fmt: skip
def test_a_verdict_counts_tasks_beyond_their_intervals(merged, calibrated, is_good, sentence, gain):
    verdict = compare({"a": merged}, {"a": calibrated}, "Try this.")
    assert sentence in verdict.sentence and verdict.sentence.startswith("verdict: better than")
    assert verdict.is_good == is_good
    (line,) = verdict.gains.values()
    assert line.startswith("gain of a on ") and gain in line


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("shift", [-0.4, -0.1, 0.0, 0.1, 0.4])
def test_worse_needs_the_evidence_of_better(seed, shift):
    """Exchanged models exchange better and worse, and a task between stays there."""
    losses = torch.randn(2, 20, generator=torch.Generator().manual_seed(seed)).double()
    models = [{"a": score(losses[0] / 4 + 1, 0)}, {"a": score(losses[1] / 4 + 1 + shift, 0)}]
    before, after = models
    there, back = compare(before, after, ""), compare(after, before, "")
    is_better = "on 1 of 1 task" in there.sentence
    assert is_better == (not back.is_good)
    assert ("no clear" in there.sentence) == ("no clear" in back.sentence)
    assert there.is_good or "on 1 of 1 task" in back.sentence


def test_doubts_and_tasks_without_scores_stand_in_the_verdict():
    merged, calibrated = {"a": noisy(1.0)}, {"a": noisy(0.75)}
    doubts = ["--data a and --data b are the same data", "b: exchanged?"]
    verdict = compare(merged, calibrated, "", unscored=["b"], warnings=notes_of(doubts, WARNING))
    assert verdict.sentence.startswith(f"verdict: in doubt: {'; '.join(doubts)}. Scores: better")
    assert verdict.sentence.endswith("; not scored: b")
    assert not verdict.is_good and compare(merged, calibrated, "", unscored=["b"]).is_good
    assert not compare({}, {}, "", unscored=["b"]).is_good
    nothing = compare({}, {}, "", unscored=["b"], warnings=notes_of(doubts[:1], WARNING))
    ending = "Scores: none, as nothing was scored"
    assert nothing.sentence == f"verdict: in doubt: {doubts[0]}. {ending}"


@pytest.mark.parametrize(("more", "is_good"), [(0.25, True), (-0.25, False)])
def test_parts_in_word_accuracies_are_compared_by_example(more, is_good):
    """Losses do not change. The interval is that of the differences."""
    before = noisy(1.0)._replace(word_scores=0.5 + NOISE)
    after = before._replace(word_scores=before.word_scores + more + 0.1 * NOISE)
    verdict = compare({"a": before}, {"a": after}, "")
    half = 10 * 2.0930240544 * float(NOISE.std()) / 20**0.5
    gain = f"accuracy {100 * (more + 0.1 * float(NOISE.mean())):+.1f} ± {half:.1f} points, loss +0"
    assert verdict.is_good == is_good and verdict.gains["a"].startswith(
        f"gain of a on 20 rows: {gain}"
    )


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
    sentence = "7 of 7 answers of the expert of one are right but for the end token, which it does"
    assert done.code == 0, done.err
    assert done.out.count(sentence) == 1 and "a tenth of their own rows" not in done.out


@pytest.mark.parametrize(
    ("held_back", "repeating", "source"),
    [
        ([], [], ""),
        (["a", "b"], [], ", on held-back rows of the same source"),
        (["b"], [], ", on held-back rows of the same source (b)"),
        (["a", "b"], ["a"],
         ", on held-back rows of the same source; test rows repeat samples: a"),
    ],
)  # fmt: skip
def test_a_verdict_says_which_rows_cannot_show_a_shift(held_back, repeating, source):
    merged, calibrated = (dict.fromkeys("ab", noisy(loss)) for loss in (1.0, 0.75))
    interval = "by Student's 95 % interval"
    sentence = f"verdict: better than the merged model on 2 of 2 tasks {interval}{source}"
    assert compare(merged, calibrated, "", held_back, repeating).sentence == sentence
