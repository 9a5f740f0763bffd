"""No code beside a model is run, and nothing is asked on the terminal."""

import io
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

LOADING = re.compile(
    r"\w(?<!CLIPModel)(?<!CLIPVisionModel)(?<!PeftModel)\.from_(?:pretrained|config)[(,]"
)
"""CLIPs load as they are, whatever a config names, and adapters have no code of their own."""
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
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Llamas. Questions on the terminal would be answered with yes. No planted code may run."""
    llama_folders(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 20))
    yield tmp_path
    assert not (tmp_path / "ran").exists()


def plant(model: Path, file: str) -> None:
    """Put code beside a model, and the keys that have transformers load it."""
    source = f"open({str(model.parent / 'ran')!r}, 'w').close()\n"
    path = model / file
    if file == GENERATION:
        path.parent.mkdir()
        path.write_text(source + "def generate(model, *args, **options): ...\n")
        return
    (model / "odd.py").write_text(source + "class Odd: ...\n")
    path.write_text(json.dumps(json.loads(path.read_text()) | CODE[file]))


@pytest.mark.parametrize(
    ("model", "file", "message"),
    [
        ("merged", "config.json", "contains custom code"),
        ("one", "tokenizer_config.json", "the tokenizer in "),
        ("one", GENERATION, "code beside a model"),
    ],
)
def test_featcal_calibrate_runs_no_code(folder, capfd, model, file, message):
    plant(folder / model, file)
    assert main(words(folder)) == 2 and not (folder / "out").exists()
    screen = capfd.readouterr()
    assert "[y/N]" not in screen.out
    assert str(folder / model) in screen.err and message in " ".join(screen.err.split())


@pytest.mark.parametrize(
    ("model", "file"), [("one", "config.json"), ("base", "tokenizer_config.json")]
)
def test_pools_run_no_code(folder, capfd, model, file):
    plant(folder / model, file)
    paths: Any = {"_pretrained_": str(folder / "base"), "one": str(folder / "one")}
    load = {
        "_target_": "transformers.AutoTokenizer.from_pretrained",
        "pretrained_model_name_or_path": str(folder / "base"),
    }
    pool = CausalLMPool(paths, tokenizer=OmegaConf.create(load))
    with pytest.raises(CalibrationError, match=str(folder / model)):
        for name, opened in PoolModels(pool).items():
            opened.config  # noqa: B018
            load_pool_model(pool, name)
        load_input_processor(pool)
    assert "[y/N]" not in capfd.readouterr().out
