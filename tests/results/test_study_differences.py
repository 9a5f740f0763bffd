"""Differences of a study's rows, from data."""

from pathlib import Path
from typing import Any

import pytest
from synthetic import make_report

from fusion_bench_featcal.results.items import half_width
from fusion_bench_featcal.results.study import Group, difference


def test_differences_pair_seeds() -> None:
    rows: Any = {("ta", "ta"): {0: 0.1, 1: 0.5, 2: 0.9}, ("ta", "a"): {0: 0.2, 1: 0.6, 2: 1.0}}
    group = Group({"samples_per_task": 8}, by_seed=rows)
    value = difference((group, "ta", "a"), (group, "ta", "ta"))
    assert value is not None
    assert [value.estimate, value.low, value.high] == pytest.approx([0.1, 0.1, 0.1])
    assert difference((group, "ta", "z"), (group, "ta", "ta")) is None


def test_sides_without_a_common_seed_have_no_difference() -> None:
    one = Group({}, by_seed={("ta", "a"): {1: 0.7, 2: 0.8}, ("ta", "b"): {3: 0.5}})
    assert difference((one, "ta", "a"), (one, "ta", "b")) is None


def test_only_common_seeds_count_in_estimate_and_interval(tmp_path: Path) -> None:
    levels: Any = {
        1: {"featcal": 0.7, "surgery": 0.5},
        2: {"featcal": 0.8, "surgery": 0.55},
        3: {"featcal": 0.1},  # of surgery this seed's cell failed
    }
    for seed, of_seed in levels.items():
        made = make_report({"base": 0.3, "experts": 0.9, "ta": 0.6, **of_seed}, upstream="ta",
                           seed=seed)  # fmt: skip
        made.seeds["comparison"] = seed
        made.write(tmp_path / str(seed))
    values = []
    for seeds in ((1, 2), (1, 2, 3)):
        group = Group({}, [tmp_path / str(seed) for seed in seeds])
        group.load()
        values.append(difference((group, "ta", "featcal"), (group, "ta", "surgery")))
    assert values[0] == values[1] is not None
    assert values[0].estimate == pytest.approx(0.225)
    # wider than Student's interval over the two seeds alone: over items, too
    assert values[0].high - values[0].estimate > half_width([0.2, 0.25])


def test_half_widths_are_students() -> None:
    assert half_width([0.5]) == 0
    assert half_width([0.0, 2.0]) == pytest.approx(12.71, abs=1e-2)  # t = 12.71, s / sqrt(2) = 1
    assert half_width([-1.0, 0.0, 1.0]) == pytest.approx(4.30 / 3**0.5, abs=1e-2)
