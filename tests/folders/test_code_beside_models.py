"""No code beside a model is run, and nothing is asked on the terminal."""

import ast
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import transformers
from made_folders import clip_folders, image_classifier_folders, llama_folders, t5_folders
from omegaconf import OmegaConf
from test_calibrate_command import words

import fusion_bench_featcal
import fusion_bench_featcal.algorithm  # as every run through FusionBench does
from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.cli import main
from fusion_bench_featcal.fusionbench.pool_models import PoolModels, load_pool_model
from fusion_bench_featcal.fusionbench.processors import load_input_processor

IGNORES = int(transformers.__version__.partition(".")[0]) >= 5
"""Code beside a processor or T5's tokenizer is ignored, where transformers 4 refuses to load it."""
# Classes that load what they are, whatever a config names.
CONCRETE = {"CLIPModel", "CLIPVisionModel"}
CONFIG = {"model_type": "odd", "auto_map": {"AutoConfig": "odd.Odd"}}
TOKENIZER = {"tokenizer_class": "Odd", "auto_map": {"AutoTokenizer": ["odd.Odd", None]}}
IMAGES = {"image_processor_type": "Odd", "auto_map": {"AutoImageProcessor": "odd.Odd"}}
PROCESSOR = {"processor_class": "Odd", "auto_map": {"AutoProcessor": "odd.Odd"}}
REFUSED = "contains custom code"


def calls(file: Path) -> list[str]:
    """Loading through transformers in a source file that does not forbid code."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
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
        and node.attr in ("from_pretrained", "from_config")
        and id(node) not in allowed
        and not (isinstance(node.value, ast.Name) and node.value.id in CONCRETE)
    ]


def test_every_call_that_could_run_code_forbids_it():
    folder = Path(fusion_bench_featcal.__file__).parent
    assert [line for file in folder.rglob("*.py") for line in calls(file)] == []


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """File that exists once planted code ran; whoever is asked on the terminal answers yes."""
    (tmp_path / "answers").write_text("y\n" * 20)
    with (tmp_path / "answers").open() as answers:
        monkeypatch.setattr(sys, "stdin", answers)
        yield tmp_path / "ran"


def plant(folder: Path, file: str, content: Mapping[str, Any] | None) -> None:
    """Put code beside a model, and what has transformers load it."""
    source = f"open({str(folder.parent / 'ran')!r}, 'w').close()\nclass Odd: ...\n"
    path = folder / file
    if content is None:
        path.parent.mkdir()
        path.write_text(source + "def generate(model, *args, **options): ...\n")
        return
    (folder / "odd.py").write_text(source)
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | dict(content)))


@pytest.mark.parametrize(
    ("make", "model", "file", "content", "message"),
    [
        (llama_folders, "merged", "config.json", CONFIG, REFUSED),
        (llama_folders, "merged", "tokenizer_config.json", TOKENIZER, REFUSED),
        (llama_folders, "one", "tokenizer_config.json", TOKENIZER, "the tokenizer in "),
        (llama_folders, "one", "custom_generate/generate.py", None, "code beside a model"),
        (image_classifier_folders, "merged", "preprocessor_config.json", IMAGES, REFUSED),
        (clip_folders, "merged", "preprocessor_config.json", PROCESSOR, REFUSED),
        (clip_folders, "merged", "tokenizer_config.json", TOKENIZER, REFUSED),
    ],
)
def test_featcal_calibrate_runs_no_code(
    code, capfd, make: Callable[[Path], Any], model, file, content, message
):
    folder = code.parent
    make(folder)
    plant(folder / model, file, content)
    result = main(words(folder, ending=".jsonl" if make is llama_folders else "-images"))
    shown = capfd.readouterr()
    assert not code.exists() and "[y/N]" not in shown.out
    if IGNORES and make is clip_folders:  # transformers' own classes do
        assert result == 0
        return
    assert result == 2
    assert str(folder / model) in shown.err and message in " ".join(shown.err.split())
    assert not (folder / "out").exists()


def load_everything(pool: Any) -> None:
    """Load what a run loads: experts by FusionBench, tokenizer or processor."""
    models = PoolModels(pool)
    for name in models:
        models[name].config  # noqa: B018
        load_pool_model(pool, name)
    load_input_processor(pool)


def language_pool(kind: str, folder: Path, **options: Any) -> Any:
    from fusion_bench.modelpool import CausalLMPool, Seq2SeqLMPool

    names = {"_pretrained_": "base", "one": "one", "two": "two"}
    places: Any = {name: str(folder / model) for name, model in names.items()}
    if kind == "causal":
        return CausalLMPool(places, **options)
    lora = "fusion_bench.modelpool.seq2seq_lm.modelpool.load_lora_model"
    load = {"_target_": "transformers.AutoModelForSeq2SeqLM.from_pretrained"}
    models: Any = {n: load | {"pretrained_model_name_or_path": p} for n, p in places.items()}
    if kind == "lora":
        place = {"base_model_path": places["one"], "peft_model_path": places["one"]}
        models["one"] = {"_target_": lora} | place
    return Seq2SeqLMPool(models, **options)


@pytest.mark.parametrize(
    ("kind", "model", "file", "content"),
    [
        ("causal", "one", "config.json", CONFIG),
        ("causal", "one", "custom_generate/generate.py", None),
        ("causal", "one", "tokenizer_config.json", TOKENIZER),
        ("causal", "base", "tokenizer_config.json", TOKENIZER),
        ("seq2seq", "one", "config.json", CONFIG),
        ("seq2seq", "base", "tokenizer_config.json", TOKENIZER),
        ("lora", "one", "config.json", CONFIG),
    ],
)
def test_pools_of_language_models_run_no_code(code, capfd, kind, model, file, content):
    folder = code.parent
    (llama_folders if kind == "causal" else t5_folders)(folder)
    plant(folder / model, file, content)
    tokenizer = {"_target_": "transformers.AutoTokenizer.from_pretrained"}
    tokenizer["pretrained_model_name_or_path"] = str(folder / "base")
    pool = language_pool(kind, folder, tokenizer=OmegaConf.create(tokenizer))
    ignored = IGNORES and (kind, file) == ("seq2seq", "tokenizer_config.json")
    refused = pytest.raises(CalibrationError, match=str(folder / model))
    with nullcontext() if ignored else refused:
        load_everything(pool)
    assert not code.exists() and "[y/N]" not in capfd.readouterr().out


@pytest.mark.parametrize("named", [True, False])
def test_pools_of_image_classifiers_run_no_code(code, capfd, named):
    from fusion_bench.modelpool import ResNetForImageClassificationPool

    folder = code.parent
    image_classifier_folders(folder)
    plant(folder / "base", "preprocessor_config.json", IMAGES)
    entry: Any = {"config_path": str(folder / "base")} if named else str(folder / "base")
    models = OmegaConf.create({"_pretrained_": entry, "one": str(folder / "one")})
    pool = ResNetForImageClassificationPool(models=models, type="transformers")
    with pytest.raises(CalibrationError, match=str(folder / "base")):
        load_input_processor(pool)
    assert not code.exists() and "[y/N]" not in capfd.readouterr().out
