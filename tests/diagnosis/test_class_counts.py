"""Correct answers by class: counted from flags, and what is said where they cannot be."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from comparison_parts import FakeProgram
from fusion_bench import BaseTaskPool
from test_diagnosis_runs import FEW, image_pool

from fusion_bench_featcal.diagnosis import DiagnosisAlgorithm
from fusion_bench_featcal.diagnosis.class_counts import (
    NO_CLASSES,
    NO_ITEMS,
    NOT_EVALUATED,
    count_classes,
)
from fusion_bench_featcal.results import Report
from fusion_bench_featcal.results.diagnosis import Diagnosis
from fusion_bench_featcal.results.diagnosis_page import diagnosis_markdown
from fusion_bench_featcal.suites import image

ROWS = ("merger", "featcal", "featcal:plus", "experts")
CLASSES = {"one": list("abcab" * 6), "two": list("xyxyy" * 6)}


def report_with(flags: bool = True) -> Report:
    generator = np.random.default_rng(0)
    report = Report(suite="toy", upstream="merger")
    for row in ROWS:
        right = {task: generator.random(30) < 0.6 for task in CLASSES}
        accuracy = {task: float(values.mean()) for task, values in right.items()}
        report.add_row(row, accuracy, correct=right if flags else None)
    return report


def diagnosis_of(rows: tuple[str, ...] = ROWS[:3]) -> Diagnosis:
    return Diagnosis(
        suite="toy", upstream="merger", split="test", items=dict.fromkeys(CLASSES, 30), seed=0,
        positions="all", features="made up", blocks=["0"], drift={row: {} for row in rows},
    )  # fmt: skip


def test_counts_against_plain_counting():
    made, report = diagnosis_of(), report_with()
    assert count_classes(made, report, CLASSES) == []
    assert set(made.class_accuracy) == set(ROWS)
    assert set(made.class_flips) == {"featcal", "featcal:plus"}
    for task, names in CLASSES.items():
        for row in ROWS:
            right = Counter(n for n, hit in zip(names, report.items[row][task], strict=True) if hit)
            wanted = {name: [right[name], count] for name, count in Counter(names).items()}
            assert made.class_accuracy[row][task] == wanted
            assert list(wanted) and list(made.class_accuracy[row][task]) == sorted(wanted)
        for row in made.class_flips:
            pairs = zip(names, report.items[row][task], report.items["merger"][task], strict=True)
            seen = Counter((name, bool(mine), bool(other)) for name, mine, other in pairs)
            assert made.class_flips[row][task] == {
                name: [seen[name, True, False], seen[name, False, True]] for name in set(names)
            }


@pytest.mark.parametrize(
    ("report", "classes", "notes"),
    [
        (Report(suite="toy", upstream="merger"), None, [NOT_EVALUATED]),
        (report_with(flags=False), CLASSES, [NO_ITEMS]),
        (report_with(), None, [NO_CLASSES]),
        (report_with(), {}, [NO_CLASSES]),
        (
            report_with(),
            {"one": CLASSES["one"]},
            ["no accuracy by class of two: the task pool has no classes of it"],
        ),
        (
            report_with(),
            {**CLASSES, "two": ["x", "y"]},
            [
                "no accuracy by class of two: the task pool names classes of 2 test items and "
                "evaluated 30"
            ],
        ),
        (
            report_with(),
            {**CLASSES, "two": [str(n) for n in range(30)]},
            ["no accuracy by class of two: hardly any two test items share a class"],
        ),
    ],
)
def test_what_is_not_known_is_said(report: Report, classes: Any, notes: list[str]):
    made = diagnosis_of()
    assert count_classes(made, report, classes) == notes
    tasks = {task for by_task in made.class_accuracy.values() for task in by_task}
    assert tasks == ({"one"} if "of two" in notes[0] else set())


def test_classes_that_the_pools_name_differently_are_told():
    made, counts = diagnosis_of(), {"items": 5, "cosine": 0.5}
    made.classes = {"featcal": {"one": {"a": counts, "z": counts}, "two": {"X": counts}}}
    assert count_classes(made, report_with(), CLASSES) == [
        "gains of two's classes in cosine and accuracy are not compared: the model pool's data "
        "name other classes ('X') than the task pool ('x')"
    ]
    assert set(made.class_accuracy["featcal"]) == {"one", "two"}  # counted all the same


def test_a_row_that_is_not_evaluated_is_named():
    made = diagnosis_of(("base", "merger", "featcal"))
    notes = ["no accuracy by class of base: not evaluated item by item"]
    assert count_classes(made, report_with(), CLASSES) == notes
    assert set(made.class_accuracy) == {"merger", "featcal", "experts"}


class LabelledPool(BaseTaskPool):
    """A task pool that guesses classes by the sign of a model's last bias."""

    def __init__(self, *, flags: bool = True) -> None:
        super().__init__()
        self.evaluations = 0
        self.test_dataloaders = dict.fromkeys(image.ALPHABETS2)
        self._labels = {task: image.load_split(task, "test").labels for task in image.ALPHABETS2}
        names = {task: image.load_arrays(task).classnames for task in image.ALPHABETS2}
        if flags:
            self.item_correct: dict[str, Any] = {}
            self.item_classes = {
                task: [names[task][label] for label in labels]
                for task, labels in self._labels.items()
            }

    def evaluate(self, model: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.evaluations += 1
        even = bool(list(model.parameters())[-1].detach().sum() > 0)
        right = {task: self._labels[task] % 2 == even for task in self.test_dataloaders}
        if hasattr(self, "item_correct"):
            self.item_correct = right
        return {task: {"accuracy": float(hits.mean())} for task, hits in right.items()}


def run_with(pool: LabelledPool, **options: Any) -> Diagnosis:
    algorithm: Any = DiagnosisAlgorithm(**(FEW | options))
    algorithm._program = FakeProgram(pool)
    algorithm.run(image_pool())
    return algorithm._results.diagnosis


def test_a_run_counts_what_it_has_evaluated():
    pool = LabelledPool()
    options = {"compare_with": ["base", "merged", "experts"], "tasks": ["mini_korean"]}
    found = run_with(pool, items=60, **options)
    assert pool.evaluations == 5  # three rows and two experts: each model once
    assert set(found.class_accuracy) == {"base", "task_arithmetic", "featcal", "experts"}
    labels = Counter(pool.item_classes["mini_korean"])
    for row, tasks in found.class_accuracy.items():
        assert set(tasks) == {"mini_korean"}
        counts = tasks["mini_korean"]
        assert {name: items for name, (_, items) in counts.items()} == labels
        share = sum(right for right, _ in counts.values()) / sum(labels.values())
        assert share == pytest.approx(found.accuracy[row]["mini_korean"])
    assert set(found.classes["featcal"]["mini_korean"]) <= set(labels)
    assert found.notes == []


def test_a_pool_that_counts_no_items_leaves_a_note():
    found = run_with(LabelledPool(flags=False))
    assert found.class_accuracy == {} and set(found.accuracy) == {*found.rows}
    assert found.notes == [NO_ITEMS]
    assert f"- {NO_ITEMS}" in diagnosis_markdown(found)
