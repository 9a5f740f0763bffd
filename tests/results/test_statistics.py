"""Averages, intervals and p-values of `featcal report`, against oracles and by their properties."""

import re
from pathlib import Path
from typing import Any

import check_statistics
import numpy as np
import pytest
from reports import GOLDEN, featcal, flags, leave_flags, leave_run, leave_seeds, summary
from scipy import stats

ONE_SEED = sorted((GOLDEN / "compare42").glob("*/"))
TWO_SEEDS = ONE_SEED + sorted((GOLDEN / "compare43").glob("*/"))
NUMBER = r"([-+][\d.]+)"
DIFFERENCE = re.compile(rf"^(\S+) +{NUMBER} +\[{NUMBER}, {NUMBER}\] +([\d.e-]+) *(\w*)", re.M)


def against(reference: str, *runs: Path) -> dict[str, tuple[float, float, float, float, str]]:
    """Rows of a table of differences: points, ends of the interval, corrected p, outcome."""
    done = featcal("report", *runs, "--against", reference)
    assert done.code == 0, done.err
    result = DIFFERENCE.findall(done.out)
    return {name: (*map(float, numbers), outcome) for name, *numbers, outcome in result}  # type: ignore


def interval(row: dict[str, Any], key: str = "gain_interval") -> tuple[float, float, float]:
    return tuple(row[key][end] for end in ("estimate", "low", "high"))  # type: ignore[return-value]


@pytest.mark.parametrize("seeds", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_statistics_are_those_of_an_independent_script(seeds: int, tmp_path: Path):
    runs = [ONE_SEED, TWO_SEEDS, leave_seeds(tmp_path)][seeds - 1]
    again = check_statistics.read(runs)
    for name, row in summary(*runs).items():
        average, *gain = check_statistics.gain(again[name], again[row["upstream"]])
        assert row["accuracy"]["average"] == pytest.approx(average, abs=1e-9)
        if "/" in name:
            assert interval(row) == pytest.approx(gain, abs=1e-6), name
    reference = "task_arithmetic/featcal"
    expected = check_statistics.against(again, reference)
    result = against(reference, *runs)
    assert result.keys() == expected.keys()
    for name, (*numbers, printed_p, _) in result.items():
        estimate, low, high, _, p = expected[name]
        # Rows in another order are drawn otherwise, and p has two digits.
        assert numbers == pytest.approx([100 * estimate, 100 * low, 100 * high], abs=0.5), name
        assert printed_p == pytest.approx(p, rel=0.1, abs=1e-6), name


def test_recovered_gap_is_the_closed_share_and_needs_a_gap(tmp_path: Path):
    generator = np.random.default_rng(7)
    difficulty = {"small": generator.random(60), "large": generator.random(140)}
    rows = {
        name: {task: hard < level for task, hard in difficulty.items()}
        for name, level in (("experts", 0.9), ("ties", 0.5), ("row", 0.7))
    }
    rows |= {"again": rows["ties"], "like_experts": rows["experts"]}
    result = summary(leave_flags(tmp_path / "run", rows))
    key = "recovered_gap_interval"
    assert interval(result["ties/again"], key) == (0.0, 0.0, 0.0)
    assert interval(result["ties/like_experts"], key) == pytest.approx((1.0, 1.0, 1.0))
    accuracy = {name: np.mean([f.mean() for f in tasks.values()]) for name, tasks in rows.items()}
    gap = accuracy["experts"] - accuracy["ties"]
    share, low, high = interval(result["ties/row"], key)
    assert share == pytest.approx((accuracy["row"] - accuracy["ties"]) / gap)
    assert low < share < high < low + 0.6
    few = {"experts": [1, 0, 1, 0], "ties": [0, 1, 0, 0], "row": [1, 0, 1, 0]}
    run = leave_flags(tmp_path / "few", {n: {"a": np.array(f, bool)} for n, f in few.items()})
    assert summary(run)["ties/row"][key] is None


# ---- differences from one row


@pytest.mark.parametrize(("differing", "p"), [(4, 0.125), (0, 1.0)])
def test_few_items_that_tell_rows_apart_prove_nothing(differing: int, p: float, tmp_path: Path):
    rows = {"ties": {"a": flags(0, 100)}, "row": {"a": flags(differing / 100, 100)}}
    *_, result, outcome = against("ties", leave_flags(tmp_path, rows))["ties/row"]
    assert result == pytest.approx(p, abs=0.01) and outcome == "tie"


@pytest.mark.parametrize("over", ["seeds", "suites"])
def test_few_seeds_or_suites_have_students_interval_and_p(over: str, tmp_path: Path):
    gains = [0.04, 0.05, 0.06, 0.02] if over == "suites" else [0.04, 0.05, 0.06]
    for n, gain in enumerate(gains):
        more: Any = {"suite": f"suite{n}"} if over == "suites" else {"seed": n}
        levels = {"task_arithmetic": 0.5, "x": 0.5 + gain}
        leave_run(tmp_path / str(n), levels, items=over == "seeds", **more)
    result = against("task_arithmetic" if over == "seeds" else "x", tmp_path)
    (name, (points, low, high, p, _)), *_ = result.items()
    sign = 1 if over == "seeds" else -1
    expected: Any = stats.ttest_1samp([sign * 100 * gain for gain in gains], 0.0)
    assert p == pytest.approx(expected.pvalue, rel=0.06)
    assert points == pytest.approx(sign * 100 * np.mean(gains), abs=0.06), name
    if over == "suites":
        assert (low, high) == pytest.approx(tuple(expected.confidence_interval(0.95)), abs=0.06)


def test_rows_are_compared_over_the_seeds_that_both_have(tmp_path: Path):
    levels = {0: {"x": 0.6, "z": 0.5}, 1: {"x": 0.7, "y": 0.65, "z": 0.6}, 2: {"y": 0.75, "z": 0.6},
              3: {"alone": 0.8}}  # fmt: skip
    for seed, rows in levels.items():
        rows |= {"task_arithmetic": 0.5}
        leave_run(tmp_path / str(seed), rows, seed=seed)
    result = against("task_arithmetic/y", tmp_path)
    assert result["task_arithmetic/x"][0] == 5.0 and result["task_arithmetic/z"][0] == -10.0
    screen = " ".join(featcal("report", tmp_path, "--against", "task_arithmetic/y").out.split())
    common = "in common with task_arithmetic/y"
    assert f"one seed {common}, intervals are given the seed: task_arithmetic/x" in screen
    assert f"left out, without a seed {common}: task_arithmetic/alone" in screen
