import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import LEVELS, make_report

from fusion_bench_featcal.results import AVERAGE, ReportError
from fusion_bench_featcal.results.find import find
from fusion_bench_featcal.results.summary import Summary, SummaryRow, summarise
from fusion_bench_featcal.results.tables import TEXT_WIDTH, console
from fusion_bench_featcal.results.views import (
    combined_csv,
    combined_markdown,
    combined_tables,
    write_combined,
)


def leave_run(folder: Path, featcal: float = 0.75, **more: Any) -> Path:
    make_report({**LEVELS, "featcal": featcal}, **more).write(folder)
    return folder


def find_row(combined: Summary, name: str) -> SummaryRow:
    (row,) = [row for row in combined.rows if row.name == name]
    return row


@pytest.fixture
def seeds(tmp_path: Path) -> list[Path]:
    """Three calibration seeds: featcal reaches 70, 75 and 80 %."""
    levels = {1: 0.7, 2: 0.75, 3: 0.8}
    return [leave_run(tmp_path / f"seed{s}", level, seed=s) for s, level in levels.items()]


def test_mean_deviation_gain_and_share_over_seeds(seeds: list[Path]):
    combined = summarise(seeds)
    row = find_row(combined, "featcal")
    assert row.accuracy[AVERAGE] == pytest.approx(0.75)
    assert row.deviation is not None
    assert row.deviation[AVERAGE] == pytest.approx(0.05)
    assert row.gain == pytest.approx(0.15)
    assert row.recovered_gap == pytest.approx(0.5)
    assert row.run_seeds == [{"calibration": seed} for seed in (1, 2, 3)]
    assert row.cost == {"seconds": 10.0, "peak_rss_bytes": 2.0**30}
    merged = find_row(combined, "task_arithmetic")
    assert merged.deviation == {"cars": 0.0, "dtd": 0.0, AVERAGE: 0.0}
    assert find_row(summarise(seeds[:1]), "featcal").deviation is None


def test_intervals_come_from_the_seeds_together(seeds: list[Path]):
    row = find_row(summarise(seeds), "featcal")
    assert row.gain_interval is not None and row.recovered_gap_interval is not None
    assert row.gain_interval.estimate == pytest.approx(row.gain)
    assert row.gain_interval.low < 0.15 < row.gain_interval.high
    assert row.recovered_gap_interval.estimate == pytest.approx(row.recovered_gap)


def test_without_items_there_is_no_interval_and_a_note_says_so(tmp_path: Path):
    combined = summarise([leave_run(tmp_path / "run", items=False)])
    row = find_row(combined, "featcal")
    assert row.gain == pytest.approx(0.15)
    assert row.gain_interval is None and row.recovered_gap_interval is None
    assert any("items.npz" in note and "run" in note for note in combined.notes)


def test_upstream_mergers_and_suites_stay_apart(tmp_path: Path):
    leave_run(tmp_path / "a", 0.7)
    leave_run(tmp_path / "b", 0.8, suite="other", tasks=("svhn",))
    levels = {"base": 0.3, "experts": 0.9, "wudi": 0.7, "featcal": 0.85}
    make_report(levels, upstream="wudi").write(tmp_path / "c")
    combined = summarise(find([tmp_path]).runs)
    found = {(row.suite, row.upstream): row.accuracy[AVERAGE] for row in combined.rows
             if row.name == "featcal"}  # fmt: skip
    expected = {
        ("toy", "task_arithmetic"): 0.7,
        ("toy", "wudi"): 0.85,
        ("other", "task_arithmetic"): 0.8,
    }
    assert found == pytest.approx(expected)


def test_a_row_that_only_some_runs_have_is_compared_with_the_merged_model_of_those(tmp_path: Path):
    make_report({"task_arithmetic": 0.5}, seed=1).write(tmp_path / "one")
    levels = {"task_arithmetic": 0.6, "featcal": 0.7}
    make_report(levels, seed=2).write(tmp_path / "two")
    row = find_row(summarise(find([tmp_path]).runs), "featcal")
    assert row.gain == pytest.approx(0.1)
    assert row.recovered_gap is None


def test_a_repeated_run_counts_once(seeds: list[Path], tmp_path: Path):
    leave_run(tmp_path / "again", 0.7, seed=1)
    row, once = (
        find_row(summarise(runs), "featcal") for runs in ([*seeds, tmp_path / "again"], seeds)
    )
    assert row.run_seeds == [{"calibration": seed} for seed in (1, 2, 3)]
    assert row == once


def test_same_seeds_with_other_results_are_refused(seeds: list[Path], tmp_path: Path):
    leave_run(tmp_path / "again", 0.8, seed=1)
    pattern = r"row 'featcal' differs .*same seeds.*average 0\.7 in .*seed1, 0\.8 in .*again"
    with pytest.raises(ReportError, match=pattern):
        summarise([*seeds, tmp_path / "again"])


def test_other_settings_are_refused_with_both_values(seeds: list[Path], tmp_path: Path):
    leave_run(tmp_path / "odd", seed=4, settings={"ridge_lambda": 0.5})
    pattern = r"'featcal' .*different ridge_lambda: 0\.05 in .*seed1, 0\.5 in .*odd"
    with pytest.raises(ReportError, match=pattern):
        summarise([*seeds, tmp_path / "odd"])


def test_methods_in_order_differ_by_their_settings_and_not_by_their_seeds(tmp_path: Path):
    def chain(seed: int, ridge_lambda: float) -> dict[str, dict[str, float]]:
        return {"featcal": {"ridge_lambda": ridge_lambda, "seed": seed}, "ridge": {"seed": seed}}

    one = leave_run(tmp_path / "one", 0.7, seed=1, settings=chain(1, 0.05))
    two = leave_run(tmp_path / "two", 0.8, seed=2, settings=chain(2, 0.05))
    assert len(find_row(summarise([one, two]), "featcal").run_seeds) == 2
    odd = leave_run(tmp_path / "odd", 0.8, seed=3, settings=chain(3, 0.5))
    with pytest.raises(ReportError, match=r"different featcal\.ridge_lambda: 0\.05 in .*0\.5 in"):
        summarise([one, two, odd])


def test_other_test_sets_are_refused_with_both_sizes(seeds: list[Path], tmp_path: Path):
    report = make_report(seed=4, items=False)
    report.test_sets = {"cars": {"items": 100}}
    report.write(tmp_path / "odd")
    pattern = r"different test sets for task 'cars', items: 200 in .*seed1, 100 in .*odd"
    with pytest.raises(ReportError, match=pattern):
        summarise([*seeds, tmp_path / "odd"])


def test_other_tasks_are_refused_with_both_lists(seeds: list[Path], tmp_path: Path):
    leave_run(tmp_path / "odd", seed=4, tasks=("cars",))
    pattern = r"toy have different tasks: \['cars', 'dtd'\] in .*seed1, \['cars'\] in .*odd"
    with pytest.raises(ReportError, match=pattern):
        summarise([*seeds, tmp_path / "odd"])


def test_different_versions_are_noted(tmp_path: Path):
    leave_run(tmp_path / "a", seed=1, versions={"torch": "2.12"})
    leave_run(tmp_path / "b", seed=2, versions={"torch": "2.13"}, notes=["slow disk"])
    notes = summarise(find([tmp_path]).runs).notes
    assert notes == ["slow disk", "runs used different versions of torch: 2.12, 2.13"]


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


def test_the_combined_report_never_replaces_a_runs_own(seeds: list[Path]):
    before = (seeds[0] / "report.json").read_text()
    with pytest.raises(ReportError, match=r"holds the report of a run.*--out"):
        write_combined(summarise(seeds), seeds[0])
    assert (seeds[0] / "report.json").read_text() == before


def test_written_files_tell_the_same_story(seeds: list[Path], tmp_path: Path):
    combined = summarise(seeds)
    folder = write_combined(combined, tmp_path / "all").parent
    assert sorted(p.name for p in folder.iterdir()) == ["report.csv", "report.json", "report.md"]
    content = json.loads((folder / "report.json").read_text())
    (row,) = [row for row in content["rows"] if row["name"] == "featcal"]
    assert row["recovered_gap"] == pytest.approx(0.5)
    lines = list(csv.DictReader(io.StringIO((folder / "report.csv").read_text())))
    (line,) = [x for x in lines if x["name"] == "featcal" and x["task"] == "average"]
    assert float(line["gain_low"]) == pytest.approx(row["gain_interval"]["low"], abs=1e-6)
    assert float(line["deviation"]) == pytest.approx(0.05)
    assert len(lines) == 4 * 3
    assert all(len(line) == 14 and None not in line.values() for line in lines)


def test_tables_name_each_repair_under_its_merger(seeds: list[Path], tmp_path: Path):
    levels = {"base": 0.3, "experts": 0.9, "wudi": 0.7, "featcal": 0.85}
    make_report(levels, upstream="wudi").write(tmp_path / "wudi")
    text = combined_markdown(summarise(find([tmp_path]).runs))
    heads = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    order = ["base", "experts", "task_arithmetic", "+ featcal", "wudi", "+ featcal"]
    assert heads == ["average, %", *order, "accuracy, %", *order]
    assert "75.0 ± 5.0" in text


def test_tables_fit_a_page(tmp_path: Path):
    names = [f"mini_task_number{number}" for number in range(6)]
    make_report(tasks=names).write(tmp_path / "run")
    terminal = console()
    for table in combined_tables(summarise([tmp_path / "run"]), TEXT_WIDTH):
        assert terminal.measure(table).maximum <= TEXT_WIDTH


def test_seeds_disagreeing_on_the_merged_model_are_averaged_too(tmp_path: Path):
    for seed, merged in ((1, 0.5), (2, 0.6)):
        levels = {"task_arithmetic": merged, "featcal": merged + 0.2, "experts": 0.95}
        make_report(levels, seed=seed).write(tmp_path / str(seed))
    combined = summarise(find([tmp_path]).runs)
    row = find_row(combined, "featcal")
    assert row.gain == pytest.approx(0.2)
    assert row.recovered_gap == pytest.approx(0.5)
    deviation = find_row(combined, "task_arithmetic").deviation
    assert deviation is not None
    assert deviation[AVERAGE] == pytest.approx(float(np.std([0.5, 0.6], ddof=1)))


def test_losses_are_averaged_over_runs_and_absent_where_one_has_none(tmp_path: Path):
    for seed in (1, 2):
        report = make_report({"task_arithmetic": 0.5}, seed=seed, items=False)
        report.add_row("featcal", {"cars": 0.5, "dtd": 0.5}, loss={"cars": seed, "dtd": 4.0})
        report.add_row("new", {"cars": 0.5, "dtd": 0.5}, loss={"cars": 1.0} if seed == 1 else {})
        report.write(tmp_path / str(seed))
    combined = summarise(find([tmp_path]).runs)
    assert find_row(combined, "featcal").loss == {"cars": 1.5, "dtd": 4.0, "average": 2.75}
    assert find_row(combined, "new").loss == {}
    lines = {
        (line["name"], line["task"]): line["loss"]
        for line in csv.DictReader(io.StringIO(combined_csv(combined)))
    }
    assert lines["featcal", "cars"] == "1.500000"
    assert lines["new", "cars"] == ""
    assert "| + featcal (task_arithmetic) | 1.5000 | 4.0000 | 2.7500 |" in combined_markdown(
        combined
    )


def test_worst_task_of_several_runs_is_that_of_their_means(tmp_path: Path):
    for seed, cars in ((1, 0.5), (2, 0.7)):
        report = make_report({"experts": 0.9, "task_arithmetic": 0.4}, seed=seed, items=False)
        report.add_row("featcal", {"cars": cars, "dtd": 0.6})
        report.write(tmp_path / str(seed))
    row = find_row(summarise(find([tmp_path]).runs), "featcal")
    assert (row.worst_task, row.worst_recovered_gap) == ("cars", pytest.approx(0.4))
    assert find_row(summarise(find([tmp_path]).runs), "experts").worst_task is None
