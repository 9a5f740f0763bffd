"""Mistakes in a pool are named before any model is loaded."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fusion_bench.modelpool import CLIPVisionModelPool
from omegaconf import OmegaConf
from safetensors.torch import load_file
from tiny_images import channels_first, picture
from tiny_models import clip_model, scatter
from tiny_pools import AVERAGE, assert_equal
from tiny_texts import NAMES, write

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.algorithm import FeatCalAlgorithm

WEIGHTS = "model.safetensors"
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
    data: Any = dict.fromkeys(models, "data.jsonl")
    return CLIPVisionModelPool(OmegaConf.create(models), processor=None, train_datasets=data)


def config_of_another_function(models: Models) -> None:
    path = Path(models["two"], "config.json")
    changes = {"hidden_act": "relu", "layer_norm_eps": 0.1}
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# A change of the models, and words of the message.
ROWS: list[tuple[Callable[[Models], object], tuple[str, ...]]] = [
    (lambda m: m.update({"../../x": m.pop("one")}), ("modelpool.models: ", "'../../x'")),
    (lambda m: m.update({"Two": m.pop("one")}), ("modelpool.models: ", "'Two'")),
    (lambda m: m.update(two=5), ("modelpool.models.two is 5, which is not a model",)),
    (lambda m: m.update(two={"_target_": "no_such_package.load", "path": "x"}),
     ("two._target_=no_such_package.load cannot be imported: No module named 'no_such_package'",)),
    (lambda m: m.update(two="who/what"),
     ("modelpool.models.two=who/what: there is no such file or folder here", "Correct it")),
    (lambda m: Path(m["two"], "config.json").unlink(), ("two has no config.json, so",)),
    (lambda m: Path(m["two"], "config.json").write_text("{"), ("two/config.json is damaged",)),
    (lambda m: Path(m["two"], WEIGHTS).write_bytes(b""), ("is not a readable safetensors file",)),
    (config_of_another_function,
     ("'two' computes a different function than the base",
      "write the other values into its config.json",
      "hidden_act='relu' instead of 'quick_gelu', layer_norm_eps=0.1 instead of 1e-05")),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), ROWS)
def test_a_mistake_is_named_before_any_model_is_loaded(change, words, models) -> None:
    change(models)
    pool = clip_pool(models)
    pool.load_model = lambda *_, **__: pytest.fail("a model was loaded")
    with pytest.raises((CalibrationError, ValueError)) as caught:
        FeatCalAlgorithm(base_method=AVERAGE).run(pool)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message and len(message) < 800


def test_a_bin_file_is_loaded_unless_it_has_code(models: Models):
    folder, pool = Path(models["two"]), clip_pool(models | {"_merged_": models["one"]})
    pool._processor = channels_first
    pool.load_train_dataset = lambda _: [{"image": picture(n, (8, 8))} for n in range(4)]
    settings: Any = {"base_method": None, "samples_per_task": 4, "presets": {}}
    expected = FeatCalAlgorithm(**settings).run(pool)
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert_equal(FeatCalAlgorithm(**settings).run(pool), expected)
    torch.save({"a": folder}, folder / "pytorch_model.bin")
    with pytest.raises(CalibrationError, match=r"^modelpool\.models\.two: .*has code, "):
        FeatCalAlgorithm(**settings).run(pool)
