"""The literal command on the bundled suite."""

import csv
from pathlib import Path

import pytest
from cli_runs import fusion_bench

from fusion_bench_featcal.lab.report.study import Study
from fusion_bench_featcal.results import Report

WORDS = [
    "method=study/samples", "modelpool=clip-vit-mini_alphabets2", "method.seeds=[42]",
    "method.post_merging=[ridge_surgery]", "method.references=[]", "path.log_dir=log",
]  # fmt: skip


@pytest.mark.slow
def test_command_runs_two_points_and_shares_cells_with_compare(tmp_path: Path) -> None:
    done = fusion_bench([*WORDS, "method.axes.samples_per_task=[4,8]"], tmp_path)
    assert "+ ridge_surgery" in done.stdout and "n = 8" in done.stdout
    study = Study.load(tmp_path / "log")
    points = study.points
    assert [point.labels["samples_per_task"] for point in points] == [4, 8]
    with (tmp_path / "log" / "lines.csv").open() as file:
        samples = {line["samples_per_task"] for line in csv.DictReader(file)}
    assert samples == {"4", "8"}
    kept = tmp_path / "outputs" / "comparison" / "clip-vit-mini_alphabets2"
    assert len(list(kept.glob("cells/*/result.json"))) == 3  # merged once, and two corrections
    compare = [
        "method=compare", "modelpool=clip-vit-mini_alphabets2", "method.samples_per_task=8",
        "method.upstreams=[task_arithmetic]", "method.alone=[]", "method.references=[]",
        "method.post_merging=[ridge_surgery]", "path.log_dir=compare",
    ]  # fmt: skip
    fusion_bench(compare, tmp_path)
    assert len(list(kept.glob("cells/*/result.json"))) == 3  # all of them were finished
    report = Report.load(tmp_path / "compare" / "task_arithmetic")
    (row,) = points[1].rows("task_arithmetic", "ridge_surgery")
    assert row.accuracy == pytest.approx(report.rows["ridge_surgery"])


@pytest.mark.slow
def test_the_study_of_costs_measures_cells_apart(tmp_path: Path) -> None:
    words = ["method=study/cost", *WORDS[1:], "method.axes.samples_per_task=[4]"]
    fusion_bench(words, tmp_path)
    (point,) = Study.load(tmp_path / "log").points
    (row,) = point.rows("task_arithmetic", "ridge_surgery")
    assert row.cost["seconds"] > 0 and row.cost["peak_rss_bytes"] > 0
    assert row.samples == "4 train"
