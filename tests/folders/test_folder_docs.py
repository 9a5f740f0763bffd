"""The YAML of docs/fusionbench.md for folders of models and texts."""

from pathlib import Path

import pytest
from configs import REPOSITORY, as_job, yaml_of_page
from hydra.utils import instantiate
from made_folders import llama_folders, write_rows
from tiny_texts import sentences
from transformers import AutoModelForCausalLM

from fusion_bench_featcal.results import read_run

PAGE = REPOSITORY / "docs" / "fusionbench.md"
NAMES = {"math": "one", "code": "two"}


@pytest.mark.skipif(not PAGE.is_file(), reason="an installation has no docs")
def test_the_pool_of_folders_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    llama_folders(tmp_path / "models")
    for name, task in NAMES.items():
        (tmp_path / "models" / task).rename(tmp_path / "models" / name)
        write_rows(tmp_path / f"{name}.jsonl", sentences(task, 8))
        write_rows(tmp_path / f"{name}_test.jsonl", sentences(task, 4))
    (tmp_path / "config" / "modelpool").mkdir(parents=True)
    (tmp_path / "config" / "modelpool" / "my_models.yaml").write_text(
        yaml_of_page(PAGE.name, "folders")
    )
    monkeypatch.chdir(tmp_path)
    words = ("method=featcal", "modelpool=my_models", "merged_model_save_path=OUT")
    with as_job(tmp_path / "logs", *words) as config:
        instantiate(config, _recursive_=False).run()
    assert set(read_run(tmp_path / "logs").tasks) == set(NAMES)
    assert AutoModelForCausalLM.from_pretrained("OUT").config.model_type == "llama"
