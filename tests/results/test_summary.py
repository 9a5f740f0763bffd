"""Several runs in one summary: what is averaged, what is refused, and both of its reports."""

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import LEVELS, make_report

from fusion_bench_featcal.results import AVERAGE, Report, ReportError
from fusion_bench_featcal.results.find import FailedCell, find
from fusion_bench_featcal.results.summary import Summary, SummaryRow, summarise
from fusion_bench_featcal.results.tables import TEXT_WIDTH, console
from fusion_bench_featcal.results.views import (
    combined_tables,
    show_side_by_side,
    write_combined,
    write_side_by_side,
)


def leave_run(folder: Path, featcal: float = 0.75, **more: Any) -> Path:
    make_report({**LEVELS, "featcal": featcal}, **more).write(folder)
    return folder


def row_of(summary: Summary, name: str, upstream: str | None = None) -> SummaryRow:
    rows = (row for row in summary.rows if row.name == name)
    (row,) = (row for row in rows if upstream in (None, row.upstream))
    return row


def page_of(write: Any, summary: Summary) -> str:
    folder = Path(summary.runs[0]).parent / "written"
    return (write(summary, folder).parent / "report.md").read_text()


def lines_of(write: Any, summary: Summary) -> list[dict[str, str]]:
    folder = Path(summary.runs[0]).parent / "written"
    text = (write(summary, folder).parent / "report.csv").read_text()
    return list(csv.DictReader(io.StringIO(text)))


@pytest.fixture
def seeds(tmp_path: Path) -> list[Path]:
    """Three calibration seeds: featcal reaches 70, 75 and 80 %."""
    levels = {1: 0.7, 2: 0.75, 3: 0.8}
    return [leave_run(tmp_path / f"seed{s}", level, seed=s) for s, level in levels.items()]


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
    assert any("items.npz" in note and "run" in note for note in summary.notes)


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
    notes = summarise(find([tmp_path]).runs).notes
    assert notes == ["slow disk", "runs used different versions of torch: 2.12, 2.13"]


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


def test_losses_are_averaged_over_runs_and_absent_where_one_has_none(tmp_path: Path):
    for seed in (1, 2):
        report = make_report({"task_arithmetic": 0.5}, seed=seed, items=False)
        report.add_row("featcal", {"cars": 0.5, "dtd": 0.5}, loss={"cars": seed, "dtd": 4.0})
        report.add_row("new", {"cars": 0.5, "dtd": 0.5}, loss={"cars": 1.0} if seed == 1 else {})
        report.write(tmp_path / str(seed))
    summary = summarise(find([tmp_path]).runs)
    assert row_of(summary, "featcal").loss == {"cars": 1.5, "dtd": 4.0, "average": 2.75}
    assert row_of(summary, "new").loss == {}
    lines = {(x["name"], x["task"]): x["loss"] for x in lines_of(write_combined, summary)}
    assert (lines["featcal", "cars"], lines["new", "cars"]) == ("1.500000", "")
    text = "| + featcal (task_arithmetic) | 1.5000 | 4.0000 | 2.7500 |"
    assert text in page_of(write_combined, summary)


# ---- finding runs, and the combined report


def test_runs_are_found_below_a_folder_once_and_foreign_reports_passed_over(
    seeds: list[Path], tmp_path: Path
):
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "report.json").write_text('{"cars": {"accuracy": 0.5}}')
    write_combined(summarise(seeds), tmp_path / "all")
    assert find([tmp_path, seeds[0], seeds[1] / "report.json"]).runs == seeds


@pytest.mark.parametrize(
    ("path", "message"), [("nowhere", "no such run: .*nowhere"), ("empty", "no run in or below")]
)
def test_where_there_is_no_run(tmp_path: Path, path: str, message: str):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ReportError, match=message):
        find([tmp_path / path])


@pytest.mark.parametrize("write", [write_combined, write_side_by_side])
def test_a_report_of_several_runs_never_replaces_a_runs_own(seeds: list[Path], write: Any):
    before = (seeds[0] / "report.json").read_text()
    with pytest.raises(ReportError, match=r"holds the report of a run.*--out"):
        write(summarise(seeds), seeds[0], "--out")
    assert (seeds[0] / "report.json").read_text() == before


def test_written_files_tell_the_same_story(seeds: list[Path], tmp_path: Path):
    summary = summarise(seeds)
    folder = write_combined(summary, tmp_path / "all").parent
    assert sorted(p.name for p in folder.iterdir()) == ["report.csv", "report.json", "report.md"]
    content = json.loads((folder / "report.json").read_text())
    (row,) = [row for row in content["rows"] if row["name"] == "featcal"]
    assert row["recovered_gap"] == pytest.approx(0.5)
    lines = lines_of(write_combined, summary)
    (line,) = [x for x in lines if x["name"] == "featcal" and x["task"] == "average"]
    assert float(line["gain_low"]) == pytest.approx(row["gain_interval"]["low"], abs=1e-6)
    assert float(line["deviation"]) == pytest.approx(0.05)
    assert len(lines) == 4 * 3
    assert all(len(line) == 14 and None not in line.values() for line in lines)


def test_tables_name_each_repair_under_its_merger(seeds: list[Path], tmp_path: Path):
    levels = {"base": 0.3, "experts": 0.9, "wudi": 0.7, "featcal": 0.85}
    make_report(levels, upstream="wudi").write(tmp_path / "wudi")
    text = page_of(write_combined, summarise(find([tmp_path]).runs))
    heads = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    order = ["base", "experts", "task_arithmetic", "+ featcal", "wudi", "+ featcal"]
    assert heads == ["average, %", *order, "accuracy, %", *order]
    assert "75.0 ± 5.0" in text


def test_tables_fit_a_page(tmp_path: Path):
    make_report(tasks=[f"mini_task_number{n}" for n in range(6)]).write(tmp_path / "run")
    for table in combined_tables(summarise([tmp_path / "run"]), TEXT_WIDTH):
        assert console().measure(table).maximum <= TEXT_WIDTH


# ---- side by side

SUITE = "clip-vit-large-patch14_TALL20"
PAPER = {
    "hidden": 128, "learning_rate": 1e-3, "steps": 1000, "batch_size": 16, "stream": "test_tta"
}  # fmt: skip
COST = {
    "seconds": 2.0,
    "peak_rss_bytes": 2**30,
    "peak_accelerator_bytes": "unavailable",
    "task_id_at_inference": "yes",
    "modules_added": 6,
    "parameters_added": 1536,
}


def report(upstream: str, merged: float, *, seed: int = 42, **changes: Any) -> Report:
    """One upstream merger with one method, on two tasks with experts 0.8 and 0.5."""
    made = Report(suite=SUITE, upstream=upstream, seeds={"prob_surgery": seed})
    made.add_row("base", {"a": 0.2, "b": 0.2})
    made.add_row("experts", {"a": 0.8, "b": 0.5})
    made.add_row(upstream, {"a": merged, "b": merged})
    samples = {task: {"samples": 256, "split": "test"} for task in ("a", "b")}
    costs = COST | changes
    made.add_row("prob_surgery", {"a": 0.6, "b": 0.5}, settings=PAPER, cost=costs, samples=samples)
    return made


@pytest.fixture
def comparison(tmp_path: Path) -> Summary:
    report("task_arithmetic", 0.4).write(tmp_path / "one")
    report("ties_merging", 0.3).write(tmp_path / "two")
    reason = "the features are not finite"
    failed = [
        FailedCell(upstream="task_arithmetic", name="surgery", reason=reason),
        FailedCell(upstream="wudi", name="none", reason="out of memory"),
    ]
    return summarise([tmp_path / "one", tmp_path / "two"], failed)


def test_rows_stand_under_their_merger_and_references_once(comparison: Summary):
    mergers = ["task_arithmetic", "prob_surgery", "ties_merging", "prob_surgery"]
    assert [row.name for row in comparison.displayed(SUITE)] == ["base", "experts", *mergers]


def test_normalised_average_divides_task_by_task(comparison: Summary, tmp_path: Path):
    row = row_of(comparison, "prob_surgery", "task_arithmetic")
    assert row.normalised == pytest.approx((0.6 / 0.8 + 0.5 / 0.5) / 2)
    made = Report(suite=SUITE, upstream="wudi")
    made.add_row("wudi", {"a": 0.5})
    made.write(tmp_path / "without experts")
    assert summarise([tmp_path / "without experts"]).rows[0].normalised is None


def test_published_average_comes_with_its_doubt(comparison: Summary):
    published = row_of(comparison, "prob_surgery", "task_arithmetic").published
    assert published is not None and published.value == pytest.approx(0.833)
    assert "FeatCal variant" in published.note
    assert "83.3*" in page_of(write_side_by_side, comparison)
    assert row_of(comparison, "prob_surgery", "ties_merging").published is None


def test_what_is_not_measured_is_called_unavailable(tmp_path: Path):
    report("wudi", 0.4).write(tmp_path / "one")
    report("wudi", 0.4, seed=43, seconds=4.0, peak_rss_bytes="unavailable").write(tmp_path / "two")
    row = row_of(summarise([tmp_path / "one", tmp_path / "two"]), "prob_surgery")
    assert row.cost["seconds"] == 3.0
    assert row.cost["peak_rss_bytes"] == row.cost["peak_accelerator_bytes"] == "unavailable"
    assert row.cost["task_id_at_inference"] == "yes"
    assert (row.seeds, row.samples) == ([42, 43], "256 test")


def test_failed_cells_stand_in_every_table(comparison: Summary, capsys):
    show_side_by_side(comparison)
    for text in (capsys.readouterr().out, page_of(write_side_by_side, comparison)):
        for words in ("+ surgery", "the features are not finite", "out of memory"):
            assert words in text
    lines = lines_of(write_side_by_side, comparison)
    assert len(lines) == 6 + 2
    assert lines[-1]["status"] == "failed: out of memory"
    assert (lines[3]["parameters_added"], lines[3]["published"]) == ("1536.0", "0.833000")


def test_a_written_comparison_stands_for_its_own_runs_and_failures(
    comparison: Summary, tmp_path: Path
):
    path = write_side_by_side(comparison, tmp_path)
    content = json.loads(path.read_text())
    assert content["kind"] == "comparison"
    assert content["rows"][3]["normalised"] == pytest.approx(0.875)
    report("from_before", 0.1).write(tmp_path / "from_before")
    found = find([tmp_path, tmp_path / "one"])
    assert found.runs == [tmp_path / "one", tmp_path / "two"]
    assert (found.comparisons, found.failed) == ([tmp_path], comparison.failed)
    path.write_text(re.sub(r'"digest": "\w+",', "", path.read_text()).replace("reason", "raisin"))
    with pytest.raises(ReportError, match=r"report\.json: failed\[0\]: no reason"):
        find([tmp_path])


def test_means_over_seeds_come_with_their_deviation(tmp_path: Path):
    """Averages 0.4 and 0.5; shares of the experts' 0.8 and 0.5 follow; 2 and 4 seconds."""
    for number, (merged, seconds) in enumerate([(0.4, 2.0), (0.5, 4.0)]):
        made = report("wudi", merged, seed=number, seconds=seconds)
        made.seeds["comparison"] = number
        made.write(tmp_path / str(number))
    summary = summarise([tmp_path / "0", tmp_path / "1"])
    assert summary.seeds == [0, 1]
    merger = row_of(summary, "wudi")
    shares = [(0.4 / 0.8 + 0.4 / 0.5) / 2, (0.5 / 0.8 + 0.5 / 0.5) / 2]
    assert merger.normalised == pytest.approx(sum(shares) / 2)
    assert merger.spread["normalised"] == pytest.approx(abs(shares[0] - shares[1]) / 2**0.5)
    assert row_of(summary, "prob_surgery").spread["seconds"] == pytest.approx(2**0.5)
    text = page_of(write_side_by_side, summary)
    assert "45.0 ± 7.1" in text and "73.1 ± 11.5" in text and "3.00 ± 1.41" in text
    (line,) = (x for x in lines_of(write_side_by_side, summary) if x["name"] == "wudi")
    assert (line["runs"], line["normalised_deviation"]) == ("2", "0.114905")


def test_energy_and_inference_stand_in_the_table_of_costs(tmp_path: Path):
    measured: dict[str, Any] = {"gpu_energy_wh": 0.01234, "inference_seconds_per_sample": 0.0015}
    report("wudi", 0.4, **measured).write(tmp_path / "run")
    summary = summarise([tmp_path / "run"])
    lines = page_of(write_side_by_side, summary).splitlines()
    (cells,) = (line.split(" | ") for line in lines if "6 / 1536" in line)
    assert cells[3:8] == ["2.00", "1024", "unavailable", "0.0123", "1.50"]
    (line,) = (x for x in lines_of(write_side_by_side, summary) if x["name"] == "prob_surgery")
    assert (line["gpu_energy_wh"], line["inference_seconds_per_sample"]) == ("0.01234", "0.0015")


def test_runs_of_two_suites_are_no_comparison(tmp_path: Path):
    for suite in (SUITE, "another"):
        made = report("wudi", 0.4)
        made.suite = suite
        made.write(tmp_path / suite)
    with pytest.raises(ReportError, match=rf"these runs are of {SUITE}, another: name those of"):
        show_side_by_side(summarise([tmp_path / SUITE, tmp_path / "another"]))


@pytest.mark.parametrize("tasks", [6, 20])
def test_comparisons_fit_eighty_columns(
    tasks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    names = [f"oxford_flowers{number}" for number in range(tasks)]
    made = Report(suite=SUITE, upstream="task_arithmetic")
    for name, level in {"base": 0.1, "experts": 0.9, "task_arithmetic": 0.5}.items():
        made.add_row(name, dict.fromkeys(names, level))
    for number in range(12):
        accuracy = {task: 0.6 + 0.002 * (number + at) for at, task in enumerate(names)}
        made.add_row(f"prob_surgery:calibration_{number}", accuracy, cost=COST)
    made.write(tmp_path)
    show_side_by_side(summarise([tmp_path]))
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for number in range(12):
        row = made.rows[f"prob_surgery:calibration_{number}"]
        assert f"{100 * row['average']:.1f}" in text.split()
        worst = [names[0].removeprefix("oxford_"), f"{25 + number / 2:.0f}", "%"]
        assert any(line.split()[-4:-1] == worst for line in text.splitlines())
