"""The YAML of docs/calibrate.md, with paths of models and of texts."""

import re
import shutil
from pathlib import Path

import pytest
from cli_runs import fusion_bench
from made_folders import llama_folders, write_rows
from tiny_texts import sentences
from transformers import AutoModelForCausalLM

from fusion_bench_featcal.results import Report

DOCS = Path(__file__).resolve().parents[2] / "docs"
YAML = re.compile(r"<!-- folders -->\n```yaml\n(.*?)^```", re.DOTALL | re.MULTILINE)
NAMES = {"math": "one", "code": "two"}


@pytest.mark.skipif(not DOCS.is_dir(), reason="an installation has no docs")
def test_the_yaml_for_folders_and_json_lines(tmp_path):
    llama_folders(tmp_path)
    work = tmp_path / "work"
    shutil.copytree(tmp_path / "base", work / "models" / "base")
    for name, task in NAMES.items():
        shutil.copytree(tmp_path / task, work / "models" / name)
        write_rows(work / f"{name}.jsonl", sentences(task, 20))
        write_rows(work / f"{name}_test.jsonl", sentences(task, 8))
    (work / "config" / "modelpool").mkdir(parents=True)
    (text,) = YAML.findall((DOCS / "calibrate.md").read_text(encoding="utf-8"))
    (work / "config" / "modelpool" / "my_models.yaml").write_text(text)
    words = ["--config-dir", "config", "method=featcal", "modelpool=my_models"]
    fusion_bench([*words, "merged_model_save_path=OUT", "path.log_dir=logs"], work)
    assert set(Report.load(work / "logs").tasks) == set(NAMES)
    assert AutoModelForCausalLM.from_pretrained(work / "OUT").config.model_type == "llama"
