"""The YAML of docs/calibrate.md, and paths in place of datasets in a pool's YAML."""

import os
import re
import shutil
from pathlib import Path

import pytest
from cli_runs import fusion_bench
from made_folders import ROWS, llama_folders, write_rows
from omegaconf import OmegaConf
from tiny_texts import TASKS, sentences, word_tokenizer
from transformers import AutoModelForCausalLM

from fusion_bench_featcal import CalibrationError, FeatCalSettings
from fusion_bench_featcal.calibration_data import calibration_batches
from fusion_bench_featcal.data.images import load_images
from fusion_bench_featcal.data.tables import load_texts
from fusion_bench_featcal.pools import CausalLMPool
from fusion_bench_featcal.results import Report, ReportError
from fusion_bench_featcal.tasks.text_rows import load_chats, load_glue

DOCS = Path(__file__).resolve().parents[2] / "docs"
YAML = re.compile(r"<!-- folders -->\n```yaml\n(.*?)^```", re.DOTALL | re.MULTILINE)
NAMES = {"math": "one", "code": "two"}


@pytest.mark.skipif(not DOCS.is_dir(), reason="an installation has no docs")
def test_the_yaml_for_folders_and_json_lines(tmp_path):
    llama_folders(tmp_path / "llama")
    work = tmp_path / "work"
    shutil.copytree(tmp_path / "llama" / "base", work / "models" / "base")
    for name, task in NAMES.items():
        shutil.copytree(tmp_path / "llama" / task, work / "models" / name)
        write_rows(work / f"{name}.jsonl", sentences(task, 20))
        write_rows(work / f"{name}_test.jsonl", sentences(task, 8))
    (work / "config" / "modelpool").mkdir(parents=True)
    (text,) = YAML.findall((DOCS / "calibrate.md").read_text(encoding="utf-8"))
    (work / "config" / "modelpool" / "my_models.yaml").write_text(text)
    words = ["--config-dir", "config", "method=featcal", "modelpool=my_models"]
    fusion_bench([*words, "merged_model_save_path=OUT", "path.log_dir=logs"], work)
    assert set(Report.load(work / "logs").tasks) == set(NAMES)
    assert AutoModelForCausalLM.from_pretrained(work / "OUT").config.model_type == "llama"


def test_paths_in_place_of_data_sets(folder):
    models = OmegaConf.create({"_pretrained_": str(folder / "base"), "one": str(folder / "one")})
    settings = FeatCalSettings(batch_size=64)

    def batches(file: str):
        data = OmegaConf.create({"one": str(folder / file)})
        pool = CausalLMPool(models, tokenizer=word_tokenizer(), train_datasets=data)
        return calibration_batches(pool, [TASKS[0]], settings, word_tokenizer())

    with pytest.raises(CalibrationError, match=r"train_datasets\.one.*does not exist"):
        batches("nothing.jsonl")
    assert next(iter(batches("one.jsonl")["one"]))["input_ids"].shape[0] == ROWS


def test_paths_are_no_patterns(tmp_path):
    for number, name in enumerate(("x[1].jsonl", "x1.jsonl")):
        write_rows(tmp_path / name, [{"text": name, "image": f"{number}.png"}] * 2)
    (tmp_path / "0.png").touch()
    assert load_texts(str(tmp_path / "x[1].jsonl"))["text"] == ["x[1].jsonl"] * 2
    assert len(load_images(str(tmp_path / "x[1].jsonl"))) == 2
    for name in ("chats[1]", "chats1"):
        (tmp_path / name).mkdir()
        write_rows(tmp_path / name / "train.jsonl", [{"prompt": name, "answer": "b"}])
    with pytest.raises(ValueError, match=r"chats\[1\]'.*rename the folder"):
        load_chats(str(tmp_path / "chats[1]"), "train", prompt="prompt", answer="answer")
    with pytest.raises(ValueError, match=r"chats\[1\]'.*rename the folder"):
        load_glue("cola", "train", str(tmp_path / "chats[1]"))


def test_a_report_that_is_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "report.json")
    with pytest.raises(ReportError, match=r"report\.json is not a regular file"):
        Report.load(tmp_path)
