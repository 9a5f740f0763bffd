"""The comparison's table: what stands in it, what it leaves out, and how it is written."""

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from fusion_bench_featcal.results import Report, ReportError
from fusion_bench_featcal.results.find import FailedCell, find
from fusion_bench_featcal.results.summary import Summary, summarise
from fusion_bench_featcal.results.views import (
    show_side_by_side,
    side_by_side_csv,
    side_by_side_markdown,
    write_side_by_side,
)

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
    made.add_row(
        "prob_surgery",
        {"a": 0.6, "b": 0.5},
        settings=PAPER,
        cost=COST | changes,
        samples={task: {"samples": 256, "split": "test"} for task in ("a", "b")},
    )
    return made


@pytest.fixture
def comparison(tmp_path: Path) -> Summary:
    report("task_arithmetic", 0.4).write(tmp_path / "one")
    report("ties_merging", 0.3).write(tmp_path / "two")
    failed = [
        FailedCell(
            upstream="task_arithmetic", name="surgery", reason="the features are not finite"
        ),
        FailedCell(upstream="wudi", name="none", reason="out of memory"),
    ]
    return summarise([tmp_path / "one", tmp_path / "two"], failed)


def row_of(comparison: Summary, upstream: str, name: str) -> Any:
    (row,) = (r for r in comparison.rows if (r.upstream, r.name) == (upstream, name))
    return row


def test_rows_stand_under_their_merger_and_references_once(comparison: Summary) -> None:
    assert [row.name for row in comparison.displayed(SUITE)] == [
        "base",
        "experts",
        "task_arithmetic",
        "prob_surgery",
        "ties_merging",
        "prob_surgery",
    ]


def test_normalised_average_divides_task_by_task(comparison: Summary) -> None:
    row = row_of(comparison, "task_arithmetic", "prob_surgery")
    assert row.normalised == pytest.approx((0.6 / 0.8 + 0.5 / 0.5) / 2)
    assert row.gain == pytest.approx(0.55 - 0.4)


def test_without_experts_there_is_no_normalised_average(tmp_path: Path) -> None:
    made = Report(suite=SUITE, upstream="wudi")
    made.add_row("wudi", {"a": 0.5})
    made.write(tmp_path)
    assert summarise([tmp_path]).rows[0].normalised is None


def test_published_average_comes_with_its_doubt(comparison: Summary) -> None:
    published = row_of(comparison, "task_arithmetic", "prob_surgery").published
    assert published.value == pytest.approx(0.833)
    assert "FeatCal variant" in published.note
    assert "83.3*" in side_by_side_markdown(comparison)
    assert row_of(comparison, "ties_merging", "prob_surgery").published is None


def test_what_is_not_measured_is_called_unavailable(tmp_path: Path) -> None:
    report("wudi", 0.4).write(tmp_path / "one")
    report("wudi", 0.4, seed=43, seconds=4.0, peak_rss_bytes="unavailable").write(tmp_path / "two")
    row = row_of(summarise([tmp_path / "one", tmp_path / "two"]), "wudi", "prob_surgery")
    assert row.cost["seconds"] == 3.0
    assert row.cost["peak_rss_bytes"] == "unavailable"
    assert row.cost["peak_accelerator_bytes"] == "unavailable"
    assert row.cost["task_id_at_inference"] == "yes"
    assert row.seeds == [42, 43]
    assert row.samples == "256 test"


def test_failed_cells_stand_in_every_table(comparison: Summary, capsys) -> None:
    show_side_by_side(comparison)
    for text in (capsys.readouterr().out, side_by_side_markdown(comparison)):
        assert "+ surgery" in text
        assert "the features are not finite" in text
        assert "out of memory" in text
    lines = list(csv.DictReader(io.StringIO(side_by_side_csv(comparison))))
    assert len(lines) == 6 + 2
    assert lines[-1]["status"] == "failed: out of memory"
    assert lines[3]["parameters_added"] == "1536.0"
    assert lines[3]["published"] == "0.833000"


def test_written_comparison_is_no_run(comparison: Summary, tmp_path: Path) -> None:
    path = write_side_by_side(comparison, tmp_path)
    content = json.loads(path.read_text())
    assert content["kind"] == "comparison"
    assert content["rows"][3]["normalised"] == pytest.approx(0.875)
    assert find([tmp_path]).runs == [tmp_path / "one", tmp_path / "two"]
    assert {file.name for file in tmp_path.iterdir()} == {
        "one",
        "two",
        "report.json",
        "report.csv",
        "report.md",
    }


def test_means_over_seeds_come_with_their_deviation(tmp_path: Path) -> None:
    """Averages 0.4 and 0.5; shares of the experts' 0.8 and 0.5 follow; 2 and 4 seconds."""
    for number, (merged, seconds) in enumerate([(0.4, 2.0), (0.5, 4.0)]):
        made = report("wudi", merged, seed=number, seconds=seconds)
        made.seeds["comparison"] = number
        made.write(tmp_path / str(number))
    comparison = summarise([tmp_path / "0", tmp_path / "1"])
    assert comparison.seeds == [0, 1]
    merger = row_of(comparison, "wudi", "wudi")
    shares = [(0.4 / 0.8 + 0.4 / 0.5) / 2, (0.5 / 0.8 + 0.5 / 0.5) / 2]
    assert merger.normalised == pytest.approx(sum(shares) / 2)
    assert merger.spread["normalised"] == pytest.approx(abs(shares[0] - shares[1]) / 2**0.5)
    assert row_of(comparison, "wudi", "prob_surgery").spread["seconds"] == pytest.approx(2**0.5)
    text = side_by_side_markdown(comparison)
    assert "45.0 ± 7.1" in text and "73.1 ± 11.5" in text and "3.00 ± 1.41" in text
    (line, *_) = (
        line
        for line in csv.DictReader(io.StringIO(side_by_side_csv(comparison)))
        if line["name"] == "wudi"
    )
    assert (line["runs"], line["normalised_deviation"]) == ("2", "0.114905")


def test_energy_and_inference_stand_in_the_table_of_costs(tmp_path: Path) -> None:
    measured: dict[str, Any] = {"gpu_energy_wh": 0.01234, "inference_seconds_per_sample": 0.0015}
    report("wudi", 0.4, **measured).write(tmp_path)
    comparison = summarise([tmp_path])
    (line,) = (
        line for line in side_by_side_markdown(comparison).splitlines() if "6 / 1536" in line
    )
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[4:9] == ["2.00", "1024", "unavailable", "0.0123", "1.50"]
    assert ",0.01234,0.0015," in side_by_side_csv(comparison)


def test_runs_of_two_suites_are_no_comparison(tmp_path: Path) -> None:
    report("wudi", 0.4).write(tmp_path / "one")
    other = report("wudi", 0.4)
    other.suite = "another"
    other.write(tmp_path / "two")
    with pytest.raises(ReportError, match=rf"these runs are of {SUITE}, another: name those of"):
        show_side_by_side(summarise([tmp_path / "one", tmp_path / "two"]))


def test_a_comparison_stands_for_its_own_runs_and_failures(
    comparison: Summary, tmp_path: Path
) -> None:
    write_side_by_side(comparison, tmp_path)
    report("from_before", 0.1).write(tmp_path / "from_before")
    found = find([tmp_path, tmp_path / "one"])
    assert found.runs == [tmp_path / "one", tmp_path / "two"]
    assert found.comparisons == [tmp_path]
    assert found.failed == comparison.failed


def test_damaged_failures_are_named(comparison: Summary, tmp_path: Path) -> None:
    path = write_side_by_side(comparison, tmp_path)
    path.write_text(re.sub(r'"digest": "\w+",', "", path.read_text()).replace("reason", "raisin"))
    with pytest.raises(ReportError, match=r"report\.json: failed\[0\]: no reason"):
        find([tmp_path])


def test_a_comparison_never_replaces_a_runs_report(comparison: Summary, tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"holds the report of a run.*--out"):
        write_side_by_side(comparison, tmp_path / "one", "--out")


@pytest.mark.parametrize("tasks", [6, 14, 20])
def test_comparisons_fit_eighty_columns(
    tasks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
