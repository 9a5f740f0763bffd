"""Mistakes in a pool are refused, or warned of, before any of its models is loaded."""

import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
from cli_runs import fusion_bench
from fusion_bench import BaseModelPool
from fusion_bench.modelpool import CausalLMPool, CLIPVisionModelPool, Seq2SeqLMPool
from fusion_bench.taskpool.dummy import DummyTaskPool
from fusion_bench.utils.hydra_utils import get_default_config_path
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from tiny_models import scatter
from tiny_texts import TASKS, llama_model, t5_model, with_data, word_tokenizer, write
from torch import nn
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    GPT2Config,
    GPT2LMHeadModel,
    ViTConfig,
    ViTForImageClassification,
)

from fusion_bench_featcal.algorithm import FeatCalAlgorithm
from fusion_bench_featcal.comparison import ComparisonAlgorithm
from fusion_bench_featcal.experts import ExpertModel
from fusion_bench_featcal.families import check_family, resolve_family
from fusion_bench_featcal.families.suggest import suggested_families
from fusion_bench_featcal.fusionbench.pool_checks import check_pool_models
from fusion_bench_featcal.fusionbench.pool_configs import check_pool_settings
from fusion_bench_featcal.fusionbench.pool_models import PoolModel, PoolModels, load_pool_model
from fusion_bench_featcal.fusionbench.program import take_default_taskpool
from fusion_bench_featcal.methods.standalone import RegMeanAlgorithm, RidgeSurgeryAlgorithm
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings

MERGER = {"_target_": "fusion_bench.method.SimpleAverageAlgorithm"}
NAMES = ("_pretrained_", *TASKS)


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


# Precision


@pytest.mark.parametrize(
    ("precision", "instead", "dtype"),
    [
        ("bf16-true", "bf16-mixed", "bfloat16"),
        ("16-true", "16-mixed", "float16"),
        ("64-true", "32-true", "float64"),
    ],
)
@pytest.mark.parametrize(
    "method",
    [
        lambda: FeatCalAlgorithm(base_method=MERGER),
        lambda: RidgeSurgeryAlgorithm(base_method=MERGER),
        lambda: RegMeanAlgorithm(),
    ],
    ids=["featcal", "ridge_surgery", "regmean"],
)
def test_precision_without_effect_is_refused(method, precision, instead, dtype, tmp_path):
    algorithm, pool = method(), clip_pool(towers(tmp_path))
    algorithm.fabric = fabric(precision)
    expected = (
        rf"fabric\.precision={precision} .*fabric\.precision={instead}.* {dtype}: torch_dtype"
    )
    with nothing_is_loaded(pool), pytest.raises(CalibrationError, match=expected):
        algorithm.run(pool)


def test_compare_refuses_a_precision_without_effect(tmp_path):
    algorithm: Any = ComparisonAlgorithm(upstream_mergers={"simple_average": MERGER}, references=[])
    algorithm.fabric = fabric("bf16-true")
    algorithm._program = SimpleNamespace(
        taskpool=SimpleNamespace(), _modelpool={}, merged_model_save_path=None
    )
    pool = clip_pool(towers(tmp_path))
    with nothing_is_loaded(pool), pytest.raises(CalibrationError, match="precision=bf16-true"):
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
    data: Any = OmegaConf.create({"one": {"_target_": "datasets.no_such_function"}})
    message = refusal(clip_pool(towers(tmp_path), train_datasets=data))
    assert "modelpool.train_datasets.one._target_=datasets.no_such_function" in message


def test_folder_without_config_is_named(tmp_path):
    models = towers(tmp_path)
    (Path(models["two"]) / "config.json").unlink()
    message = refusal(clip_pool(models))
    assert f"no config.json in {models['two']}. Check modelpool.models.two" in message
    assert "existing folder" not in message


def test_damaged_config_is_named(tmp_path):
    models = towers(tmp_path)
    (Path(models["two"]) / "config.json").write_text("{")
    message = refusal(clip_pool(models))
    assert f"{models['two']}/config.json is damaged" in message
    assert "modelpool.models.two" in message


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.int8]
)
@pytest.mark.parametrize("name", ["two", "_pretrained_"])
def test_dtype_that_cannot_be_calibrated_is_named_with_its_tensor(dtype, name, tmp_path):
    models = towers(tmp_path)
    file = Path(models[name]) / "model.safetensors"
    tensors = load_file(file)
    key = next(key for key in tensors if key.endswith("0.mlp.fc1.weight"))
    save_file(tensors | {key: tensors[key].to(dtype)}, file, {"format": "pt"})
    message = refusal(clip_pool(models))
    assert f"tensor {key!r} of {file} is stored as " in message
    assert f"modelpool.models.{name}" in message


def test_integers_in_place_of_weights_are_refused_when_read(tmp_path):
    models = towers(tmp_path)
    file = Path(models["two"]) / "model.safetensors"
    tensors = load_file(file)
    key = next(key for key in tensors if key.endswith("0.mlp.fc1.weight"))
    save_file(tensors | {key: tensors[key].to(torch.int32)}, file, {"format": "pt"})
    source = PoolModel(clip_pool(models), "two").files
    assert source is not None
    like = tower()
    name = next(key for key in like.state_dict() if key.endswith("0.mlp.fc1.weight"))
    with pytest.raises(CalibrationError, match=r"'two': tensor .*torch\.int32.*models\.two"):
        ExpertModel("two", source, like).tensor(name)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"weight_map": {"a": 5}}', "tensor 'a' in file 5"),
        ('{"weight_map": {"a": "model.safetensors", "b": [1]}}', "tensor 'b' in file"),
        ('{"weight_map": [1]}', "its weight_map is"),
        ('{"weight_map": {}}', "its weight_map is"),
        ("[3]", "its weight_map is None"),
        ("5", "its weight_map is None"),
        ("{", "is damaged"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "lacks the shards ['gone.safetensors']"),
    ],
)
def test_damaged_index_of_shards_is_named(content, expected, tmp_path):
    models = towers(tmp_path)
    folder = Path(models["two"])
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(content)
    message = refusal(clip_pool(models))
    assert expected in message
    assert "model.safetensors.index.json" in message
    assert "modelpool.models.two" in message


@pytest.mark.parametrize("kept", [0, 4, 30, 3000])
@pytest.mark.parametrize("filler", [b"", b"\xff" * 64])
def test_damaged_file_is_named(kept, filler, tmp_path):
    models = towers(tmp_path)
    file = Path(models["two"]) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept] + filler)
    message = refusal(clip_pool(models))
    assert f"{file} is no readable safetensors file" in message
    assert "modelpool.models.two" in message


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
    file.write_bytes(b"x")
    with pytest.raises(CalibrationError, match=r"expert 'two': .*safetensors .*no longer can"):
        expert.tensor(name)
    file.unlink()
    expected = r"expert 'two': .*model\.safetensors .*no longer can.*modelpool\.models\.two"
    with pytest.raises(CalibrationError, match=expected):
        expert.tensor(name)


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


# Configs and families


def test_expert_with_another_function_is_refused_by_its_config(tmp_path):
    models = towers(tmp_path)
    change_config(models["two"], hidden_act="relu", layer_norm_eps=0.1)
    message = refusal(clip_pool(models))
    assert "'two' is another function than the base" in message
    assert "hidden_act='relu' (there 'quick_gelu'), layer_norm_eps=0.1 (there 1e-05)" in message
    assert "method.ignore_config=[hidden_act,layer_norm_eps]" in message
    ignored = FeatCalSettings(ignore_config=["hidden_act", "layer_norm_eps"])
    check_pool_settings(PoolModels(clip_pool(models)), ignored)


def test_merged_model_with_another_function_is_refused(tmp_path):
    models = towers(tmp_path)
    merged = write(tower(7, layer_norm_eps=0.2), tmp_path / "merged")
    assert "model '_merged_' is another" in refusal(clip_pool(models | {"_merged_": merged}))


def test_regmean_refuses_an_expert_with_another_function(tmp_path):
    models = towers(tmp_path)
    change_config(models["two"], num_attention_heads=4)
    pool = clip_pool(models)
    with nothing_is_loaded(pool), pytest.raises(CalibrationError, match="num_attention_heads=4"):
        RegMeanAlgorithm().run(pool)


def gpt2() -> Any:
    ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=23, n_positions=16, n_embd=8, n_layer=2, n_head=2, **ends)
    return GPT2LMHeadModel(config)


def test_unknown_family_is_refused_with_the_repeated_blocks_to_try(tmp_path):
    models = {name: write(gpt2(), tmp_path / name) for name in NAMES}
    pool = with_data(CausalLMPool(OmegaConf.create(models), tokenizer=word_tokenizer()))
    message = refusal(pool)
    assert "does not know GPT2LMHeadModel (model type 'gpt2')" in message
    assert "Try method.family={name: replay, blocks: [transformer.h.*]}" in message
    family = {"name": "replay", "blocks": ["transformer.h.*"]}
    check_pool_settings(PoolModels(pool), FeatCalSettings(family=family))


def plain_pool(kind: Any, folder: Path) -> Any:
    """A pool whose entries name the class that loads them; no weights are ever looked at."""
    write(kind, folder)
    entry = {"_target_": "transformers.AutoModel.from_pretrained"}
    entry["pretrained_model_name_or_path"] = str(folder)
    return BaseModelPool(OmegaConf.create({"_pretrained_": entry}))  # type: ignore[arg-type]


def test_unknown_family_of_a_pool_of_any_models_is_refused_too(tmp_path):
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    small = ViTConfig(**sizes, num_hidden_layers=2, image_size=8, patch_size=4)
    model = ViTForImageClassification(small)
    pool = plain_pool(model, tmp_path / "vit")
    message = refusal(pool)
    assert "does not know ViTForImageClassification (model type 'vit')" in message
    blocks = next(n for n, module in model.named_modules() if isinstance(module, nn.ModuleList))
    assert f"Try method.family={{name: replay, blocks: [{blocks}.*]}}" in message
    # the class that the entry loads may call its blocks otherwise
    family = {"name": "replay", "blocks": ["encoder.layer.*"]}
    check_pool_settings(PoolModels(pool), FeatCalSettings(family=family))
    change_config(str(tmp_path / "vit"), architectures=["ModelOfTheirOwn"])
    expected = r"ModelOfTheirOwn \(model type 'vit'\)\. Set method\.family to "
    with pytest.raises(ValueError, match=expected):
        check_pool_settings(PoolModels(pool), FeatCalSettings())


def test_unknown_model_in_memory_without_a_config_is_refused():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    pool = BaseModelPool({"_pretrained_": Net(), "one": Net()})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"auto does not know Net .*blocks: \[layers\.\*\]"):
        check_pool_settings(PoolModels(pool), FeatCalSettings())


def test_suggestions_are_read_off_the_structure():
    class Net(nn.Module):
        def __init__(self, **parts: nn.Module) -> None:
            super().__init__()
            for name, part in parts.items():
                setattr(self, name, part)

    def stack(number: int, width: int = 3) -> nn.ModuleList:
        return nn.ModuleList(nn.Linear(width, width) for _ in range(number))

    assert suggested_families(Net(layers=stack(2), others=stack(5, 1))) == [
        "llama",
        "{name: replay, blocks: [layers.*]}",
    ]
    assert suggested_families(Net(body=Net(h=nn.Sequential(*stack(3))))) == [
        "{name: replay, blocks: [body.h.*]}"
    ]
    assert suggested_families(Net(one=nn.Linear(2, 2), few=stack(1))) == []
    both: Any = Net(encoder=Net(layers=stack(2)), decoder=Net(layers=stack(3)))
    both.config = SimpleNamespace(is_encoder_decoder=True)
    (family,) = suggested_families(both)
    assert "blocks: [[encoder.layers.*], [decoder.layers.*]]" in family
    assert "mask: [attention_mask, decoder_attention_mask]" in family
    check_family(OmegaConf.to_container(OmegaConf.create(f"family: {family}"))["family"])  # type: ignore[index, call-overload]


def test_a_familys_name_may_stand_in_a_mapping():
    assert resolve_family({"name": "llama"}, nn.Module()).name == "llama"


def test_family_that_does_not_fit_is_refused_before_anything_is_loaded(tmp_path):
    pool = clip_pool(towers(tmp_path))
    assert "no decoder layers" in refusal(pool, FeatCalSettings(family="llama"))
    family = {"name": "replay", "blocks": ["no.such.*"]}
    assert "'no.such.*' matches no module" in refusal(pool, FeatCalSettings(family=family))


# What is hardly meant


def warnings_of(pool: Any, caplog: Any) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="fusion_bench_featcal"):
        check_pool_models(PoolModels(pool), fabric())
        check_pool_models(PoolModels(pool), fabric())
    return [record.getMessage() for record in caplog.records if "featcal" in record.name]


def test_tasks_without_an_expert_are_warned_of_once(tmp_path, caplog):
    data: Any = OmegaConf.create({"one": {}, "two": {}, "three": {}})
    pool = clip_pool(towers(tmp_path), train_datasets=data)
    pool._program = SimpleNamespace(taskpool=SimpleNamespace(_test_datasets={"four": {}}))
    first, second = warnings_of(pool, caplog)
    assert first.startswith("modelpool has data of tasks that no expert")
    assert first.endswith(": three")
    assert second.startswith("taskpool")
    assert second.endswith(": four")


def test_same_weights_under_two_names_are_warned_of(tmp_path, caplog):
    models = towers(tmp_path)
    expected = ["experts 'one' and 'two' have the same weights"]
    assert warnings_of(clip_pool(models | {"two": models["one"]}), caplog) == expected
    copied = write(tower(1), tmp_path / "copied")
    assert warnings_of(clip_pool(models | {"two": copied}), caplog) == expected
    modules: Any = {"_pretrained_": tower(), "one": tower(1), "two": tower(1)}
    assert warnings_of(BaseModelPool(modules), caplog) == expected


def test_expert_that_differs_in_one_matrix_only_is_another(tmp_path, caplog):
    other = tower(1)
    with torch.no_grad():
        other.get_submodule(
            next(name for name, _ in other.named_modules() if name.endswith("1.mlp.fc2"))
        ).weight.add_(1)  # type: ignore[union-attr, operator]
    models = towers(tmp_path) | {"two": write(other, tmp_path / "other")}
    assert warnings_of(clip_pool(models), caplog) == []


def test_expert_with_the_base_s_weights_is_warned_of(tmp_path, caplog):
    models = towers(tmp_path)
    (warning,) = warnings_of(clip_pool(models | {"two": models["_pretrained_"]}), caplog)
    assert warning.startswith("expert 'two' has the base model's weights")


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
    with caplog.at_level(logging.INFO, logger="fusion_bench_featcal"):
        take_default_taskpool(program)
    assert (program.taskpool is None) == bool(words)
    assert len(caplog.records) == 1
    assert ("nothing is evaluated" in caplog.text) == bool(words)


@pytest.mark.slow
def test_causal_pool_in_yaml_without_a_tokenizer_says_what_to_set(tmp_path):
    words = ["method=featcal", "modelpool=llama-mini_TA6", "~modelpool.tokenizer"]
    result = fusion_bench([*words, f"path.log_dir={tmp_path}/log"], tmp_path, check=False)
    assert result.returncode != 0
    assert "error: the model pool names no tokenizer" in result.stderr
    assert "set modelpool.tokenizer" in result.stderr
