"""No code beside a model is run, and nothing is asked on the terminal."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fusion_bench.modelpool import CausalLMPool
from made_folders import llama_folders, words
from omegaconf import OmegaConf

import fusion_bench_featcal
import fusion_bench_featcal.algorithm  # as every run through FusionBench does
from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.cli import main
from fusion_bench_featcal.fusionbench import PoolModels, load_input_processor, load_pool_model

LOADING = re.compile(r"\w(?<!CLIPModel)(?<!CLIPVisionModel)\.from_(?:pretrained|config)[(,]")
"""CLIPs load as they are, whatever a config names."""
GENERATION = "custom_generate/generate.py"
CODE: dict[str, dict[str, Any]] = {
    "config.json": {"model_type": "odd", "auto_map": {"AutoConfig": "odd.Odd"}},
    "tokenizer_config.json": {
        "tokenizer_class": "Odd",
        "auto_map": {"AutoTokenizer": ["odd.Odd", None]},
    },
}


def test_every_call_that_could_run_code_forbids_it():
    for file in Path(fusion_bench_featcal.__file__).parent.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert len(LOADING.findall(text)) <= text.count("trust_remote_code=False"), file


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> Iterator[Path]:
    """An empty folder. Questions on the terminal are answered with yes. No planted code may run."""
    (tmp_path / "answers").write_text("y\n" * 20)
    with (tmp_path / "answers").open() as answers:
        monkeypatch.setattr(sys, "stdin", answers)
        yield tmp_path
    assert not (tmp_path / "ran").exists()


def plant(folder: Path, file: str) -> None:
    """Put code beside a model, and the keys that have transformers load it."""
    source = f"open({str(folder.parent / 'ran')!r}, 'w').close()\nclass Odd: ...\n"
    path = folder / file
    if file == GENERATION:
        path.parent.mkdir()
        path.write_text(source + "def generate(model, *args, **options): ...\n")
        return
    (folder / "odd.py").write_text(source)
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | CODE[file]))


@pytest.mark.parametrize(
    ("model", "file", "message"),
    [
        ("merged", "config.json", "contains custom code"),
        ("one", "tokenizer_config.json", "the tokenizer in "),
        ("one", GENERATION, "code beside a model"),
    ],
)
def test_featcal_calibrate_runs_no_code(folder, capfd, model, file, message):
    llama_folders(folder)
    plant(folder / model, file)
    assert main(words(folder)) == 2 and not (folder / "out").exists()
    screen = capfd.readouterr()
    assert "[y/N]" not in screen.out
    assert str(folder / model) in screen.err and message in " ".join(screen.err.split())


@pytest.mark.parametrize(
    ("model", "file"), [("one", "config.json"), ("base", "tokenizer_config.json")]
)
def test_pools_run_no_code(folder, capfd, model, file):
    llama_folders(folder)
    plant(folder / model, file)
    names = {"_pretrained_": "base", "one": "one", "two": "two"}
    load = {
        "_target_": "transformers.AutoTokenizer.from_pretrained",
        "pretrained_model_name_or_path": str(folder / "base"),
    }
    paths: Any = {name: str(folder / model) for name, model in names.items()}
    pool = CausalLMPool(paths, tokenizer=OmegaConf.create(load))
    with pytest.raises(CalibrationError, match=str(folder / model)):
        for name, opened in PoolModels(pool).items():
            opened.config  # noqa: B018
            load_pool_model(pool, name)
        load_input_processor(pool)
    assert "[y/N]" not in capfd.readouterr().out
