"""The literal command on the bundled suite, and what it leaves behind."""

import csv
import io
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_runs import fusion_bench
from transformers import CLIPProcessor, CLIPVisionModel

from fusion_bench_featcal import FeatCalSettings
from fusion_bench_featcal.json_files import read_lines
from fusion_bench_featcal.results import Report
from fusion_bench_featcal.suites import image

SAMPLES = 24


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """One run of the literal command, with few samples, a preset and a saved model."""
    folder = tmp_path_factory.mktemp("run")
    result = fusion_bench(
        [
            "method=featcal",
            "modelpool=clip-vit-mini_alphabets2",
            f"method.samples_per_task={SAMPLES}",
            "method.presets={anchor: {ridge_lambda: 1.0e6, expert_read_budget: 50%}}",
            "fabric/loggers=csv_logger",
            f"path.log_dir={folder}/log",
            'merged_model_save_path="{log_dir}/calibrated"',
        ],
        folder,
    )
    return folder / "log", result


def test_run_leaves_what_the_contract_lists(run) -> None:
    log_dir, _ = run
    for name in ("report.json", "lines.csv", "report.md", "items.npz", "config_resolved.yaml",
                 "calibration_log.jsonl", "calibration_log.anchor.jsonl", "reads.json",
                 "reads.anchor.json", "program_report.json"):  # fmt: skip
        assert (log_dir / name).is_file(), name
    assert not list(log_dir.rglob("*.part"))


def test_logger_gets_the_drift_of_every_block(run) -> None:
    log_dir, _ = run
    with open(log_dir / "metrics.csv", newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    blocks = [record for record in read_lines(log_dir / "calibration_log.jsonl")
              if record["kind"] == "block"]  # fmt: skip
    assert [int(line["step"]) for line in lines] == list(range(len(blocks)))
    for row in ("featcal", "featcal_anchor"):
        for line in lines:
            drift = [float(line[name]) for name in line if f"/{row}/relative_drift_" in name]
            assert len(drift) == 4 and all(0 < value < 2 for value in drift)


def test_report_has_the_rows_asked_for(run) -> None:
    report = Report.load(run[0])
    assert list(report.rows) == ["base", "experts", "task_arithmetic", "featcal", "featcal:anchor"]
    assert report.upstream == "task_arithmetic"
    assert report.suite == "clip-vit-mini_alphabets2"
    assert report.seeds == {"featcal": 42, "featcal:anchor": 42}
    assert set(report.tasks) == set(image.ALPHABETS2)
    assert report.settings["featcal"] == FeatCalSettings(samples_per_task=SAMPLES).as_dict()
    assert report.samples["featcal"]["mini_korean"] == {"samples": SAMPLES, "split": "train"}


def test_calibration_recovers_a_part_of_the_gap(run) -> None:
    report = Report.load(run[0])
    share = report.recovered_gap["featcal"]
    assert share is not None and share > 0.2
    assert report.rows["experts"]["average"] > report.rows["task_arithmetic"]["average"] + 0.1


def test_fusion_bench_gets_the_same_accuracies_and_losses(run) -> None:
    report = Report.load(run[0])
    given = json.loads((run[0] / "program_report.json").read_text())
    for ours, key in ((report.rows, "accuracy"), (report.loss, "loss")):
        for task in image.ALPHABETS2:
            assert given[task][key] == ours["featcal"][task]
    assert report.loss["featcal"]["average"] == pytest.approx(given["average"]["loss"])
    assert report.loss.keys() == report.rows.keys()


def test_logger_has_the_reports_numbers(run) -> None:
    report = Report.load(run[0])
    line, *_ = csv.DictReader(io.StringIO((run[0] / "metrics.csv").read_text()))
    assert float(line["experts/average"]) == pytest.approx(report.rows["experts"]["average"])
    average = report.rows["featcal"]["average"]
    assert float(line["task_arithmetic/featcal/average"]) == pytest.approx(average)


def test_table_and_what_to_do_next_come_last(run) -> None:
    log_dir, result = run
    lines = result.stdout.strip().splitlines()
    assert lines[-1].endswith(f"featcal report {log_dir}")
    assert f"reports: {log_dir}" in lines[-5:]
    assert f"saved the model of row featcal: {log_dir}/calibrated" in lines[-5:]
    assert any("featcal:anchor" in line for line in lines[-40:])
    table = lines[next(n for n, line in enumerate(lines) if "merged by" in line) :]
    assert max(len(line) for line in table if str(log_dir) not in line) <= 80


def test_saved_model_loads_with_plain_transformers_and_gives_the_reported_accuracy(run) -> None:
    log_dir, _ = run
    model = CLIPVisionModel.from_pretrained(log_dir / "calibrated").eval()
    processor: Any = CLIPProcessor.from_pretrained(log_dir / "calibrated")
    data = image.load_split("mini_korean", "test")
    pixels = processor(images=[item["image"] for item in data], return_tensors="pt")["pixel_values"]
    from transformers import CLIPModel

    clip = CLIPModel.from_pretrained(image.path()).eval()
    words = processor(
        text=image.load_arrays("mini_korean").prompts(), return_tensors="pt", padding=True
    )
    with torch.no_grad():
        head = clip.text_projection(clip.text_model(**words).pooler_output)
        features = clip.visual_projection(model(pixel_values=pixels).pooler_output)
        chosen = (features @ torch.nn.functional.normalize(head, dim=-1).T).argmax(-1)
    correct = chosen.numpy() == np.array([item["label"] for item in data])
    assert correct.mean() == pytest.approx(Report.load(log_dir).rows["featcal"]["mini_korean"])


def test_manifest_of_reads(run) -> None:
    log_dir, result = run
    report = Report.load(log_dir)
    reads = json.loads((log_dir / "reads.json").read_text())
    assert "merging with task_arithmetic" in result.stdout + result.stderr
    totals = reads["totals"]
    assert totals["experts_read"] == totals["experts_planned"] == reads["plan"]["full"]
    assert totals["all_experts_read"] == totals["experts_read"] + totals["upstream_experts_read"]
    assert report.cost["featcal"]["expert_bytes"] == totals["all_experts_read"]
    half = json.loads((log_dir / "reads.anchor.json").read_text())
    assert half["upstream"]["earlier"]
    assert half["plan"]["limit"] == half["plan"]["full"] // 2
    read = half["totals"]["experts_read"]
    assert 0.45 * half["plan"]["full"] < read <= half["plan"]["limit"]
    assert report.cost["featcal:anchor"]["expert_bytes"] == read
    assert report.settings["featcal:anchor"]["expert_read_budget"] == "50%"


def test_failed_run_exits_nonzero_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    result = fusion_bench(
        [
            "method=featcal",
            "modelpool=clip-vit-mini_TA6",
            "method.calibration_split=val",
            "method.compare_with=[]",
            f"path.log_dir={tmp_path}/log",
            f"merged_model_save_path={tmp_path}/calibrated",
        ],
        tmp_path,
        check=False,
    )
    assert result.returncode != 0
    assert "method.calibration_split (now val)" in result.stderr + result.stdout
    assert not (tmp_path / "calibrated").exists()
    assert not list((tmp_path / "log").glob("report*"))
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.slow
def test_file_in_place_of_the_log_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    result = fusion_bench(
        ["method=featcal", "modelpool=clip-vit-mini_TA6", f"path.log_dir={tmp_path}/taken"],
        tmp_path,
        check=False,
    )
    assert result.returncode != 0
    assert re.search(r"taken.*: (File exists|Not a dir).*path\.log_dir", result.stderr)
