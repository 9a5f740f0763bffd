"""The literal command on the bundled suite, and the files and lines of its run."""

import csv
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_runs import fusion_bench
from transformers import CLIPModel, CLIPProcessor, CLIPVisionModel

from fusion_bench_featcal import FeatCalSettings
from fusion_bench_featcal.json_files import read_lines
from fusion_bench_featcal.results import Report
from fusion_bench_featcal.suites import image

SAMPLES = 24
Run = tuple[Path, subprocess.CompletedProcess[str], Report]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Folder, output and report of the literal command, with a preset and a saved model."""
    folder = tmp_path_factory.mktemp("run")
    words = [
        "method=featcal", "modelpool=clip-vit-mini_alphabets2",
        f"method.samples_per_task={SAMPLES}", "fabric/loggers=csv_logger",
        "method.presets={anchor: {ridge_lambda: 1.0e6, expert_read_budget: 50%}}",
        f"path.log_dir={folder}/log", 'merged_model_save_path="{log_dir}/calibrated"',
    ]  # fmt: skip
    result = fusion_bench(words, folder)
    return folder / "log", result, Report.load(folder / "log")


def test_files_of_a_run(run: Run) -> None:
    log_dir, _, _ = run
    for name in ("report.json", "lines.csv", "report.md", "items.npz", "config_resolved.yaml",
                 "calibration_log.jsonl", "calibration_log.anchor.jsonl", "reads.json",
                 "reads.anchor.json", "program_report.json"):  # fmt: skip
        assert (log_dir / name).is_file(), name
    assert not list(log_dir.rglob("*.part"))


def test_report_has_the_rows_asked_for_and_featcal_recovers_a_part_of_the_gap(run: Run) -> None:
    log_dir, _, report = run
    assert list(report.rows) == ["base", "experts", "task_arithmetic", "featcal", "featcal:anchor"]
    assert (report.upstream, report.suite) == ("task_arithmetic", "clip-vit-mini_alphabets2")
    assert report.seeds == {"featcal": 42, "featcal:anchor": 42}
    assert set(report.tasks) == set(image.ALPHABETS2)
    assert report.settings["featcal"] == FeatCalSettings(samples_per_task=SAMPLES).as_dict()
    assert report.samples["featcal"]["mini_korean"] == {"samples": SAMPLES, "split": "train"}
    share = report.recovered_gap["featcal"]
    assert share is not None and share > 0.2
    assert report.rows["experts"]["average"] > report.rows["task_arithmetic"]["average"] + 0.1
    given = json.loads((log_dir / "program_report.json").read_text())  # FusionBench's own
    for ours, key in ((report.rows, "accuracy"), (report.loss, "loss")):
        for task in image.ALPHABETS2:
            assert given[task][key] == ours["featcal"][task]
    assert report.loss["featcal"]["average"] == pytest.approx(given["average"]["loss"])
    assert report.loss.keys() == report.rows.keys()


def test_logger_has_the_reports_numbers_and_the_drift_of_every_block(run: Run) -> None:
    log_dir, _, report = run
    with open(log_dir / "metrics.csv", newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    for name, row in (("experts", "experts"), ("task_arithmetic/featcal", "featcal")):
        assert float(lines[0][f"{name}/average"]) == pytest.approx(report.rows[row]["average"])
    kinds = [record["kind"] for record in read_lines(log_dir / "calibration_log.jsonl")]
    assert [int(line["step"]) for line in lines] == list(range(kinds.count("block")))
    for row in ("featcal", "featcal_anchor"):
        for line in lines:
            drift = [float(line[name]) for name in line if f"/{row}/relative_drift_" in name]
            assert len(drift) == 4 and all(0 < value < 2 for value in drift)


def test_table_and_next_steps_come_last(run: Run) -> None:
    log_dir, result, _ = run
    lines = result.stdout.strip().splitlines()
    assert lines[-1].endswith(f"featcal report {log_dir}")
    assert f"reports: {log_dir}" in lines[-5:]
    assert f"saved the model of row featcal: {log_dir}/calibrated" in lines[-5:]
    assert any("featcal:anchor" in line for line in lines[-40:])
    table = lines[next(n for n, line in enumerate(lines) if "merged by" in line) :]
    assert max(len(line) for line in table if str(log_dir) not in line) <= 80


def test_saved_model_loads_with_plain_transformers_and_has_the_reported_accuracy(run: Run) -> None:
    folder = run[0] / "calibrated"
    model = CLIPVisionModel.from_pretrained(folder).eval()
    processor: Any = CLIPProcessor.from_pretrained(folder)
    clip = CLIPModel.from_pretrained(image.path()).eval()
    data, prompts = image.load_split("mini_korean", "test"), image.load_arrays("mini_korean")
    inputs = processor(images=[item["image"] for item in data], text=prompts.prompts(),
                       return_tensors="pt", padding=True)  # fmt: skip
    pixels = inputs.pop("pixel_values")
    with torch.no_grad():
        head = clip.text_projection(clip.text_model(**inputs).pooler_output)
        features = clip.visual_projection(model(pixel_values=pixels).pooler_output)
        chosen = (features @ torch.nn.functional.normalize(head, dim=-1).T).argmax(-1)
    correct = chosen.numpy() == np.array([item["label"] for item in data])
    assert correct.mean() == pytest.approx(run[2].rows["featcal"]["mini_korean"])


def test_manifest_of_reads(run: Run) -> None:
    log_dir, result, report = run
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


FAILURES = [
    pytest.param("taken", [], r"taken.*: (File exists|Not a dir).*path\.log_dir",
                 marks=pytest.mark.slow),
    ("log", ["method.calibration_split=val", "method.compare_with=[]"],
     r"method\.calibration_split \(now val\)"),
]  # fmt: skip


@pytest.mark.parametrize(("folder", "words", "message"), FAILURES)
def test_failed_run_exits_nonzero_and_leaves_nothing_half_written(
    folder: str, words: list[str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "taken").write_text("")
    words = ["method=featcal", "modelpool=clip-vit-mini_TA6", *words]
    words += [f"path.log_dir={tmp_path}/{folder}", f"merged_model_save_path={tmp_path}/model"]
    result = fusion_bench(words, tmp_path, check=False)
    assert result.returncode != 0
    assert re.search(message, result.stderr + result.stdout)
    assert not (tmp_path / "model").exists()
    assert not [*tmp_path.rglob("report*"), *tmp_path.rglob("*.part")]
