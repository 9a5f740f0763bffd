"""Flags per test item on disk, and intervals from them."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fusion_bench_featcal.results import ReportError, load_items, save_items
from fusion_bench_featcal.results.intervals import (
    ITEMS,
    ITEMS_AND_SEEDS,
    SEEDS,
    Interval,
    Scores,
    over_seeds,
    paired_difference,
    recovered_gap_interval,
    student_interval,
)

Flags = dict[str, NDArray[np.bool_]]


def test_items_survive_with_any_names(tmp_path: Path):
    generator = np.random.default_rng(0)
    rows = ["featcal:demo", "../up/down", "índice 索引", "index", "array_0", ""]
    items = {row: {task: generator.random(17) < 0.5 for task in ("a|b", "a/b")} for row in rows}
    save_items(tmp_path, items)
    loaded = load_items(tmp_path)
    assert loaded is not None
    assert list(loaded) == rows
    for row, tasks in items.items():
        for task, flags in tasks.items():
            assert loaded[row][task].dtype == np.bool_
            np.testing.assert_array_equal(loaded[row][task], flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([[True]], r"row 'base', task 'a'.*shape \(1, 1\)"),
        ([], r"shape \(0,\)"),
        ([0.5, 1.0], "must be true or false"),
    ],
)
def test_malformed_flags_are_named(tmp_path: Path, flags: list[object], message: str):
    with pytest.raises(ReportError, match=message):
        save_items(tmp_path, {"base": {"a": flags}})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut off", b"no archive at all"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes):
    (tmp_path / "items.npz").write_bytes(content)
    with pytest.raises(ReportError, match=r"items\.npz is damaged"):
        load_items(tmp_path)


def test_pickled_items_are_refused(tmp_path: Path):
    index = np.array([["base", "a"]], dtype=object)
    np.savez(tmp_path / "items.npz", index=index, allow_pickle=True)
    with pytest.raises(ReportError, match=r"items\.npz is damaged.*allow_pickle"):
        load_items(tmp_path)


def correlated(generator: np.random.Generator, items: int, first: float, second: float):
    """Two rows that find the same items hard: right where the item's difficulty is small enough."""
    difficulty = generator.random(items)
    noise = 0.1 * generator.standard_normal((2, items))
    return difficulty + noise[0] < first, difficulty + noise[1] < second


def two_rows(seed: int, sizes: tuple[int, ...] = (60, 140)) -> tuple[Flags, Flags]:
    generator = np.random.default_rng(seed)
    pairs = [correlated(generator, size, 0.75, 0.6) for size in sizes]
    return (
        {f"task{number}": pair[0] for number, pair in enumerate(pairs)},
        {f"task{number}": pair[1] for number, pair in enumerate(pairs)},
    )


def width(interval: Interval) -> float:
    return interval.high - interval.low


def test_estimate_is_the_difference_of_the_averages_over_tasks():
    row, other = two_rows(0)
    expected = np.mean([row[task].mean() for task in row])
    expected -= np.mean([other[task].mean() for task in other])
    assert paired_difference(row, other).estimate == pytest.approx(expected, abs=1e-12)


def test_agrees_with_drawing_items_one_by_one():
    row, other = two_rows(1)
    generator = np.random.default_rng(3)
    draws = []
    for _ in range(4000):
        means = []
        for task in row:
            chosen = generator.integers(row[task].size, size=row[task].size)
            means.append(row[task][chosen].mean() - other[task][chosen].mean())
        draws.append(np.mean(means))
    low, high = np.quantile(draws, [0.025, 0.975])
    interval = paired_difference(row, other)
    assert interval.low == pytest.approx(low, abs=0.005)
    assert interval.high == pytest.approx(high, abs=0.005)


def test_covers_the_truth_as_often_as_it_says():
    # Right where difficulty + N(0, 0.1) < level; the true accuracies come from a large sample.
    truth = correlated(np.random.default_rng(9), 2_000_000, 0.75, 0.6)
    difference = truth[0].mean() - truth[1].mean()
    covered = 0
    for seed in range(400):
        row, other = two_rows(seed)
        interval = paired_difference(row, other, resamples=600)
        covered += interval.low <= difference <= interval.high
    # 95 % of 400 is 380, with a standard deviation of 4.4.
    assert 362 <= covered <= 394


def test_pairing_is_narrower_than_resampling_the_rows_apart():
    row, other = two_rows(3)
    paired = paired_difference(row, other)
    nothing = {task: np.zeros_like(flags) for task, flags in row.items()}
    apart = np.hypot(
        width(paired_difference(row, nothing)),
        width(paired_difference(other, nothing)),
    )
    assert width(paired) < 0.8 * apart


def test_order_of_items_and_tasks_plays_no_part():
    row, other = two_rows(4)
    order = {task: np.random.default_rng(5).permutation(flags.size) for task, flags in row.items()}
    shuffled = paired_difference(
        {task: row[task][order[task]] for task in reversed(row)},
        {task: other[task][order[task]] for task in row},
    )
    assert shuffled == paired_difference(row, other)


def test_tasks_count_equally_whatever_their_size():
    row: Scores = {"small": np.ones(10, bool), "large": np.zeros(1000, bool)}
    other: Scores = {"small": np.zeros(10, bool), "large": np.zeros(1000, bool)}
    assert paired_difference(row, other) == Interval(0.5, 0.5, 0.5, ITEMS)


def test_seeds_are_averaged_item_by_item():
    row, other = two_rows(7)
    three = {task: np.stack([flags] * 3) for task, flags in row.items()}
    assert paired_difference(three, other) == paired_difference(row, other)
    generator = np.random.default_rng(8)
    noisy = {task: np.stack([flags ^ (generator.random(flags.size) < 0.2) for _ in range(3)])
             for task, flags in row.items()}  # fmt: skip
    averaged = paired_difference(noisy, other)
    singles = [
        paired_difference({task: flags[seed] for task, flags in noisy.items()}, other)
        for seed in range(3)
    ]
    assert averaged.estimate == pytest.approx(np.mean([one.estimate for one in singles]))
    assert width(averaged) < min(width(one) for one in singles)


def test_recovered_gap_of_merged_and_experts_is_zero_and_one():
    experts, merged = two_rows(10)
    assert recovered_gap_interval(merged, merged, experts) == Interval(0.0, 0.0, 0.0, ITEMS)
    whole = recovered_gap_interval(experts, merged, experts)
    assert whole is not None
    assert (whole.estimate, whole.low, whole.high) == pytest.approx((1.0, 1.0, 1.0))


def test_recovered_gap_interval_holds_the_share():
    generator = np.random.default_rng(11)
    difficulty = generator.random(2000)
    merged, row, experts = ({"a": difficulty < level} for level in (0.4, 0.6, 0.8))
    interval = recovered_gap_interval(row, merged, experts)
    assert interval is not None
    assert interval.low < interval.estimate < interval.high
    assert interval.estimate == pytest.approx(0.5, abs=0.05)
    assert width(interval) < 0.15


def test_no_share_of_a_gap_that_may_not_exist():
    few = {"a": np.array([True, False, True, False])}
    merged = {"a": np.array([False, True, False, False])}
    assert recovered_gap_interval(few, merged, few) is None
    assert recovered_gap_interval(few, few, merged) is None


def test_rows_that_cannot_be_paired_are_refused():
    row, other = two_rows(12)
    with pytest.raises(ReportError, match="not about the same tasks"):
        paired_difference(row, {"task0": other["task0"]})
    with pytest.raises(ReportError, match="task 'task0': rows have 60 and 59 test items"):
        paired_difference(row, {**other, "task0": other["task0"][1:]})
    with pytest.raises(ReportError, match="not about the same tasks"):
        paired_difference({}, {})


def test_half_widths_are_students() -> None:
    assert student_interval([0.5], SEEDS) == Interval.of(0.5)
    two, three = (student_interval(values, SEEDS) for values in ([0.0, 2.0], [-1.0, 0.0, 1.0]))
    assert two.half == pytest.approx(12.71, abs=1e-2)  # t = 12.71, s / sqrt(2) = 1
    assert (two.estimate, two.low) == pytest.approx((1, 1 - two.half))
    assert three.half == pytest.approx(4.30 / 3**0.5, abs=1e-2)


def test_an_interval_has_the_spread_of_items_and_of_seeds() -> None:
    seeds = student_interval([1.0, 3.0], SEEDS).half
    alone = over_seeds(2.0, [1.0, 3.0], None)
    assert (alone.low, alone.high) == pytest.approx((2 - seeds, 2 + seeds))
    both = over_seeds(2.0, [1.0, 3.0], Interval(2.0, -7.0, 5.0, ITEMS))
    assert (alone.over, both.over) == (SEEDS, ITEMS_AND_SEEDS)
    assert both.estimate == 2
    assert both.low == pytest.approx(2 - (9**2 + seeds**2) ** 0.5)
    assert both.high == pytest.approx(2 + (3**2 + seeds**2) ** 0.5)


def test_an_interval_is_written_in_one_way() -> None:
    interval = Interval(0.5, 0.4, 0.6, SEEDS)
    assert (interval.text(), interval.limits()) == ("50.0 ± 10.0", "[+40.0, +60.0]")
    assert interval.text(".2f", 1) == "0.50 ± 0.10"
    assert Interval.of(0.5).text() == "50.0"
    moved = interval.around(0.7)
    assert (moved.estimate, moved.low, moved.high) == pytest.approx((0.7, 0.6, 0.8))
    assert Interval(0.5, 0.4, 0.6, ITEMS).text("+z.1f") == "+50.0 ± 10.0"
    assert interval.scaled(100).text(".0f", 1) == interval.text(".0f")
