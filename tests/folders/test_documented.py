"""The YAML of docs/calibrate.md, and paths in place of datasets in a pool's YAML."""

import re
import shutil
from pathlib import Path

import pytest
from cli_runs import fusion_bench
from made_folders import llama_folders, write_rows
from tiny_texts import TASKS, sentences
from transformers import AutoModelForCausalLM

from fusion_bench_featcal.results import Report

DOCS = Path(__file__).resolve().parents[2] / "docs"
YAML = re.compile(r"<!-- folders -->\n```yaml\n(.*?)^```", re.DOTALL | re.MULTILINE)
NAMES = {"math": "one", "code": "two"}


def test_the_yaml_for_folders_and_json_lines(tmp_path):
    if not DOCS.is_dir():
        pytest.skip("an installation has no docs")
    (tmp_path / "made").mkdir()
    llama_folders(tmp_path / "made")
    work = tmp_path / "work"
    shutil.copytree(tmp_path / "made" / "base", work / "models" / "base")
    for name, task in NAMES.items():
        shutil.copytree(tmp_path / "made" / task, work / "models" / name)
        write_rows(work / f"{name}.jsonl", sentences(task, 20))
        write_rows(work / f"{name}_test.jsonl", sentences(task, 8))
    (work / "config" / "modelpool").mkdir(parents=True)
    (text,) = YAML.findall((DOCS / "calibrate.md").read_text(encoding="utf-8"))
    (work / "config" / "modelpool" / "my_models.yaml").write_text(text)
    words = ["--config-dir", "config", "method=featcal", "modelpool=my_models"]
    fusion_bench([*words, "merged_model_save_path=OUT", "path.log_dir=logs"], work)
    assert set(Report.load(work / "logs").tasks) == set(NAMES)
    assert AutoModelForCausalLM.from_pretrained(work / "OUT").config.model_type == "llama"


def test_a_path_that_misses_is_named(tmp_path):
    llama_folders(tmp_path)
    from omegaconf import OmegaConf
    from tiny_texts import word_tokenizer

    from fusion_bench_featcal import CalibrationError, FeatCalSettings
    from fusion_bench_featcal.calibration_data import calibration_batches
    from fusion_bench_featcal.pools import CausalLMPool

    models = OmegaConf.create(
        {"_pretrained_": str(tmp_path / "base"), "one": str(tmp_path / "one")}
    )
    data = {"one": str(tmp_path / "nothing.jsonl")}
    pool = CausalLMPool(models, tokenizer=word_tokenizer(), train_datasets=OmegaConf.create(data))
    with pytest.raises(CalibrationError, match=r"train_datasets\.one.*does not exist"):
        calibration_batches(pool, ["one"], FeatCalSettings(), word_tokenizer())
    data = {"one": str(tmp_path / "one.jsonl")}
    pool = CausalLMPool(models, tokenizer=word_tokenizer(), train_datasets=OmegaConf.create(data))
    batches = calibration_batches(pool, ["one"], FeatCalSettings(batch_size=64), word_tokenizer())
    assert next(iter(batches["one"]))["input_ids"].shape[0] == len(sentences(TASKS[0], 30))
