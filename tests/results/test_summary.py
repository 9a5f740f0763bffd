"""Several runs in one summary: which are found, what is averaged, what is refused."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import leave_run, leave_seeds, make_report, row_of

from fusion_bench_featcal.cli import main
from fusion_bench_featcal.lab.report.find import find
from fusion_bench_featcal.lab.report.views import write
from fusion_bench_featcal.results import AVERAGE, ReportError
from fusion_bench_featcal.results.notes import Note
from fusion_bench_featcal.results.report import summarise
from fusion_bench_featcal.results.summary import Summary


@pytest.fixture
def seeds(tmp_path: Path) -> list[Path]:
    return leave_seeds(tmp_path)


def sentences_of(summary: Summary) -> list[str]:
    return [note.sentence_of_several for note in summary.notes]


def test_mean_deviation_gain_and_intervals_over_seeds(seeds: list[Path]):
    summary = summarise(seeds)
    row = row_of(summary, "featcal")
    assert row.accuracy[AVERAGE] == pytest.approx(0.75)
    assert row.deviation is not None
    assert row.deviation[AVERAGE] == pytest.approx(0.05)
    assert (row.gain, row.recovered_gap) == (pytest.approx(0.15), pytest.approx(0.5))
    assert row.run_seeds == [{"calibration": seed} for seed in (1, 2, 3)]
    assert row.cost == {"seconds": 10.0, "peak_rss_bytes": 2.0**30}
    assert row.gain_interval is not None and row.recovered_gap_interval is not None
    assert row.gain_interval.estimate == pytest.approx(row.gain)
    assert row.gain_interval.low < 0.15 < row.gain_interval.high
    assert row.recovered_gap_interval.estimate == pytest.approx(row.recovered_gap)
    assert set((row_of(summary, "task_arithmetic").deviation or {}).values()) == {0.0}
    assert row_of(summarise(seeds[:1]), "featcal").deviation is None


def test_without_items_there_is_no_interval_and_a_note_says_so(tmp_path: Path):
    summary = summarise([leave_run(tmp_path / "run", items=False)])
    row = row_of(summary, "featcal")
    assert row.gain == pytest.approx(0.15)
    assert row.gain_interval is None and row.recovered_gap_interval is None
    assert any("items.npz" in note.text for note in summary.notes)


def test_upstream_mergers_and_suites_stay_apart(tmp_path: Path):
    leave_run(tmp_path / "a", 0.7)
    leave_run(tmp_path / "b", 0.8, suite="other", tasks=("svhn",))
    levels = {"base": 0.3, "experts": 0.9, "wudi": 0.7, "featcal": 0.85}
    make_report(levels, upstream="wudi").write(tmp_path / "c")
    rows = [row for row in summarise(find([tmp_path]).runs).rows if row.name == "featcal"]
    assert {(row.suite, row.upstream): row.accuracy[AVERAGE] for row in rows} == pytest.approx({
        ("toy", "task_arithmetic"): 0.7,
        ("toy", "wudi"): 0.85,
        ("other", "task_arithmetic"): 0.8,
    })  # fmt: skip


def test_a_row_that_only_some_runs_have_is_compared_with_the_merged_model_of_those(tmp_path: Path):
    make_report({"task_arithmetic": 0.5}, seed=1).write(tmp_path / "one")
    levels = {"task_arithmetic": 0.6, "featcal": 0.7}
    make_report(levels, seed=2).write(tmp_path / "two")
    row = row_of(summarise(find([tmp_path]).runs), "featcal")
    assert row.gain == pytest.approx(0.1)
    assert row.recovered_gap is None


def test_a_repeated_run_counts_once(seeds: list[Path], tmp_path: Path):
    again = leave_run(tmp_path / "again", 0.7, seed=1)
    assert row_of(summarise([*seeds, again]), "featcal") == row_of(summarise(seeds), "featcal")


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (
            {"featcal": 0.8, "seed": 1},
            r"row 'featcal' differs .*same seeds.*average 0\.7 in .*seed1, 0\.8 in .*odd",
        ),
        (
            {"seed": 4, "settings": {"ridge_lambda": 0.5}},
            r"'featcal' .*different ridge_lambda: 0\.05 in .*seed1, 0\.5 in .*odd",
        ),
        (
            {"seed": 4, "tasks": ("cars",)},
            r"toy have different tasks: \['cars', 'dtd'\] in .*seed1, \['cars'\] in .*odd",
        ),
        (
            {"seed": 4, "items": False, "test_sets": {"cars": {"items": 100}}},
            r"different test sets for task 'cars', items: 200 in .*seed1, 100 in .*odd",
        ),
    ],
)
def test_runs_that_cannot_be_averaged_are_refused_with_both_values(
    seeds: list[Path], tmp_path: Path, odd: dict[str, Any], message: str
):
    with pytest.raises(ReportError, match=message):
        summarise([*seeds, leave_run(tmp_path / "odd", **odd)])


def test_methods_in_order_differ_by_their_settings_and_not_by_their_seeds(tmp_path: Path):
    def run(name: str, seed: int, ridge_lambda: float) -> Path:
        featcal = {"ridge_lambda": ridge_lambda, "seed": seed}
        chain = {"featcal": featcal, "ridge": {"seed": seed}}
        return leave_run(tmp_path / name, 0.7, seed=seed, settings=chain)

    runs = [run("one", 1, 0.05), run("two", 2, 0.05)]
    assert len(row_of(summarise(runs), "featcal").run_seeds) == 2
    with pytest.raises(ReportError, match=r"different featcal\.ridge_lambda: 0\.05 in .*0\.5 in"):
        summarise([*runs, run("odd", 3, 0.5)])


def test_different_versions_are_noted(tmp_path: Path):
    leave_run(tmp_path / "a", seed=1, versions={"torch": "2.12"})
    leave_run(tmp_path / "b", seed=2, versions={"torch": "2.13"}, notes=["slow disk"])
    notes = sentences_of(summarise(find([tmp_path]).runs))
    assert notes == ["slow disk", "runs used different versions of torch: 2.12, 2.13"]


def test_other_commits_of_the_hub_are_noted_and_missing_ones_are_not(tmp_path: Path):
    leave_run(tmp_path / "a", seed=1, versions={"org/model": "aa", "datasets/org/rows": "bb"})
    leave_run(tmp_path / "b", seed=2, versions={"org/model": "cc"})
    leave_run(tmp_path / "c", seed=3, versions={})
    notes = sentences_of(summarise(find([tmp_path]).runs))
    assert notes == ["runs used different versions of org/model: aa, cc"]


def test_seeds_disagreeing_on_the_merged_model_are_averaged_too(tmp_path: Path):
    for seed, merged in ((1, 0.5), (2, 0.6)):
        levels = {"task_arithmetic": merged, "featcal": merged + 0.2, "experts": 0.95}
        make_report(levels, seed=seed).write(tmp_path / str(seed))
    summary = summarise(find([tmp_path]).runs)
    row, merged_row = row_of(summary, "featcal"), row_of(summary, "task_arithmetic")
    assert (row.gain, row.recovered_gap) == (pytest.approx(0.2), pytest.approx(0.5))
    assert (merged_row.deviation or {})[AVERAGE] == pytest.approx(np.std([0.5, 0.6], ddof=1))


def test_worst_task_of_several_runs_is_that_of_their_means(tmp_path: Path):
    for seed, cars in ((1, 0.5), (2, 0.7)):
        report = make_report({"experts": 0.9, "task_arithmetic": 0.4}, seed=seed, items=False)
        report.add_row("featcal", {"cars": cars, "dtd": 0.6})
        report.write(tmp_path / str(seed))
    summary = summarise(find([tmp_path]).runs)
    row = row_of(summary, "featcal")
    assert (row.worst_task, row.worst_recovered_gap) == ("cars", pytest.approx(0.4))
    assert row_of(summary, "experts").worst_task is None


# ---- finding runs


def test_runs_are_found_below_a_folder_once_and_foreign_reports_passed_over(
    seeds: list[Path], tmp_path: Path
):
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "report.json").write_text('{"cars": {"accuracy": 0.5}}')
    write(summarise(seeds), tmp_path / "all")
    assert find([tmp_path, seeds[0], seeds[1] / "report.json"]).runs == seeds


@pytest.mark.parametrize(
    ("path", "message"), [("nowhere", "no such run: .*nowhere"), ("empty", "no run in or below")]
)
def test_where_there_is_no_run(tmp_path: Path, path: str, message: str):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ReportError, match=message):
        find([tmp_path / path])


BELOW = Note("below", "dtd ends below the merged model: featcal -1.0 points", task="dtd")
TUNED = Note("note", "tuned by hand", "ties:small")
SLOW = Note("note", "slow disk", "featcal")


@pytest.mark.parametrize("door", ["terminal", "report.md", "page"])
def test_notes_of_several_mergers_name_theirs(tmp_path: Path, capsys, door: str):
    levels = {"base": 0.3, "experts": 0.9, "ties": 0.5, "ties:small": 0.6, "featcal": 0.7}
    for merger, note in {"ties": BELOW, "ties:small": TUNED}.items():
        make_report(levels, upstream=merger, notes=[note, SLOW]).write(tmp_path / merger)
    words = {"report.md": ["--out", str(tmp_path / "out")],
             "page": ["--html", str(tmp_path / "page.html")]}.get(door, [])  # fmt: skip
    assert main(["report", str(tmp_path / "ties"), str(tmp_path / "ties:small"), *words]) == 0
    texts = {"terminal": lambda: " ".join(capsys.readouterr().out.split()),
             "report.md": lambda: (tmp_path / "out" / "report.md").read_text(),
             "page": lambda: (tmp_path / "page.html").read_text()}  # fmt: skip
    text = texts[door]()
    assert f"ties: {BELOW.text}" in text
    for once in (BELOW.text, "ties:small: tuned by hand", "all mergers: featcal: slow disk"):
        assert text.count(once) == 1
    assert not re.search(r"ties(:small)?: (ties:small: tuned|featcal: slow)", text)


def test_notes_of_several_suites_name_them(tmp_path: Path):
    for suite in ("toys", "tools"):
        make_report(suite=suite, notes=[f"{suite} are few", "slow disk"]).write(tmp_path / suite)
    notes = sentences_of(summarise(find([tmp_path]).runs))
    assert notes == [
        "tools, task_arithmetic: tools are few", "all runs: slow disk",
        "toys, task_arithmetic: toys are few",
    ]  # fmt: skip
