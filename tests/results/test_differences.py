"""Differences between rows: p-values, Holm's correction, and what is refused."""

import math
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats
from synthetic import make_report

from fusion_bench_featcal.cli import main
from fusion_bench_featcal.files import ReportError
from fusion_bench_featcal.lab.report.differences import (
    LOSS,
    TIE,
    WIN,
    Difference,
    against,
    difference_grid,
    differences,
    holm,
    over_suites,
)
from fusion_bench_featcal.results import Report, intervals
from fusion_bench_featcal.results.long_table import RowKey
from fusion_bench_featcal.results.report import summarise

TASKS = {"one": 300, "two": 500}


def flags(level: float, seed: int) -> dict[str, NDArray[Any]]:
    generator = np.random.default_rng(seed)
    return {task: generator.random(count) < level for task, count in TASKS.items()}


def once(scores: dict[RowKey, Any]) -> dict[RowKey, Any]:
    """The rows' flags as those of one seed."""
    return {row: {42: correct} for row, correct in scores.items()}


def all_pairs(scores: dict[RowKey, Any]) -> list[Difference]:
    return differences(scores, combinations(scores, 2))


def key(name: str) -> RowKey:
    return "suite", "merger", name


def test_holm_of_a_worked_example() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_p_value_is_that_of_the_standard_error_of_paired_items() -> None:
    one, two = flags(0.8, 1), flags(0.7, 2)
    [found] = all_pairs(once({key("one"): one, key("two"): two}))
    gains = [one[task].astype(float) - two[task] for task in TASKS]
    error = math.sqrt(sum(gain.var() / len(gain) for gain in gains)) / len(TASKS)
    value = sum(gain.mean() for gain in gains) / len(TASKS)
    assert found.interval.estimate == pytest.approx(value)
    assert found.interval.low == pytest.approx(value - 1.96 * error, abs=0.1 * error)
    assert math.log(found.p) == pytest.approx(
        math.log(math.erfc(value / error / math.sqrt(2))), rel=0.05
    )


def test_rows_that_differ_by_chance_tie_and_a_better_one_wins() -> None:
    scores = {key(str(seed)): flags(0.7, seed) for seed in range(12)}
    scores |= {key("best"): flags(0.85, 99), key("again"): scores[key("0")]}
    found = all_pairs(once(scores))
    assert len(found) == 14 * 13 / 2
    for each in found:
        wanted = {each.row[2]: WIN, each.other[2]: LOSS}.get("best", TIE)
        assert each.outcome == wanted, (each.row, each.other)
    [equal] = [each for each in found if {each.row[2], each.other[2]} == {"0", "again"}]
    assert (equal.p, equal.interval.low, equal.interval.high) == (1.0, 0.0, 0.0)


def test_without_correction_chance_would_win(monkeypatch) -> None:
    scores = {key(str(seed)): flags(0.7, seed) for seed in range(12)}
    assert (
        min(each.p for each in all_pairs(once(scores)))
        < 0.05
        < min(each.adjusted for each in all_pairs(once(scores)))
    )


def test_seeds_are_averaged_and_a_certain_difference_has_p_zero() -> None:
    row = flags(0.7, 1)
    half = {task: np.arange(values.size) % 2 == 0 for task, values in row.items()}
    other = {task: ~values for task, values in half.items()}
    worse = {task: np.zeros_like(values) for task, values in row.items()}
    best = {task: np.ones_like(values) for task, values in row.items()}
    scores: dict[RowKey, Any] = {key("a"): {1: half, 2: other}}
    scores |= {key(name): dict.fromkeys((1, 2), of) for name, of in {"b": worse, "c": best}.items()}
    above, below = all_pairs(scores)[:2]
    assert (above.interval.estimate, above.outcome) == (0.5, WIN)
    assert above.p < 1e-200
    assert (below.interval.estimate, below.outcome) == (-0.5, LOSS)


def run_of(folder: Path, seed: int, levels: dict[str, float]) -> Path:
    report = make_report(levels, upstream="ties", seed=seed)
    return report.write(folder / str(seed)).parent


def test_rows_are_compared_over_the_seeds_that_both_have(tmp_path: Path, capsys) -> None:
    levels = {0: {"x": 0.6, "z": 0.5}, 1: {"x": 0.7, "y": 0.65, "z": 0.6}, 2: {"y": 0.75, "z": 0.6}}
    runs = [run_of(tmp_path, seed, rows | {"ties": 0.5}) for seed, rows in levels.items()]
    runs.append(run_of(tmp_path, 3, {"ties": 0.5, "alone": 0.8}))
    scores = summarise(runs).scores
    found = {each.row[2]: each for each in against(scores, "ties/y")}
    assert found["x"].interval.estimate == pytest.approx(0.05)
    assert found["x"].interval.low > 0 and found["x"].seeds == (1,)
    assert found["z"].interval.estimate == pytest.approx(-0.1) and found["z"].seeds == (1, 2)
    assert set(found) == {"x", "z", "ties"}
    assert main(["report", *map(str, runs), "--against", "ties/y"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "one seed in common with ties/y, intervals are given the seed: ties/x" in shown
    assert "left out, without a seed in common with ties/y: ties/alone" in shown


def test_a_run_without_seeds_goes_with_every_seed() -> None:
    row, level = flags(0.7, 1), flags(0.6, 2)
    known = {1: row, 2: row}
    [found] = all_pairs({key("a"): known, key("b"): {None: level}})
    assert found.seeds == (1, 2)
    assert (
        found.interval == all_pairs({key("a"): known, key("b"): {1: level, 2: level}})[0].interval
    )


def test_few_seeds_have_the_p_value_of_a_t_test(tmp_path: Path) -> None:
    gains = [0.04, 0.05, 0.06]
    runs = [run_of(tmp_path, n, {"ties": 0.5, "x": 0.5 + gain}) for n, gain in enumerate(gains)]
    [found] = against(summarise(runs).scores, "ties")
    wanted: Any = stats.ttest_1samp(gains, 0.0)
    assert found.p == pytest.approx(wanted.pvalue) == pytest.approx(0.0131, abs=1e-4)


@pytest.mark.parametrize(("apart", "p"), [(2, 0.5), (4, 0.125), (0, 1.0)])
def test_few_items_that_tell_rows_apart_prove_nothing(apart: int, p: float) -> None:
    one = {"task": np.array([True] * apart + [False] * (100 - apart))}
    [found] = all_pairs(once({key("a"): one, key("b"): {"task": np.zeros(100, dtype=bool)}}))
    assert found.p == pytest.approx(p) and found.outcome == TIE


def test_drawing_in_parts_changes_nothing(monkeypatch) -> None:
    scores = once({key(str(seed)): flags(0.5 + 0.1 * seed, seed) for seed in range(4)})
    known = all_pairs(scores)
    monkeypatch.setattr(intervals, "_MOST_DRAWN", 1000)
    assert all_pairs(scores) == known


def test_rows_of_other_items_are_refused() -> None:
    other = {task: values[:-1] for task, values in flags(0.5, 1).items()}
    with pytest.raises(ReportError, match="cannot be paired"):
        all_pairs(once({key("a"): flags(0.5, 0), key("b"): other}))


def test_one_row_is_named_for_all_to_be_compared_with() -> None:
    scores = {key("a"): flags(0.5, 0), key("b"): flags(0.6, 1), ("suite", "x", "b"): flags(0.9, 2)}
    scores = once(scores)
    assert [each.row[1:] for each in against(scores, "merger/b")] == [("merger", "a"), ("x", "b")]
    assert against(scores, "a")[0].other == key("a")
    with pytest.raises(ReportError, match=r"got 'b'. There are: \['merger/b', 'x/b'\]"):
        against(scores, "b")
    with pytest.raises(ReportError, match=r"got 'merger/c'.*nearest"):
        against(scores, "merger/c")


def test_the_command_prints_and_writes_them(tmp_path: Path, capsys) -> None:
    report = Report(suite="suite", upstream="merger")
    for seed, (name, level) in enumerate({"experts": 0.95, "merger": 0.6, "ours": 0.8}.items()):
        correct = flags(level, seed)
        accuracy = {task: values.mean() for task, values in correct.items()}
        report.add_row(name, accuracy, correct=correct)
    folder = tmp_path / "comparison"
    report.write(folder / "merger")
    assert main(["report", str(folder / "merger"), "--against", "ours"]) == 0
    shown = capsys.readouterr().out
    assert "experts" in shown and "above" in shown and "below" in shown
    assert main(["report", str(folder / "merger"), "--against", "their"]) == 2
    assert "--against: name one row, got 'their'" in " ".join(capsys.readouterr().err.split())


def test_over_suites_the_interval_is_students() -> None:
    gains = [0.02, 0.05, 0.03, 0.04]
    averages: dict[RowKey, float] = {}
    for number, gain in enumerate(gains):
        suite = f"suite {number}"
        averages |= {(suite, None, "base"): 0.1, (suite, "merger", "merger"): 0.5}
        averages |= {(suite, "merger", "ours"): 0.7 + number / 10}
        averages[suite, "merger", "theirs"] = averages[suite, "merger", "ours"] - gain
    averages["suite 0", "merger", "once"] = 0.9
    found = {each.row[2]: each for each in over_suites(averages, "ours")}
    assert set(found) == {"merger", "theirs"}
    theirs = found["theirs"]
    wanted: Any = stats.ttest_1samp([-gain for gain in gains], 0.0)
    low, high = wanted.confidence_interval(0.95)
    assert theirs.p == pytest.approx(wanted.pvalue)
    assert (theirs.interval.low, theirs.interval.high) == pytest.approx((low, high))
    assert theirs.interval.estimate == pytest.approx(-0.035)
    assert theirs.adjusted >= theirs.p
    grid = difference_grid([*found.values()], "ours")
    assert dict(grid.lines)["merger/theirs"][3:] == ["-2.0", "-5.0", "-3.0", "-4.0"]
    with pytest.raises(ReportError, match="suite 1, suite 2, suite 3 has no row 'once'"):
        over_suites(averages, "once")


def test_equal_rows_of_all_suites_have_p_one() -> None:
    averages: dict[RowKey, float] = {(suite, "m", row): 0.5 for suite in "xyz" for row in "ab"}
    [found] = over_suites(averages, "a")
    assert (found.p, found.interval.low, found.interval.high) == (1.0, 0.0, 0.0)


def test_the_command_compares_over_suites(tmp_path: Path, capsys) -> None:
    for number in range(3):
        report = Report(suite=f"suite {number}", upstream="merger")
        for name, value in {"merger": 0.6, "ours": 0.8 + number / 100}.items():
            report.add_row(name, {"one": value, "two": value})
        if number == 0:
            report.add_row("once", {"one": 0.7, "two": 0.7})
        report.write(tmp_path / str(number))
    folders = [str(tmp_path / str(number)) for number in range(3)]
    assert main(["report", *folders, "--against", "ours"]) == 0
    shown = capsys.readouterr().out
    assert "mean over 3 suites" in " ".join(shown.split())
    assert "-21.0" in shown
    assert "rows that some suites lack are left out: merger/once" in " ".join(shown.split())
