"""Several runs in one report: runs that are found, averages, and runs that are refused."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reports import LEVELS, content_of, error_of, featcal, leave_run, leave_seeds, summary

from fusion_bench_featcal import lab
from fusion_bench_featcal.results import Report, ReportError


def leave_rows(folder: Path, merger: str, rows: Any, seed: int, **cost: Any) -> None:
    """A run whose rows have an accuracy per task. The last row has costs."""
    report = Report(suite="toy", upstream=merger, seeds={"comparison": seed, [*rows][-1]: seed})
    for name, accuracies in rows.items():
        report.add_row(name, accuracies, cost=cost if name == [*rows][-1] and cost else None)
    report.write(folder)


def test_rows_are_compared_with_the_merged_models_of_their_own_runs(tmp_path: Path):
    leave_run(tmp_path / "one", {"task_arithmetic": 0.5}, seed=1, items=False)
    levels = {"task_arithmetic": 0.6, "featcal": 0.7}
    leave_run(tmp_path / "two", levels, seed=2, items=False)
    rows = summary(tmp_path)
    row, merged = rows["task_arithmetic/featcal"], rows["task_arithmetic"]
    assert row["gain"] == pytest.approx(0.1) and row["recovered_gap"] is None
    assert row["gain_interval"] is None  # without items
    assert "items.npz" in featcal("report", tmp_path).out
    assert merged["deviation"]["average"] == pytest.approx(np.std([0.5, 0.6], ddof=1))


def test_costs_and_shares_of_the_experts_are_averaged_with_their_spread(tmp_path: Path):
    for seed, (merged, seconds) in enumerate([(0.4, 2.0), (0.5, 4.0)]):
        memory = "unavailable" if seed else 2**30
        rows = {"base": {"a": 0.2, "b": 0.2}, "experts": {"a": 0.8, "b": 0.5},
                "wudi": {"a": merged, "b": merged}, "surgery": {"a": 0.6, "b": 0.5}}  # fmt: skip
        cost = {"seconds": seconds, "peak_rss_bytes": memory}
        leave_rows(tmp_path / str(seed), "wudi", rows, seed, **cost)
    text = featcal("report", tmp_path).out
    assert "means over comparisons with the seeds 0, 1\n" in text
    rows = summary(tmp_path)
    merger, row = rows["wudi"], rows["wudi/surgery"]
    shares = [(0.4 / 0.8 + 0.4 / 0.5) / 2, (0.5 / 0.8 + 0.5 / 0.5) / 2]
    assert merger["normalised"] == pytest.approx(sum(shares) / 2)
    assert merger["spread"]["normalised"] == pytest.approx(abs(shares[0] - shares[1]) / 2**0.5)
    assert row["cost"]["seconds"] == 3.0 and row["spread"]["seconds"] == pytest.approx(2**0.5)
    assert row["cost"]["peak_rss_bytes"] == "unavailable" and row["seeds"] == [0, 1]


def test_the_worst_task_is_that_of_the_means_among_gaps_of_a_point(tmp_path: Path):
    for seed, far in ((1, 0.2), (2, 0.4)):
        rows = {"experts": (0.9, 0.9, 0.9), "ties": (0.1, 0.8, 0.899), "featcal": (far, 0.85, 0.89)}
        named = {n: dict(zip(("far", "near", "level"), v, strict=True)) for n, v in rows.items()}
        leave_rows(tmp_path / str(seed), "ties", named, seed)
    row = summary(tmp_path)["ties/featcal"]
    assert (row["worst_task"], row["worst_recovered_gap"]) == ("far", pytest.approx(0.25))
    assert summary(tmp_path)["experts"]["worst_task"] is None


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "other accuracy": ({"levels": LEVELS | {"featcal": 0.8}, "seed": 1},
        "row 'featcal' differs .*same seeds.*average 0.7 in .*seed1, 0.8 in .*odd"),
    "other tasks": ({"seed": 4, "tasks": ("cars",)},
        r"toy have different tasks: \['cars', 'dtd'\] in .*seed1, \['cars'\] in .*odd"),
    "other test sets": ({"seed": 4, "items": False, "test_sets": {"cars": {"items": 100}}},
        "different test sets for task 'cars', items: 200 in .*seed1, 100 in .*odd"),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_runs_that_cannot_be_averaged_are_refused_with_both_values(reason: str, tmp_path: Path):
    seeds = leave_seeds(tmp_path)
    changes, message = REFUSED[reason]
    words: Any = {"levels": LEVELS} | changes
    odd = leave_run(tmp_path / "z_odd", **words)
    text = error_of("report", *seeds, odd)
    assert re.search(message, text), text
    if reason != "other accuracy":
        with pytest.raises(ReportError, match=message):
            lab.load(tmp_path)


def test_runs_of_other_settings_are_points_of_one_table(tmp_path: Path):
    seeds = leave_seeds(tmp_path)
    levels = LEVELS | {"featcal": 0.65}
    other = leave_run(tmp_path / "other", levels, seed=4, settings={"ridge_lambda": 0.5})
    done = featcal("report", *seeds, other, "--out", tmp_path / "table")
    assert done.code == 0
    for text in (done.out, (tmp_path / "table" / "report.md").read_text()):
        assert "75.0 ± 12.4 (50 %)" in text and "65.0 (17 %)" in text
    message = "--against compares rows of one point, and there are several: ridge_lambda = 0.05; "
    assert message in error_of("report", *seeds, other, "--against", "featcal")


# ---- finding and writing


def test_runs_are_found_below_a_folder_once_and_foreign_reports_passed_over(tmp_path: Path):
    seeds = leave_seeds(tmp_path)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "report.json").write_text('{"cars": {"accuracy": 0.5}}')
    out = tmp_path / "all"
    assert featcal("report", *seeds, "--out", out).code == 0
    again = featcal("report", tmp_path, seeds[0], seeds[1] / "report.json", "--out", out)
    assert again.code == 0 and content_of(out)["runs"] == [str(run) for run in seeds]


def test_a_report_of_several_runs_never_replaces_a_runs_own(tmp_path: Path):
    seeds = leave_seeds(tmp_path)
    before = (seeds[0] / "report.json").read_text()
    text = error_of("report", *seeds, "--out", seeds[0])
    assert "holds the report of a run" in text and "--out" in text
    assert (seeds[0] / "report.json").read_text() == before
