"""Tables, pages and files of several runs: one after the other, and side by side."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from synthetic import leave_seeds, make_report, row_of

from fusion_bench_featcal.lab.report.columns import ACCURACY
from fusion_bench_featcal.lab.report.find import find
from fusion_bench_featcal.lab.report.views import show, write
from fusion_bench_featcal.nearest_names import REPORT_COLUMNS
from fusion_bench_featcal.results import Report, ReportError
from fusion_bench_featcal.results.report import summarise
from fusion_bench_featcal.results.summary import FailedCell, Summary
from fusion_bench_featcal.results.tables import TEXT_WIDTH


def page_of(summary: Summary) -> str:
    folder = Path(summary.runs[0]).parent / "written"
    return (write(summary, folder).parent / "report.md").read_text()


def lines_of(summary: Summary) -> list[dict[str, str]]:
    folder = Path(summary.runs[0]).parent / "written"
    text = (write(summary, folder).parent / "report.csv").read_text()
    return list(csv.DictReader(io.StringIO(text)))


@pytest.fixture
def seeds(tmp_path: Path) -> list[Path]:
    return leave_seeds(tmp_path)


def test_a_report_of_several_runs_never_replaces_a_runs_own(seeds: list[Path]):
    before = (seeds[0] / "report.json").read_text()
    with pytest.raises(ReportError, match=r"holds the report of a run.*--out"):
        write(summarise(seeds), seeds[0], "--out")
    assert (seeds[0] / "report.json").read_text() == before


def test_written_files_tell_the_same_story(seeds: list[Path], tmp_path: Path):
    summary = summarise(seeds)
    folder = write(summary, tmp_path / "all").parent
    assert sorted(p.name for p in folder.iterdir()) == ["report.csv", "report.json", "report.md"]
    content = json.loads((folder / "report.json").read_text())
    (row,) = [row for row in content["rows"] if row["name"] == "featcal"]
    assert row["recovered_gap"] == pytest.approx(0.5)
    lines = lines_of(summary)
    (line,) = [x for x in lines if x["name"] == "featcal"]
    assert float(line["gain_low"]) == pytest.approx(row["gain_interval"]["low"], abs=1e-6)
    assert float(line["deviation.average"]) == pytest.approx(0.05)
    assert float(line["accuracy.cars"]) == pytest.approx(row["accuracy"]["cars"])
    assert len(lines) == 4
    assert None not in {value for line in lines for value in line.values()}


def test_tables_name_each_repair_under_its_merger(seeds: list[Path], tmp_path: Path):
    levels = {"base": 0.3, "experts": 0.9, "wudi": 0.7, "featcal": 0.85}
    make_report(levels, upstream="wudi").write(tmp_path / "wudi")
    text = page_of(summarise(find([tmp_path]).runs))
    heads = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    order = ["base", "experts", "task_arithmetic", "+ featcal", "wudi", "+ featcal"]
    assert heads == ["mean over runs, %", *order, "accuracy, %", *order, "mean over runs", *order]
    assert "75.0 ± 12.4" in text


def test_tables_fit_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    make_report(tasks=[f"mini_task_number{n}" for n in range(6)]).write(tmp_path / "run")
    show(summarise([tmp_path / "run"]))
    assert max(map(len, capsys.readouterr().out.splitlines())) <= TEXT_WIDTH


def test_the_legend_names_columns_that_have_values_only(seeds: list[Path]):
    text = page_of(summarise(seeds))
    assert "gain over merger: points" in text and "memory: peak" in text
    assert "unseen:" not in text and "GPU energy:" not in text


def test_losses_are_averaged_over_runs_and_absent_where_one_has_none(tmp_path: Path):
    for seed in (1, 2):
        report = make_report({"task_arithmetic": 0.5}, seed=seed, items=False)
        report.add_row("featcal", {"cars": 0.5, "dtd": 0.5}, loss={"cars": seed, "dtd": 4.0})
        report.add_row("new", {"cars": 0.5, "dtd": 0.5}, loss={"cars": 1.0} if seed == 1 else {})
        report.write(tmp_path / str(seed))
    summary = summarise(find([tmp_path]).runs)
    assert row_of(summary, "featcal").loss == {"cars": 1.5, "dtd": 4.0, "average": 2.75}
    assert row_of(summary, "new").loss == {}
    lines = {x["name"]: x["loss.cars"] for x in lines_of(summary)}
    assert (lines["featcal"], lines["new"]) == ("1.500000", "")
    text = "| task_arithmetic + featcal | 1.5000 | 4.0000 | 2.7500 |"
    assert text in page_of(summary)


# ---- side by side

SUITE = "clip-vit-large-patch14_TALL20"
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
    made.add_row("prob_surgery", {"a": 0.6, "b": 0.5}, cost=costs, samples=samples)
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


def test_what_is_not_measured_is_called_unavailable(tmp_path: Path):
    report("wudi", 0.4).write(tmp_path / "one")
    report("wudi", 0.4, seed=43, seconds=4.0, peak_rss_bytes="unavailable").write(tmp_path / "two")
    row = row_of(summarise([tmp_path / "one", tmp_path / "two"]), "prob_surgery")
    assert row.cost["seconds"] == 3.0
    assert row.cost["peak_rss_bytes"] == row.cost["peak_accelerator_bytes"] == "unavailable"
    assert row.cost["task_id_at_inference"] == "yes"
    assert (row.seeds, row.samples) == ([42, 43], "256 test")


def test_failed_cells_stand_in_every_table(comparison: Summary, capsys):
    show(comparison)
    for text in (capsys.readouterr().out, page_of(comparison)):
        for words in ("+ surgery", "the features are not finite", "out of memory"):
            assert words in text
    lines = lines_of(comparison)
    assert len(lines) == 6 + 2
    assert lines[-1]["status"] == "failed: out of memory"
    assert lines[3]["cost.parameters_added"] == "1536.000000"


def test_a_written_comparison_stands_for_its_own_runs_and_failures(
    comparison: Summary, tmp_path: Path
):
    path = write(comparison, tmp_path)
    content = json.loads(path.read_text())
    assert content["kind"] == "comparison"
    assert content["rows"][3]["normalised"] == pytest.approx(0.875)
    report("from_before", 0.1).write(tmp_path / "from_before")
    found = find([tmp_path, tmp_path / "one"])
    assert found.runs == [tmp_path / "one", tmp_path / "two"]
    assert (found.comparisons, found.failed) == ([tmp_path], comparison.failed)
    path.write_text(path.read_text().replace("reason", "raisin"))
    with pytest.raises(ReportError, match=r"report\.json: failed\[0\]: no reason"):
        find([tmp_path])


def test_means_over_seeds_come_with_half_of_their_interval(tmp_path: Path):
    """Averages 0.4 and 0.5; shares of the experts' 0.8 and 0.5 follow; 2 and 4 seconds.

    Of two runs half an interval is 12.706 / 2**0.5 = 8.98 deviations.
    """
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
    text = page_of(summary)
    assert "45.0 ± 63.5" in text and "73.1 ± 103.2" in text and "3.00 ± 12.71" in text
    (line,) = (x for x in lines_of(summary) if x["name"] == "wudi")
    assert (line["runs"], line["cost_deviation.normalised"]) == ("2", "0.114905")


def test_energy_and_inference_stand_in_the_table_of_costs(tmp_path: Path):
    measured: dict[str, Any] = {"gpu_energy_wh": 0.01234, "inference_seconds_per_sample": 0.0015}
    report("wudi", 0.4, **measured).write(tmp_path / "run")
    summary = summarise([tmp_path / "run"])
    lines = page_of(summary).splitlines()
    (cells,) = (line.split(" | ") for line in lines if "6 / 1536" in line)
    assert cells[3:7] == ["2.00", "1024", "0.0123", "1.50"]
    heads = next(line for line in lines if "modules / parameters" in line)
    assert "GPU energy" in heads and "GPU memory" not in heads  # which no row has
    (line,) = (x for x in lines_of(summary) if x["name"] == "prob_surgery")
    assert (line["cost.gpu_energy_wh"], line["cost.inference_seconds_per_sample"]) == (
        "0.012340",
        "0.001500",
    )


def test_each_suite_has_its_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for suite in (SUITE, "another"):
        made = report("wudi", 0.4)
        made.suite = suite
        made.write(tmp_path / suite)
    show(summarise([tmp_path / SUITE, tmp_path / "another"]))
    text = " ".join(capsys.readouterr().out.split())
    for suite in (SUITE, "another"):
        assert f"{suite}: accuracy" in text and f"{suite}: costs" in text


@pytest.mark.parametrize("tasks", [14, 20])
def test_comparisons_fit_eighty_columns(
    tasks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    names = [f"oxford_flowers{number}" for number in range(tasks)]
    made = Report(suite=f"clip-vit-large-patch14_TALL{tasks}", upstream="task_arithmetic")
    for name, level in {"base": 0.1, "experts": 0.9, "task_arithmetic": 0.5}.items():
        made.add_row(name, dict.fromkeys(names, level))
    for number in range(12):
        accuracy = {task: 0.6 + 0.002 * (number + at) for at, task in enumerate(names)}
        made.add_row(f"prob_surgery:calibration_{number}", accuracy, cost=COST)
    made.write(tmp_path)
    show(summarise([tmp_path]))
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for number in range(12):
        row = made.rows[f"prob_surgery:calibration_{number}"]
        assert f"{100 * row['average']:.1f}" in text.split()
        worst = [names[0].removeprefix("oxford_"), f"{25 + number / 2:.0f}", "%"]
        assert any(line.split()[-3:] == worst for line in text.splitlines())


def test_no_task_can_have_the_name_of_a_column():
    heads = {column.head for column in ACCURACY}
    assert heads <= REPORT_COLUMNS
