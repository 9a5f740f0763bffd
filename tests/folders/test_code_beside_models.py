"""No code beside a model is run, and nothing is asked on the terminal."""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_folders import image_classifier_folders, llama_folders, words
from omegaconf import OmegaConf

import fusion_bench_featcal
import fusion_bench_featcal.algorithm  # as every run through FusionBench does
from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.cli import main
from fusion_bench_featcal.fusionbench.pool_models import PoolModels, load_pool_model
from fusion_bench_featcal.fusionbench.processors import load_input_processor

LOADING = ("from_pretrained", "from_config")
CONCRETE = {"CLIPModel", "CLIPVisionModel"}
"""Classes that load as they are, whatever a config names."""
GENERATION = "custom_generate/generate.py"
CODE: dict[str, dict[str, Any]] = {
    "config.json": {"model_type": "odd", "auto_map": {"AutoConfig": "odd.Odd"}},
    "tokenizer_config.json": {
        "tokenizer_class": "Odd",
        "auto_map": {"AutoTokenizer": ["odd.Odd", None]},
    },
    "preprocessor_config.json": {
        "image_processor_type": "Odd",
        "auto_map": {"AutoImageProcessor": "odd.Odd"},
    },
}


def calls(file: Path) -> list[str]:
    """Loading through transformers in a source file that does not forbid code."""
    text = file.read_text(encoding="utf-8")
    if not any(name in text for name in LOADING):
        return []
    tree = ast.parse(text)
    allowed = {
        id(node)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and any(keyword.arg == "trust_remote_code" for keyword in call.keywords)
        for node in (call.func, *call.args)
    }
    return [
        f"{file.name}:{node.lineno}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in LOADING
        and id(node) not in allowed
        and not (isinstance(node.value, ast.Name) and node.value.id in CONCRETE)
    ]


def test_every_call_that_could_run_code_forbids_it():
    folder = Path(fusion_bench_featcal.__file__).parent
    assert [line for file in folder.rglob("*.py") for line in calls(file)] == []


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


def pool_of(kind: str, folder: Path) -> Any:
    """A pool of FusionBench: a base and two experts."""
    from fusion_bench import modelpool

    names = {"_pretrained_": "base", "one": "one", "two": "two"}
    paths: Any = {name: str(folder / model) for name, model in names.items()}
    if kind == "images":
        pool = modelpool.ResNetForImageClassificationPool
        return pool(models=OmegaConf.create(paths), type="transformers")
    load = {"_target_": "transformers.AutoTokenizer.from_pretrained"}
    load["pretrained_model_name_or_path"] = paths["_pretrained_"]
    return modelpool.CausalLMPool(paths, tokenizer=OmegaConf.create(load))


@pytest.mark.parametrize(
    ("kind", "model", "file"),
    [
        ("causal", "one", "config.json"),
        ("causal", "base", "tokenizer_config.json"),
        ("images", "base", "preprocessor_config.json"),
    ],
)
def test_pools_run_no_code(folder, capfd, kind, model, file):
    (llama_folders if kind == "causal" else image_classifier_folders)(folder)
    plant(folder / model, file)
    pool = pool_of(kind, folder)
    with pytest.raises(CalibrationError, match=str(folder / model)):
        models = PoolModels(pool) if kind == "causal" else {}
        for name in models:
            models[name].config  # noqa: B018
            load_pool_model(pool, name)
        load_input_processor(pool)
    assert "[y/N]" not in capfd.readouterr().out
