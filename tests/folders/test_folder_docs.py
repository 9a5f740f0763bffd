"""The YAML of docs/calibrate.md, and paths in place of datasets in a pool's YAML."""

import re
import shutil
from pathlib import Path

import pytest
from cli_runs import fusion_bench
from made_folders import llama_folders, write_rows
from tiny_texts import sentences
from transformers import AutoModelForCausalLM

from fusion_bench_featcal.data.images import load_images
from fusion_bench_featcal.data.tables import load_texts
from fusion_bench_featcal.results import Report
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
