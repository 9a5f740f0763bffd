"""Intervals and p-values, against an independent script and by their properties."""

import re
from pathlib import Path
from typing import Any

import check_statistics
import numpy as np
import pytest
from interval_coverage import averages_hold, exact_differences
from reports import featcal, leave_rows, leave_run, rows_of

from fusion_bench_featcal.results.statistics import difference

LINE = re.compile(r"^(\S+) +([-+][\d.]+) ± ([\d.]+) +(?:< )?([\d.e-]+)$", re.M)


def against(reference: str, *runs: Path) -> dict[str, tuple[float, ...]]:
    """Rows of a table of differences: points, half of the interval, corrected p."""
    done = featcal("report", *runs, "--against", reference)
    assert done.code == 0, done.err
    return {name: tuple(map(float, numbers)) for name, *numbers in LINE.findall(done.out)}


def leave_random(folder: Path, seed: int) -> Path:
    """A run with random flags. Row `close` differs from `featcal` in two items of each task."""
    random = np.random.default_rng(seed)
    levels = {"experts": 0.9, "ties": 0.5, "surgery": 0.55, "featcal": 0.7}
    rows = {name: {task: random.random(size) < level for task, size in (("a", 80), ("b", 50))}
            for name, level in levels.items()}  # fmt: skip
    rows["close"] = {task: row.copy() for task, row in rows["featcal"].items()}
    for row in rows["close"].values():
        row[:2] = ~row[:2]
    return leave_rows(folder, rows, seed=seed)


@pytest.mark.parametrize("seeds", [1, 3])
def test_statistics_are_those_of_an_independent_script(seeds: int, tmp_path: Path) -> None:
    runs = [leave_random(tmp_path / str(seed), seed) for seed in range(seeds)]
    again = check_statistics.read(runs)
    for name, row in rows_of(*runs).items():
        if "/" in name:
            average, gain, half = check_statistics.gain(again[name], again[row["merger"]])
            assert row["accuracy.average"] == pytest.approx(average, abs=1e-9)
            assert (row["gain"], row["half"]) == pytest.approx((gain, half), abs=1e-6), name
    expected = check_statistics.against(again, "ties/featcal")
    result = against("ties/featcal", *runs)
    assert result.keys() == expected.keys()
    for name, (points, half, p) in result.items():
        gain, its_half, _, adjusted = expected[name]
        assert (points, half) == pytest.approx((100 * gain, 100 * its_half), abs=0.051), name
        # Printed with two digits, or as "< 0.001".
        is_small = p == 0.001 and adjusted < 0.001
        assert is_small or p == pytest.approx(adjusted, rel=0.06, abs=1e-300), name


def test_half_of_the_intervals_cover_the_truth_as_often_as_they_say() -> None:
    """Gains of seeds and items drawn around a known mean: 95 % within four standard errors."""
    random, covered, draws = np.random.default_rng(1), 0, 600
    for _ in range(draws):
        levels = 0.6 + 0.03 * random.standard_normal(4)
        items = random.random(400)
        row = {seed: {"a": items < level} for seed, level in enumerate(levels)}
        merged = {seed: {"a": items < 0.5} for seed in range(4)}
        result: Any = difference(row, merged)
        covered += abs(result.value - 0.1) <= result.half
    assert abs(covered / draws - 0.95) < 4 * (0.95 * 0.05 / draws) ** 0.5


def test_intervals_of_one_task_hold_for_all_shares_of_differing_examples() -> None:
    """Exact sums over all outcomes. With half an example added per method the least was 87 %."""
    assert exact_differences(50).min() > 0.94


def test_intervals_of_averages_hold_where_few_examples_differ() -> None:
    random = np.random.default_rng(1)
    held = sum(averages_hold(random, 50, (0.03, 0.01), 6, 1) for _ in range(400))
    assert held / 400 > 0.93


def test_rows_are_compared_over_the_seeds_that_both_have(tmp_path: Path) -> None:
    levels = {0: {"x": 0.6, "z": 0.5}, 1: {"x": 0.7, "y": 0.65}, 2: {"y": 0.75}, 3: {"alone": 0.8}}
    for seed, rows in levels.items():
        leave_run(tmp_path / str(seed), {"task_arithmetic": 0.5, **rows}, seed=seed)
    result = against("task_arithmetic/y", tmp_path)
    assert result["task_arithmetic/x"][0] == 5.0 and "task_arithmetic/alone" not in result
    row = rows_of(tmp_path)["task_arithmetic/y"]  # two seeds have no interval
    assert row["half"] != row["half"] and row["seeds"] == 2
    assert "+20.0, 2 seeds" in featcal("report", tmp_path).out
