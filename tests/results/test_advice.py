"""Advice on a repaired model: five kinds, symmetric, with a correction for many tasks."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reports import LEVELS, featcal, flags, leave_run, make_run

from fusion_bench_featcal.data.comparing import compare_scores
from fusion_bench_featcal.data.scoring import Score
from fusion_bench_featcal.results import accuracy_frame, statistics, write_run
from fusion_bench_featcal.results.advice import (
    BETTER,
    FEW,
    KEEP,
    LEVEL,
    REJECT,
    UNCLEAR,
    USE,
    WEAK,
    WORSE,
    Advice,
    Averages,
    Comparison,
    advise,
    task_verdicts,
)
from fusion_bench_featcal.results.figures import estimate_of
from fusion_bench_featcal.results.names import ACCURACY, LOSS, NO_EXPERT
from fusion_bench_featcal.results.repair_scores import RepairScores
from fusion_bench_featcal.results.statistics import Difference, mean_difference
from fusion_bench_featcal.results.tables import ABSENT


def difference(value: float, half: float | None = 0.02, p: float | None = None) -> Difference:
    """Return a difference whose p-value is normal, if it is not given."""
    if p is None and half is not None:
        p = math.erfc(abs(value) / (half / 1.96) / math.sqrt(2))
    return Difference(value, half, 1, p)


def compared(
    gain: float, task: str = "a", gap: float = 0.3, half: float | None = 0.02, **more: Any
) -> Comparison:
    """Compare models of which the expert has `gap` and the repaired one `gain` over 50 %."""
    options: dict[str, Any] = {"metric": ACCURACY, "examples": 400, **more}
    return Comparison(
        task=task,
        expert=0.5 + gap,
        merged=0.5,
        repaired=0.5 + gain,
        gain=difference(gain, half),
        gap=difference(gap, half),
        rest=difference(gap - gain, half),
        **options,
    )


def advice_on(comparisons: list[Comparison], **options: Any) -> Advice:
    """Return the advice with the averages of independent tasks."""
    if len({comparison.metric for comparison in comparisons}) > 1:
        return advise(comparisons, Averages(), **options)

    def average(differences: list[Any]) -> Difference:
        value = sum(d.value for d in differences) / len(differences)
        if any(d.half is None for d in differences):
            return Difference(value, None, 1, None)
        return difference(value, math.hypot(*(d.half for d in differences)) / len(differences))

    averages = (average([getattr(c, name) for c in comparisons]) for name in Averages._fields)
    return advise(comparisons, Averages(*averages), **options)


@pytest.mark.parametrize(
    ("comparisons", "options", "kind", "sentence"),
    [
        ([compared(0.2), compared(0.3, "b")], {}, USE,
         "Use the repaired model: it is better than the merged model on 2 of 2 tasks "
         "(+25.0 ± 1.4 points on average), and 5.0 ± 1.4 points below the experts"),
        ([compared(0.2), compared(0.295, "b")], {}, USE, "5.2 ± 1.4 points below the experts"),
        ([compared(0.3), compared(0.0, "b", 0.01)], {}, USE, "on 1 of 2 tasks (+15.0 ± 1.4 "
         "points on average), and level with the experts (difference -0.5 ± 1.4 points)"),
        ([compared(0.018), compared(0.018, "b")], {}, USE, "the merged model on average (+1.8"),
        ([compared(0.005, gap=0.01)], {}, KEEP, "Keep the merged model: it is level with the "
         "experts (difference -1.0 ± 2.0 points), so there is nothing to repair"),
        ([compared(0.2), compared(-0.1, "b")], {"if_worse": "Try more"}, REJECT,
         "Do not use the repaired model: it is worse than the merged model on 1 of 2 tasks, "
         "b (-10.0 ± 2.0 points). Try more"),
        ([compared(-0.018), compared(-0.018, "b")], {}, REJECT, "on average (-1.8 ± 1.4 points)"),
        ([compared(math.nan)], {}, REJECT, "worse than the merged model on 1 of 1 task, a (+nan"),
        ([compared(0.01)], {"more_examples": "Score 800"}, UNCLEAR, "Cannot tell whether the "
         "repaired model is better than the merged model: differences below 2.0 points cannot be "
         "seen with 400 test examples. Score 800"),
        ([compared(0.2, half=None, examples=None)], {}, UNCLEAR, "there is no interval. Repeat"),
        ([compared(0.005, gap=0.3, metric=LOSS)], {}, UNCLEAR, "below 0.020 in loss cannot be"),
        ([compared(0.001), compared(0.001, "b", metric=LOSS)], {}, UNCLEAR,
         "the merged model: no task differs by more than chance explains"),
        ([compared(0.2)], {"lead": difference(0.01)}, WEAK, "No model can be recommended: the "
         "experts are hardly better than the base (+1.0 ± 2.0 points on average)"),
        ([compared(0.2)], {"lead": difference(0.3)}, USE, "better than the merged model on 1"),
    ],
)  # fmt: skip
def test_a_sentence_says_what_to_do(comparisons, options, kind, sentence):
    advice = advice_on(comparisons, **options)
    assert advice.kind == kind and sentence in advice.sentence


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shift", [0.0, 0.02, 0.05, 0.2])
def test_exchanged_models_exchange_better_and_worse(seed: int, shift: float) -> None:
    generator = np.random.default_rng(seed)
    values = [generator.normal(shift * task, 0.3, 100) for task in range(4)]
    there, back = (
        [
            replace(compared(0.0, f"{task}", examples=100), gain=mean_difference(sign * v))
            for task, v in enumerate(values)
        ]
        for sign in (1, -1)
    )
    exchanged = {BETTER: WORSE, WORSE: BETTER}
    verdicts = task_verdicts(there)
    assert task_verdicts(back) == {t: exchanged.get(v, v) for t, v in verdicts.items()}
    if BETTER in verdicts.values():
        assert advice_on(back).kind == REJECT


def test_one_of_many_tasks_needs_more_evidence_than_a_single_one() -> None:
    """A p-value of .02 counts for one task, and for one of three times as much is needed."""
    one, level = compared(0.0233), [compared(0.0, name) for name in "bc"]
    assert task_verdicts([one])["a"] == BETTER
    assert task_verdicts([one, *level])["a"] == LEVEL


def test_tasks_with_few_examples_are_not_compared_and_not_counted() -> None:
    few = compared(-0.5, "b", examples=4)
    one = compared(0.0233)
    assert task_verdicts([one, few]) == {"a": BETTER, "b": FEW}


def test_the_loss_decides_where_the_metric_does_not() -> None:
    """It needs a p-value of half the level, and a change of at least .01."""
    clear, small = difference(-0.3, 0.1), difference(-0.005, 0.0001)
    assert task_verdicts([compared(0.0, loss=clear)])["a"] == "worse (loss)"
    assert task_verdicts([compared(0.0, loss=small)])["a"] == LEVEL
    assert task_verdicts([compared(0.1, loss=clear)])["a"] == BETTER
    assert advice_on([compared(0.0, loss=clear)]).sentence.endswith(
        "a (+0.0 ± 2.0 points, loss +0.300 ± 0.100)"
    )


def test_averages_have_the_intervals_of_independent_tasks() -> None:
    """Flags have the intervals of reports, and other metrics have Student's."""

    def scores(right: int, metric: str = ACCURACY) -> dict[str, Score]:
        flags = {task: torch.arange(n) < right for task, n in (("a", 40), ("b", 60))}
        return {
            task: Score(0.5, 1 - f.double(), f, 0, metric, None if metric == ACCURACY else f / 10)
            for task, f in flags.items()
        }

    _, (gain, gap, rest), _ = compare_scores(scores(30), scores(20), scores(25))
    report = statistics.difference(*(
        {None: {t: s.compared.numpy() for t, s in scores(right).items()}} for right in (25, 20)
    ))  # fmt: skip
    assert gain is not None and gap is not None and rest is not None
    assert gain == report and gap.value > gain.value
    ranked = [scores(right, "MRR@10") for right in (30, 20, 25)]
    tasks, (gain, _, _), _ = compare_scores(*ranked)
    halves = [task.gain.half or 0.0 for task in tasks]
    assert gain and gain.half and math.isclose(gain.half, math.hypot(*halves) / 2)
    assert compare_scores({}, {}, {}) == ([], Averages(), [])


def test_a_table_for_each_metric_fits_80_columns(capsys) -> None:
    tasks = [compared(0.1 * i, f"a-long-task-name-{i}") for i in range(4)]
    tasks.append(compared(0.1, "loss", metric=LOSS, examples=None))
    advice = Advice(UNCLEAR, "")
    accuracy, loss = RepairScores(advice, tasks, difference(0.15)).tables()
    accuracy.show()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and lines[-1].split()[:5] == [
        "average", ABSENT, "80.0", "50.0", "65.0",
    ]  # fmt: skip
    assert accuracy.title == "accuracy, %" and loss.title == "loss (lower is better)"
    assert loss.lines[0][1][0] == ABSENT and len(loss.lines) == 1


def test_intervals_in_figures_end_at_0_and_100_per_cent() -> None:
    run = make_run({"base": 0.0, "experts": 1.0, "featcal": 0.5})
    bars = {line.first.name: estimate_of(line, "cars") for line in accuracy_frame(run).lines}
    assert bars["base"].below == bars["experts"].above == 0.0
    assert bars["base"].above == pytest.approx(bars["experts"].below) != 0
    assert bars["featcal"].below == bars["featcal"].above > 0


def test_reports_compare_experts_with_the_base_and_tasks_without_an_expert(tmp_path: Path) -> None:
    weak = featcal("report", leave_run(tmp_path / "weak", LEVELS | {"base": 0.89})).out
    assert weak.startswith("No model can be recommended: the experts are hardly better than")
    run = make_run()
    for row, level in zip(run.rows, (0.3, 0.9, 0.6, 0.5), strict=True):
        if row.name != "experts":
            row.scores[f"accuracy{NO_EXPERT}"] = {"other": level}
            row.correct = {**(row.correct or {}), "other": flags(level)}
    out = featcal("report", write_run(tmp_path / "run", run)).out
    assert "But it is worse on other (-10.0 ± 4.4 points), which it was not calibrated" in out
    table = out.split("not calibrated on: accuracy, %\n")[1].splitlines()
    assert table[0].split() == ["test"] and table[1].split()[:2] == ["examples", "base"]
    assert table[3].split() == [
        "other",
        "200",
        "30.0",
        "60.0",
        "50.0",
        *["-10.0", "±", "4.4", "worse"],
    ]
    assert "60.0      75.0  +15.0 ± 3.6" in out  # the average is that of the others
