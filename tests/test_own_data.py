"""`method.calibration_data`, and pools that load models or processors in ways of their own."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from image_pools import AVERAGE, suite_pool
from omegaconf import OmegaConf
from PIL import Image
from tiny_texts import TASKS, llama_model, sentences, with_data, word_tokenizer, write
from transformers import (
    AutoImageProcessor,
    ConvNextImageProcessor,
    Dinov2Config,
    Dinov2ForImageClassification,
)

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
from fusion_bench.modelpool import CausalLMPool, Dinov2ForImageClassificationPool

from fusion_bench_featcal import CalibrationError, FeatCalSettings
from fusion_bench_featcal.algorithm import FeatCalAlgorithm
from fusion_bench_featcal.fusionbench.own_data import with_own_data
from fusion_bench_featcal.fusionbench.processors import load_input_processor
from fusion_bench_featcal.lab.rivals import FeatCal


def texts(folder: Path, task: str) -> str:
    file = folder / f"{task}.jsonl"
    rows = [f'{{"prompt": "{r["prompt"]}", "target": "{r["target"]}"}}' for r in sentences(task)]
    file.write_text("\n".join(rows))
    return str(file)


def text_pool(folder: Path, *, lazy: bool = False) -> Any:
    names = ["_pretrained_", *TASKS]
    models = {name: write(llama_model(n), folder / name) for n, name in enumerate(names)}
    word_tokenizer().save_pretrained(folder / "tokenizer")
    return CausalLMPool(
        OmegaConf.create(models), tokenizer=str(folder / "tokenizer"), enable_lazy_loading=lazy
    )


def weights(pool: Any, **settings: Any) -> dict[str, torch.Tensor]:
    method = FeatCalAlgorithm(base_method=AVERAGE, samples_per_task=4, **settings)
    return dict(method.run(pool).state_dict())


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_own_data_give_what_the_same_data_of_the_pool_give(tmp_path: Path) -> None:
    pool = text_pool(tmp_path)
    with pytest.raises(CalibrationError, match=r"task 'one' .*\+method\.calibration_data\.one"):
        weights(pool)
    own = {task: texts(tmp_path, task) for task in TASKS}
    calibrated = weights(pool, calibration_data=own)
    assert_same(calibrated, weights(with_data(text_pool(tmp_path))))
    table = {"_target_": "datasets.load_dataset", "path": "json", "split": "train"}
    configs = {task: table | {"data_files": file} for task, file in own.items()}
    assert_same(calibrated, weights(pool, calibration_data=OmegaConf.create(configs)))
    assert pool._train_datasets is None


def test_own_data_take_the_place_of_the_pools_in_the_split_and_leave_others() -> None:
    pool = suite_pool()
    pool._val_datasets = {"mini_greek": "a", "mini_latin": "b"}
    settings = FeatCalSettings(calibration_split="val", calibration_data={"mini_greek": "c"})
    view = with_own_data(pool, settings)
    assert view._val_datasets == {"mini_greek": "c", "mini_latin": "b"}
    assert pool._val_datasets == {"mini_greek": "a", "mini_latin": "b"}
    assert with_own_data(pool, FeatCalSettings()) is pool


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"onne": "a.jsonl"}, r"calibration_data\.onne: .* no expert 'onne' \(nearest: 'one'\)"),
        ({"one": "no.jsonl", "two": "no.jsonl"}, r"calibration_data\.one.*does not exist"),
    ],
)
def test_own_data_that_cannot_be_used_are_named(own: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=message):
        weights(text_pool(tmp_path), calibration_data=own)


def test_own_data_are_one_for_all_presets_and_not_for_comparisons() -> None:
    own = {"calibration_data": {"one": "a.jsonl"}}
    with pytest.raises(ValueError, match=r"presets\.x\.calibration_data: set method\.calib"):
        FeatCalAlgorithm(presets={"x": own})
    with pytest.raises(ValueError, match=r"calibration_data: .* modelpool\.train_datasets"):
        FeatCal(**own)


def test_lazily_loading_pool_gives_the_same_model(tmp_path: Path) -> None:
    own = {task: texts(tmp_path, task) for task in TASKS}
    eager, lazy = (text_pool(tmp_path, lazy=lazy) for lazy in (False, True))
    settings = {"calibration_data": own, "stream_experts": False}
    assert_same(weights(eager, **settings), weights(lazy, **settings))
    assert lazy.enable_lazy_loading


@pytest.fixture
def classifiers(tmp_path: Path) -> dict[str, str]:
    """Folders of three DINOv2 classifiers, with a processor beside the first."""
    sizes: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Dinov2Config(**sizes, image_size=28, patch_size=14, num_labels=3)
    folders = {}
    for seed, name in enumerate(["_pretrained_", *TASKS]):
        torch.manual_seed(seed)
        folders[name] = write(Dinov2ForImageClassification(config), tmp_path / name)
    processor(28).save_pretrained(folders["_pretrained_"])
    processor(14).save_pretrained(tmp_path / "other")
    return folders


def processor(size: int) -> Any:
    return ConvNextImageProcessor(size={"shortest_edge": size}, crop_pct=1.0)


def classifier_pool(entries: dict[str, Any], named: Any = None) -> Any:
    pool: Any = Dinov2ForImageClassificationPool(OmegaConf.create(entries))
    pool._program = SimpleNamespace(_modelpool=OmegaConf.create({"processor": named}))
    return pool


def width_of(pool: Any) -> int:
    loaded = load_input_processor(pool)
    return loaded(Image.new("RGB", (40, 40)), return_tensors="pt")["pixel_values"].shape[-1]


def test_processor_of_classifiers_is_the_bases_unless_another_is_named(
    classifiers: dict[str, str], tmp_path: Path
) -> None:
    configs = {name: {"config_path": folder} for name, folder in classifiers.items()}
    other = str(tmp_path / "other")
    target = {"_target_": "transformers.AutoImageProcessor.from_pretrained"}
    for entries in (classifiers, configs):  # FusionBench's own method fails on plain names
        assert width_of(classifier_pool(entries)) == 28
        assert width_of(classifier_pool(entries, other)) == 14
        named = target | {"pretrained_model_name_or_path": other}
        assert width_of(classifier_pool(entries, named)) == 14
    with pytest.raises(CalibrationError, match=r"modelpool\.processor=nobody/none: there is"):
        load_input_processor(classifier_pool(classifiers, "nobody/none"))
    assert isinstance(AutoImageProcessor.from_pretrained(other), object)


def test_calibrated_classifier_runs_its_own_weights(classifiers: dict[str, str]) -> None:
    pool = classifier_pool({name: {"config_path": path} for name, path in classifiers.items()})
    pictures = [{"image": Image.new("RGB", (28, 28), (9 * n, 5, 200))} for n in range(6)]
    pool._train_datasets = {task: {} for task in TASKS}
    pool.load_train_dataset = lambda task: pictures
    family = {"name": "replay", "blocks": ["dinov2.encoder.layer.*"]}
    settings: dict[str, Any] = {"samples_per_task": 4, "family": family}
    model: Any = FeatCalAlgorithm(base_method=AVERAGE, **settings).run(pool)
    plain = Dinov2ForImageClassification(model.config).eval()
    plain.load_state_dict(model.state_dict())
    pixels = torch.rand(2, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = plain(pixel_values=pixels).logits
        torch.testing.assert_close(model(pixels), expected)
        base = pool.load_model("_pretrained_")(pixels)
    assert not torch.allclose(expected, base)
