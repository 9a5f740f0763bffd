"""Mistakes in a pool are named before any model is loaded."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from fusion_bench.modelpool import CLIPVisionModelPool
from omegaconf import OmegaConf
from safetensors.torch import load_file
from tiny_models import clip_model, scatter
from tiny_pools import AVERAGE
from tiny_texts import TASKS, write

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.algorithm import FeatCalAlgorithm
from fusion_bench_featcal.fusionbench import PoolModels, check_pool_models, load_pool_model

NAMES = ("_pretrained_", *TASKS)
UNUSABLE_NAMES = ("../../x", ".", "\u4e2d" * 40, "a\x1b[31mb", "a.", "normalised", "Two")
INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
Models = dict[str, Any]


@pytest.fixture(scope="module")
def towers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of a base and two experts, by name."""
    folder = tmp_path_factory.mktemp("towers")
    return {n: write(scatter(clip_model(), k, 0.1), folder / n) for k, n in enumerate(NAMES)}


@pytest.fixture
def models(towers: dict[str, str], tmp_path: Path) -> Models:
    """The same, with a copy of the last expert that a test may damage."""
    return towers | {"two": str(shutil.copytree(towers["two"], tmp_path / "two"))}


def clip_pool(models: Models) -> Any:
    return CLIPVisionModelPool(OmegaConf.create(models), processor=None)


def rewritten(file: str, change: Callable[[bytes], bytes]) -> Callable[[Models], object]:
    """Change the content of a file of the last expert."""
    return lambda m: (path := Path(m["two"], file)).write_bytes(change(path.read_bytes()))


def configured(**changes: Any) -> Callable[[Models], object]:
    return rewritten("config.json", lambda text: json.dumps(json.loads(text) | changes).encode())


def without_a_shard(models: Models) -> None:
    Path(models["two"], WEIGHTS).unlink()
    Path(models["two"], INDEX).write_text('{"weight_map": {"a": "b.safetensors"}}')


# A change of the models, and words of the message.
ROWS: list[tuple[Callable[[Models], object], tuple[str, ...]]] = [
    *((lambda m, name=name: m.update({name: m.pop("one")}),
       ("modelpool.models: ", repr(name[:100]))) for name in UNUSABLE_NAMES),
    (lambda m: m.update(two=5), ("modelpool.models.two is 5, which is no model",)),
    (lambda m: m.update(two={"_target_": "no_such_package.load", "path": "x"}),
     ("modelpool.models.two._target_=no_such_package.load cannot be imported",)),
    (lambda m: m.update(two="who/what"),
     ("modelpool.models.two=who/what: there is no such file or folder here", "Correct it")),
    (lambda m: Path(m["two"], "config.json").unlink(), ("two has no config.json, so",)),
    (rewritten("config.json", lambda _: b"{"), ("two/config.json is damaged",)),
    (without_a_shard, ("lacks the shards ['b.safetensors']",)),
    *((rewritten(WEIGHTS, lambda data, size=size: data[:size]),
       (f"{WEIGHTS} is no readable safetensors file",)) for size in (0, 3000)),
    (configured(hidden_act="relu", layer_norm_eps=0.1),
     ("'two' is another function than the base", "write the other values into its config.json",
      "hidden_act='relu' (there 'quick_gelu'), layer_norm_eps=0.1 (there 1e-05)")),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), ROWS)
def test_a_mistake_is_named_before_any_model_is_loaded(
    change: Callable[[Models], object], words: tuple[str, ...], models: Models
):
    change(models)
    pool = clip_pool(models)
    pool.load_model = lambda *_, **__: pytest.fail("a model was loaded")
    with pytest.raises((CalibrationError, ValueError)) as caught:
        FeatCalAlgorithm(base_method=AVERAGE).run(pool)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message and len(message) < 800


def test_a_precision_without_effect_is_refused(models: Models):
    algorithm = FeatCalAlgorithm(base_method=AVERAGE)
    algorithm.fabric = lightning.Fabric(accelerator="cpu", devices=1, precision="bf16-true")
    expected = r"fabric\.precision=bf16-true .*fabric\.precision=32-true.* torch_dtype"
    with pytest.raises(CalibrationError, match=expected):
        algorithm.run(clip_pool(models))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"_target_": "builtins.divmod", "_args_": [1, 0]},
         r"model 'two' .*zero.*modelpool\.models\.two"),
        ({"_target_": "builtins.dict"}, r"models\.two gives a dict, not an nn\.Module"),
    ],
)  # fmt: skip
def test_an_entry_that_gives_no_model_is_named(entry: Any, message: str):
    with pytest.raises(CalibrationError, match=message):
        load_pool_model(clip_pool({"two": entry}), "two")


def test_a_bin_file_is_loaded_unless_it_has_code(models: Models):
    folder = Path(models["two"])
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    check_pool_models(PoolModels(clip_pool(models)), lightning.Fabric(accelerator="cpu", devices=1))
    loaded = load_pool_model(clip_pool(models), "two").state_dict()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    torch.save({"a": folder}, folder / "pytorch_model.bin")
    with pytest.raises(CalibrationError, match=r"model 'two' .*has code, .*modelpool\.models\.two"):
        load_pool_model(clip_pool(models), "two")
