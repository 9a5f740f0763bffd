"""The literal command on the bundled suite."""

import json
from pathlib import Path

import pytest
from cli_runs import fusion_bench

from fusion_bench_featcal.results import Report


@pytest.mark.slow
def test_command_compares_and_leaves_reports(tmp_path: Path) -> None:
    result = fusion_bench(
        [
            "method=compare",
            "modelpool=clip-vit-mini_alphabets2",
            "method.upstreams=[simple_average]",
            "method.alone=[]",
            "method.post_merging=[anchor_only,ridge_surgery]",
            "method.samples_per_task=8",
            f"path.log_dir={tmp_path}/log",
        ],
        tmp_path,
    )
    assert "+ ridge_surgery" in result.stdout
    *_, last = result.stdout.strip().splitlines()
    assert last.endswith(
        f"featcal report {tmp_path}/log"
    )  # nothing of FusionBench's comes after it
    assert "8 train" in result.stdout
    content = json.loads((tmp_path / "log" / "report.json").read_text())
    assert content["failed"] == []
    assert content["suite"] == "clip-vit-mini_alphabets2"
    report = Report.load(tmp_path / "log" / "simple_average")
    assert list(report.rows) == [
        "base",
        "experts",
        "simple_average",
        "anchor_only",
        "ridge_surgery",
    ]
    assert report.cost["ridge_surgery"]["modules_added"] == 2
    assert (tmp_path / "log" / "config_resolved.yaml").is_file()
    # FusionBench's default logger is TensorBoard's.
    assert list((tmp_path / "log").glob("events.out.tfevents.*"))
    assert isinstance(report.cost["ridge_surgery"]["inference_seconds_per_sample"], float)
    assert isinstance(report.cost["experts"]["inference_seconds_per_sample"], float)
    kept = tmp_path / "outputs" / "comparison" / "clip-vit-mini_alphabets2"
    assert len(list(kept.glob("cells/*/result.json"))) == 5
    assert len(list(kept.glob("upstreams/*/model.safetensors"))) == 1
