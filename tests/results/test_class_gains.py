"""Gains by class against plain counting, and the sentences and tables made of them."""

import math
import re
from itertools import combinations
from math import comb

import numpy as np
import pytest
from made_diagnoses import TASKS, made

from fusion_bench_featcal.results.class_gains import (
    LEAST_CLASSES,
    LEAST_ITEMS,
    accuracy_grids,
    class_gains,
    class_sentence,
    correlated,
    cosine_grids,
    rank_correlation,
)
from fusion_bench_featcal.results.diagnosis import Diagnosis
from fusion_bench_featcal.results.diagnosis_page import help_sentences, long_lines


def plain_p(won: int, lost: int) -> float:
    """Two-sided binomial test of a fair coin, by summing tails."""
    total = won + lost
    tail = sum(comb(total, k) for k in range(max(won, lost), total + 1)) / 2**total
    return min(1.0, 2 * tail)


def plain_rank(values: list[float]) -> list[float]:
    """Rank of each value, the mean rank of equal ones."""
    return [
        1 + sum(other < value for other in values) + (values.count(value) - 1) / 2
        for value in values
    ]


def many_classes(seed: int = 0, classes: int = 14, items: int = 30) -> Diagnosis:
    """A diagnosis of one task whose classes gain by chance, but for the first and the second."""
    generator = np.random.default_rng(seed)
    names = [f"c{n:02}" for n in range(classes)]
    found = Diagnosis(
        suite="toy", upstream="merger", split="test", items={"one": 5 * classes}, seed=0,
        positions="all", features="made up", blocks=["0"],
    )  # fmt: skip
    for row in ("merger", "featcal"):
        found.drift[row] = {"one": {"relative": [0.5]}}
        found.cosines[row] = {"one": [0.5]}
        found.classes[row] = {
            "one": {n: {"items": 5, "cosine": float(generator.normal())} for n in names}
        }
    flips = {name: [int(n) for n in generator.integers(0, 4, 2)] for name in names}
    flips |= {names[0]: [20, 0], names[1]: [0, 20]}
    found.class_flips = {"featcal": {"one": flips}}
    for row in ("merger", "featcal"):
        own = {n: 5 + (w - lost) * (row == "featcal") for n, (w, lost) in flips.items()}
        found.class_accuracy[row] = {"one": {n: [right, items] for n, right in own.items()}}
    return found


def test_gains_against_plain_counting():
    found = many_classes()
    gains = class_gains(found, "featcal")
    flips = found.class_flips["featcal"]["one"]
    assert [gain.name for gain in gains] == sorted(flips)
    p = {name: plain_p(*counts) for name, counts in flips.items()}
    for gain in gains:
        sides = [found.classes[row]["one"][gain.name]["cosine"] for row in ("featcal", "merger")]
        assert gain.cosine == pytest.approx(sides[0] - sides[1])
        right = [found.class_accuracy[row]["one"][gain.name][0] for row in ("featcal", "merger")]
        assert gain.accuracy == pytest.approx((right[0] - right[1]) / 30)
        assert (gain.diagnosed, gain.tested) == (5, 30)
        # Holm's: the largest of the values so far, each times the number of those not below it.
        before = [value for value in p.values() if value <= p[gain.name]]
        steps = [value * sum(other >= value for other in p.values()) for value in before]
        assert gain.p == pytest.approx(min(1.0, max(steps)), rel=1e-9)
    assert {gain.name for gain in gains if gain.is_clear} == {"c00", "c01"}


def test_three_items_are_never_beyond_chance():
    found = many_classes()
    found.class_flips["featcal"]["one"] = {"c00": [3, 0]}
    found.class_accuracy["featcal"]["one"]["c00"] = [3, 3]
    gains = class_gains(found, "featcal")
    assert not any(gain.is_clear for gain in gains)
    assert gains[0].accuracy == 1 and gains[1].accuracy is None
    assert [gain.name for gain in correlated(gains)] == []
    assert class_sentence(found, "featcal") == (
        "featcal: of 1 classes 0 gain accuracy beyond chance; 0 lose it"
    )


def test_classes_of_few_items_are_left_out_of_the_correlation():
    found = many_classes()
    found.classes["featcal"]["one"]["c03"]["items"] = LEAST_ITEMS - 1
    found.class_accuracy["featcal"]["one"]["c04"][1] = LEAST_ITEMS - 1
    found.class_accuracy["featcal"]["one"]["c05"][1] = LEAST_ITEMS
    names = {gain.name for gain in correlated(class_gains(found, "featcal"))}
    assert names == set(found.classes["featcal"]["one"]) - {"c03", "c04"}


@pytest.mark.parametrize("seed", range(3))
def test_rank_correlation_against_its_formula(seed: int):
    generator = np.random.default_rng(seed)
    first = generator.normal(size=20).round(1).tolist()
    second = (np.array(first) + generator.normal(size=20)).round(1).tolist()
    ranks = [plain_rank(side) for side in (first, second)]
    centred = [np.array(side) - np.mean(side) for side in ranks]
    wanted = sum(centred[0] * centred[1]) / math.sqrt(sum(centred[0] ** 2) * sum(centred[1] ** 2))
    found = rank_correlation(first, second)
    assert found is not None
    assert found.estimate == pytest.approx(wanted)
    reach = 1.959964 * math.sqrt((1 + wanted**2 / 2) / 17)
    middle = 0.5 * math.log((1 + wanted) / (1 - wanted))
    assert math.atanh(found.low) == pytest.approx(middle - reach, rel=1e-5)
    assert math.atanh(found.high) == pytest.approx(middle + reach, rel=1e-5)


def test_too_few_or_equal_values_have_no_correlation():
    values = [float(n) for n in range(LEAST_CLASSES)]
    assert rank_correlation(values[1:], values[1:]) is None
    assert rank_correlation(values, [1.0] * LEAST_CLASSES) is None
    found = rank_correlation(values, values)
    assert found is not None and found.estimate == found.low == pytest.approx(1)


def test_sentence_names_only_what_is_beyond_chance():
    found = many_classes()
    sentence = class_sentence(found, "featcal")
    assert sentence.startswith(
        "featcal: of 14 classes 1 gain accuracy beyond chance, most one: c00 (+66.7 points, "
        "n = 30); 1 lose it, most one: c01 (-66.7 points, n = 30); over the 14 classes with "
        f"{LEAST_ITEMS} items or more, gains of cosine and accuracy have a rank correlation of "
    )
    assert sentence in help_sentences(found)
    found.class_accuracy, found.class_flips = {}, {}
    assert class_sentence(found, "featcal") == ""


def test_sentence_names_no_class_of_few_items():
    found = many_classes()
    near = found.classes["featcal"]["one"]
    near["c09"] = {"items": LEAST_ITEMS - 1, "cosine": 99.0}
    near["c10"]["cosine"] = 98.0
    assert re.search(r"by class from \+\S+ on one: c10 \(", help_sentences(found)[0])
    assert "c09 (" in cosine_grids(found)[0].lines[0][1][1]  # the table says n


def test_tables_of_every_calibrated_row():
    for grids, head in (
        (cosine_grids(made()), "gain in cosine"),
        (accuracy_grids(made()), "gain in accuracy"),
    ):
        assert [grid.corner for grid in grids] == [f"{r}: {head}" for r in made().repairs]
        assert [len(grid.lines) for grid in grids] == [len(TASKS)] * 2
    (_, first), (_, second) = (grid.lines[0] for grid in accuracy_grids(made()))
    assert first == ["2", "late (+25.0 points, n = 20)", "-", "0", "0"]
    assert second == ["2", "late (+50.0 points, n = 20)", "-", "1", "0"]
    grid = accuracy_grids(many_classes())[0].lines[0]
    assert grid == ("one", [
        "14", "c00 (+66.7 points, n = 30)", "c01 (-66.7 points, n = 30)", "1", "1",
    ])  # fmt: skip


def test_long_table_has_accuracies_by_class():
    lines = [line for line in long_lines(made()) if "class" in line]
    shown = {
        (line["row"], line["task"], line["class"]): line["value"]
        for line in lines
        if line["metric"] == "accuracy"
    }
    assert len(shown) == 5 * len(TASKS) * 2
    assert shown["featcal", "toy_two", "late"] == 0.7
    assert shown["experts", "toy_two", "early"] == 0.95
    items = {line["value"] for line in lines if line["metric"] == "test_items"}
    assert items == {20}
    assert all(one != other for one, other in combinations(map(str, lines), 2))
