"""The YAML of docs/calibrate.md, with paths of models and of texts."""

import re
from pathlib import Path

import pytest
from cli_runs import fusion_bench
from made_folders import llama_folders, write_rows
from tiny_texts import sentences
from transformers import AutoModelForCausalLM

from fusion_bench_featcal.results import read_run

DOCS = Path(__file__).resolve().parents[2] / "docs"
YAML = re.compile(r"<!-- folders -->\n```yaml\n(.*?)^```", re.DOTALL | re.MULTILINE)
NAMES = {"math": "one", "code": "two"}


@pytest.mark.skipif(not DOCS.is_dir(), reason="an installation has no docs")
def test_the_yaml_for_folders_and_json_lines(tmp_path):
    (tmp_path / "models").mkdir()
    llama_folders(tmp_path / "models")
    for name, task in NAMES.items():
        (tmp_path / "models" / task).rename(tmp_path / "models" / name)
        write_rows(tmp_path / f"{name}.jsonl", sentences(task, 20))
        write_rows(tmp_path / f"{name}_test.jsonl", sentences(task, 8))
    (tmp_path / "config" / "modelpool").mkdir(parents=True)
    (text,) = YAML.findall((DOCS / "calibrate.md").read_text(encoding="utf-8"))
    (tmp_path / "config" / "modelpool" / "my_models.yaml").write_text(text)
    words = ["method=featcal", "modelpool=my_models"]
    fusion_bench([*words, "merged_model_save_path=OUT", "path.log_dir=logs"], tmp_path)
    assert set(read_run(tmp_path / "logs").tasks) == set(NAMES)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "OUT").config.model_type == "llama"
