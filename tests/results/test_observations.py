"""Sentences on the paper's observations, from data."""

from pathlib import Path
from typing import Any

import pytest
from synthetic import make_report

from fusion_bench_featcal.results import observations, paper_curves
from fusion_bench_featcal.results.items import half_width
from fusion_bench_featcal.results.observations import MERGED, At, Observation
from fusion_bench_featcal.results.study import Group, Study, difference
from fusion_bench_featcal.results.verdicts import FAILS, HOLDS, OPEN


def group(n: int, **values: list[float]) -> Group:
    """A point with accuracies by row and seed."""
    rows: Any = {("ta", name): dict(enumerate(each)) for name, each in values.items()}
    return Group({"samples_per_task": n}, by_seed=rows)


def found(groups: list[Group], *seen: Observation) -> tuple[list[observations.Finding], list[str]]:
    row = {"upstream": "ta", "name": "ta"}
    study = Study(name="s", suite="x", points=[{"labels": {}, "rows": [row]}], seeds=[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(observations, "OBSERVATIONS", seen)
        findings = observations.find_out(study, groups)
    return findings, study.notes


def few(row: str) -> At:
    return At(row, {"samples_per_task": 8})


def test_an_observation_holds_fails_or_is_open() -> None:
    groups = [group(8, ta=[0.50] * 3, a=[0.60, 0.61, 0.62], b=[0.40, 0.50, 0.60], c=[0.3] * 3)]
    seen = [Observation("s", few(row), "above", few(MERGED), "Table 0", 9.5) for row in "abc"]
    (above, level, below), _ = found(groups, *seen)
    assert [above.verdict, level.verdict, below.verdict] == [HOLDS, OPEN, FAILS]
    assert above.text == (
        "ta: a (n = 8) is above the merged model (n = 8): holds, +11.0 [+8.5, +13.5] points "
        "(Table 0; paper +9.5)"
    )


def test_points_may_differ_between_the_sides() -> None:
    groups = [group(8, ta=[0.5, 0.5], a=[0.7, 0.7]), group(512, ta=[0.5, 0.5], b=[0.6, 0.6])]
    other = At("b", {"samples_per_task": 512})
    (seen,), _ = found(groups, Observation("s", few("a"), "below", other, "Table 0"))
    assert seen.verdict == FAILS and "+10.0 [+10.0, +10.0] points" in seen.text


@pytest.mark.parametrize(
    ("seconds", "relation", "verdict"),
    [(4.0, "below", HOLDS), (4.8, "below", OPEN), (5.2, "above", OPEN), (6.0, "below", FAILS),
     (6.0, "above", HOLDS)],
)  # fmt: skip
def test_costs_that_hardly_differ_decide_nothing(
    seconds: float, relation: str, verdict: str, tmp_path: Path
) -> None:
    report = make_report({"base": 0.3, "experts": 0.9, "ta": 0.5}, upstream="ta")
    for name, cost in {"a": seconds, "b": 5.0}.items():
        report.add_row(name, dict.fromkeys(report.tasks, 0.6), cost={"seconds": cost})
    report.write(tmp_path)
    point = Group({"samples_per_task": 8}, runs=[tmp_path])
    point.load()
    (seen,), _ = found([point], Observation("s", few("a"), relation, few("b"), "T", cost="seconds"))
    assert seen.verdict == verdict and f"{seconds / 5:.2f} times" in seen.text


@pytest.mark.parametrize(
    ("values", "verdict"),
    [([0.505, 0.505], HOLDS), ([0.53, 0.53], FAILS), ([0.50, 0.52], OPEN)],
)
def test_level_means_within_a_margin(values: list[float], verdict: str) -> None:
    groups = [group(8, ta=[0.5, 0.5], a=values)]
    (seen,), _ = found(groups, Observation("s", few("a"), "level with", few(MERGED), "Fig. 0"))
    assert seen.verdict == verdict


def test_what_the_study_lacks_is_counted() -> None:
    groups = [group(8, ta=[0.5], a=[0.6])]
    seen = [Observation("s", few(row), "above", few(MERGED), "Table 0") for row in "az"]
    far = Observation("s", At("a", {"samples_per_task": 9}), "above", few("a"), "Table 0")
    findings, notes = found(groups, *seen, far)
    assert len(findings) == 1
    assert notes == ["2 of 3 observations of the paper need rows or points that this study lacks"]


def test_differences_pair_seeds() -> None:
    groups = [group(8, ta=[0.1, 0.5, 0.9], a=[0.2, 0.6, 1.0])]
    value = difference((groups[0], "ta", "a"), (groups[0], "ta", "ta"))
    assert value is not None
    assert [value.estimate, value.low, value.high] == pytest.approx([0.1, 0.1, 0.1])
    assert difference((groups[0], "ta", "z"), (groups[0], "ta", "ta")) is None


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


def test_every_observation_of_a_study_can_be_read() -> None:
    assert {seen.study for seen in observations.OBSERVATIONS} >= {"samples", "sweep", "cost"}
    for seen in observations.OBSERVATIONS:
        assert seen.relation in ("above", "below", "level with"), seen
        assert seen.source.startswith(("Table", "Fig", "text")), seen


def test_the_papers_curve_agrees_with_its_observations() -> None:
    published = paper_curves.paper_curves("samples")
    assert published is not None and set(published.rows) == {"surgery", "prob_surgery", "featcal"}
    assert paper_curves.paper_curves("tasks") is None

    def value(at: At) -> float:
        if at.row == MERGED:
            return published.merged
        curve = published.rows[at.row]
        return curve.y[curve.x.index(at.labels["samples_per_task"])]

    for seen in observations.OBSERVATIONS:
        if seen.study == "samples":
            assert value(seen.one) - value(seen.other) == pytest.approx(seen.published, abs=0.05)
