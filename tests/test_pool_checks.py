"""Mistakes in a pool are refused, or warned of, before any of its models is loaded."""

import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
from fusion_bench import BaseModelPool
from fusion_bench.modelpool import CausalLMPool, CLIPVisionModelPool, Seq2SeqLMPool
from fusion_bench.taskpool.dummy import DummyTaskPool
from fusion_bench.utils.hydra_utils import get_default_config_path
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from model_names import UNUSABLE_NAMES
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from tiny_models import scatter
from tiny_texts import TASKS, llama_model, t5_model, with_data, word_tokenizer, write
from transformers import CLIPVisionConfig, CLIPVisionModel

from fusion_bench_featcal import CalibrationError, FeatCalSettings
from fusion_bench_featcal.algorithm import FeatCalAlgorithm
from fusion_bench_featcal.experts import ExpertModel
from fusion_bench_featcal.fusionbench.pool_checks import check_pool_models
from fusion_bench_featcal.fusionbench.pool_configs import check_pool_settings
from fusion_bench_featcal.fusionbench.pool_models import PoolModel, PoolModels, load_pool_model
from fusion_bench_featcal.fusionbench.program import take_default_taskpool
from fusion_bench_featcal.lab.rivals import RegMeanAlgorithm, RidgeSurgeryAlgorithm

MERGER = {"_target_": "fusion_bench.method.SimpleAverageAlgorithm"}
NAMES = ("_pretrained_", *TASKS)
FC1 = "layers.0.mlp.fc1.weight"
UNUSABLE = (torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.int8)


def fabric(precision: Any = "32-true") -> lightning.Fabric:
    return lightning.Fabric(accelerator="cpu", devices=1, precision=precision)


def tower(seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(0)
    size = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
    config = CLIPVisionConfig(**size, num_hidden_layers=2, image_size=8, patch_size=4, **options)
    return scatter(CLIPVisionModel(config), seed, 0.1)


def towers(folder: Path) -> dict[str, str]:
    return {name: write(tower(n), folder / name.strip("_")) for n, name in enumerate(NAMES)}


def clip_pool(models: Any, **options: Any) -> Any:
    made: Any = OmegaConf.create(models)
    return CLIPVisionModelPool(made, processor=None, **options)


def change_config(folder: str, **changes: Any) -> None:
    file = Path(folder) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@contextmanager
def nothing_is_loaded(pool: Any) -> Iterator[None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    pool.load_model = refuse
    yield


def refusal(pool: Any, settings: FeatCalSettings | None = None) -> str:
    """Message of the checks before any loading."""
    with nothing_is_loaded(pool), pytest.raises((CalibrationError, ValueError)) as caught:
        check_pool_models(PoolModels(pool), fabric())
        check_pool_settings(PoolModels(pool), settings or FeatCalSettings())
    message = str(caught.value)
    assert len(message) < 800
    return message


def test_models_that_fit_pass_without_a_word(tmp_path, caplog):
    pool = clip_pool(towers(tmp_path))
    with nothing_is_loaded(pool):
        check_pool_models(PoolModels(pool), fabric())
        check_pool_settings(PoolModels(pool), FeatCalSettings())
    assert not caplog.records


# Names


@pytest.mark.parametrize("name", [*UNUSABLE_NAMES, "Two"])
def test_names_of_experts_that_no_file_or_column_can_have(name, tmp_path):
    places = towers(tmp_path)
    models = {name if model == "one" else model: place for model, place in places.items()}
    message = refusal(clip_pool(models))
    assert message.startswith("modelpool.models: ") and repr(name[:100]) in message


# Precision


@pytest.mark.parametrize(
    ("algorithm", "precision"),
    [
        (FeatCalAlgorithm(base_method=MERGER), "bf16-true"),
        (RidgeSurgeryAlgorithm(base_method=MERGER), "16-true"),
        (RegMeanAlgorithm(), "64-true"),
    ],
    ids=["featcal", "ridge_surgery", "regmean"],
)
def test_precision_without_effect_is_refused(algorithm, precision, tmp_path):
    pool = clip_pool(towers(tmp_path))
    algorithm.fabric = fabric(precision)
    expected = rf"fabric\.precision={precision} .*fabric\.precision=32-true.* torch_dtype"
    with nothing_is_loaded(pool), pytest.raises(CalibrationError, match=expected):
        algorithm.run(pool)


@pytest.mark.parametrize("precision", ["bf16-mixed", None])
def test_precisions_of_forward_passes_are_kept(precision, tmp_path):
    check_pool_models(PoolModels(clip_pool(towers(tmp_path))), fabric(precision))


# Entries, files and what they hold


@pytest.mark.parametrize("entry", [5, None, True, "", ["a"]], ids=str)
def test_entry_that_is_no_model_is_named(entry, tmp_path):
    message = refusal(clip_pool(towers(tmp_path) | {"two": entry}))
    assert message.startswith(f"modelpool.models.two is {entry!r}, which is no model")


def test_pool_without_models_is_refused():
    assert "modelpool.models is empty" in refusal(clip_pool({}))


def test_missing_module_of_a_target_is_named(tmp_path):
    entry = {"_target_": "no_such_package.load", "path": "x"}
    message = refusal(clip_pool(towers(tmp_path) | {"two": entry}))
    assert "modelpool.models.two._target_=no_such_package.load cannot be imported" in message


def damaged_index(content: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(content)

    return damage


def cut(kept: int, filler: bytes = b"") -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:kept] + filler)

    return damage


def stored_as(dtype: torch.dtype) -> Callable[[Path], None]:
    def store(folder: Path) -> None:
        file = folder / "model.safetensors"
        tensors = load_file(file)
        key = next(key for key in tensors if key.endswith(FC1))
        save_file(tensors | {key: tensors[key].to(dtype)}, file, {"format": "pt"})

    return store


NOISE = b"\xff" * 64
INDEX, FILE = "model.safetensors.index.json", "model.safetensors is no readable safetensors file"
DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: (folder / "config.json").unlink(), "no config.json in "),
    (lambda folder: (folder / "config.json").write_text("{"), "two/config.json is damaged"),
    (damaged_index('{"weight_map": {"a": 5}}'), f"lacks the shards ['5'] that {INDEX} names"),
    (damaged_index('{"weight_map": [1]}'), f"{INDEX} is damaged: its weight_map is"),
    (damaged_index('{"weight_map": {}}'), "its weight_map is"),
    (damaged_index("[3]"), f"{INDEX} is damaged: it is no mapping"),
    (damaged_index("{"), f"{INDEX} is damaged"),
    (damaged_index('{"weight_map": {"a": "b.safetensors"}}'), "lacks the shards ['b.safetensors']"),
    *((cut(kept, filler), FILE) for kept in (0, 4, 30, 3000) for filler in (b"", NOISE)),
    *((stored_as(dtype), f"{FC1}' of ") for dtype in UNUSABLE),
]


@pytest.mark.parametrize("number", range(len(DAMAGES)))
def test_damaged_file_is_named_with_its_model(number, tmp_path):
    damage, expected = DAMAGES[number]
    models = towers(tmp_path)
    damage(Path(models["two"]))
    message = refusal(clip_pool(models))
    assert expected in message and "modelpool.models.two" in message
    assert "existing folder" not in message


@contextmanager
def as_nobody() -> Iterator[None]:
    """Without the right to read everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("part", ["model.safetensors", "config.json", ""])
def test_unreadable_file_says_so(part):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        models = towers(Path(folder))
        pool = clip_pool(models)
        for path in Path(folder).rglob("*"):
            path.chmod(0o755)
        place = Path(models["two"]) / part
        place.chmod(0)
        try:
            with as_nobody():
                message = refusal(pool)
        finally:
            place.chmod(0o755)
    assert "cannot be read: permission denied" in message.lower()
    assert str(place) in message
    assert "modelpool.models.two" in message


def test_expert_whose_file_goes_away_is_named_with_it(tmp_path):
    models = towers(tmp_path)
    source = PoolModel(clip_pool(models), "two").files
    assert source is not None
    expert = ExpertModel("two", source, tower())
    name = next(iter(expert.keys))
    file = Path(models["two"]) / "model.safetensors"
    content = load_file(file)
    save_file({key: value[:1] for key, value in content.items() if value.dim()}, file)
    with pytest.raises(CalibrationError, match=r"expert 'two': .*safetensors has changed"):
        expert.tensor(name)
    file.unlink()
    expected = r"expert 'two': .*model\.safetensors .*no longer can.*modelpool\.models\.two"
    with pytest.raises(CalibrationError, match=expected):
        expert.tensor(name)


@pytest.mark.parametrize("place", ["no/folder/of/mine", "who/what"])
def test_model_that_is_not_there_is_told_before_the_words_of_the_hub(place, tmp_path):
    pool = clip_pool(towers(tmp_path) | {"two": place})
    with pytest.raises(CalibrationError) as caught:
        load_pool_model(pool, "two")
    message = str(caught.value)
    assert message.startswith(f"modelpool.models.two={place}: there is no such file or folder here")
    assert "Correct it" in message and "\n" not in message and "Could not resolve" not in message
    assert message == refusal(pool)


def test_loader_that_fails_in_its_own_way_is_named():
    pool: Any = BaseModelPool({"one": {"_target_": "builtins.divmod", "_args_": [1, 0]}})  # type: ignore[arg-type]
    with pytest.raises(CalibrationError, match=r"model 'one' .*zero.*modelpool\.models\.one"):
        load_pool_model(pool, "one")


def test_plain_name_in_a_pool_that_takes_none_is_told_the_form(tmp_path):
    pool: Any = BaseModelPool(towers(tmp_path))  # type: ignore[arg-type]
    with pytest.raises(CalibrationError, match=r"write \{_target_: .*from_pretrained, ") as caught:
        load_pool_model(pool, "one")
    assert "existing folder" not in str(caught.value)


def test_sequence_to_sequence_models_may_be_plain_names(tmp_path):
    models = {
        name: write(t5_model(n).float(), tmp_path / name.strip("_")) for n, name in enumerate(NAMES)
    }
    pool: Any = with_data(
        Seq2SeqLMPool(OmegaConf.create(models), tokenizer=word_tokenizer(ends=True))
    )
    result = FeatCalAlgorithm(base_method=MERGER, samples_per_task=4, calibrate_norm=False).run(
        pool
    )
    assert type(result) is type(t5_model())


def test_causal_pool_without_a_tokenizer_says_what_to_set(tmp_path):
    models = {name: write(llama_model(n).float(), tmp_path / name) for n, name in enumerate(NAMES)}
    pool = with_data(CausalLMPool(OmegaConf.create(models), tokenizer=None))
    with nothing_is_loaded(pool), pytest.raises(CalibrationError, match=r"modelpool\.tokenizer"):
        FeatCalAlgorithm(base_method=MERGER).run(pool)


# Where FusionBench is started


def program_of(*words: str) -> Any:
    """A program's task pool and model pool as Hydra composes them, with Hydra's own config set."""
    with initialize_config_dir(str(get_default_config_path()), version_base=None):
        config = compose("fabric_model_fusion", list(words), return_hydra_config=True)
    HydraConfig.instance().set_config(config)
    return SimpleNamespace(
        taskpool=DummyTaskPool(),
        _modelpool=config.modelpool,
        _instantiate_and_setup=lambda default: default._target_,
    )


@pytest.mark.parametrize("words", [[], ["taskpool=dummy"]], ids=str)
def test_dummy_task_pool_is_kept_where_it_was_asked_for(words, caplog, monkeypatch):
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)  # restores it afterwards
    program = program_of("method=featcal", "modelpool=clip-vit-mini_TA6", *words)
    with caplog.at_level(logging.DEBUG, logger="fusion_bench_featcal"):
        take_default_taskpool(program)
    assert (program.taskpool is None) == bool(words)
    assert len(caplog.records) == 1
    assert ("nothing is evaluated" in caplog.text) == bool(words)
