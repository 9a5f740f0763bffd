"""`method.calibration_data`, and pools that load models or processors in ways of their own."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from image_pools import AVERAGE, suite_pool
from omegaconf import OmegaConf
from PIL import Image
from tiny_texts import TASKS, llama_model, sentences, with_data, word_tokenizer, write
from transformers import ConvNextImageProcessor, Dinov2Config, Dinov2ForImageClassification

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
from fusion_bench.modelpool import CausalLMPool, Dinov2ForImageClassificationPool

from fusion_bench_featcal import CalibrationError, FeatCalSettings
from fusion_bench_featcal.algorithm import FeatCalAlgorithm
from fusion_bench_featcal.fusionbench.own_data import with_own_data
from fusion_bench_featcal.fusionbench.processors import load_input_processor
from fusion_bench_featcal.lab.rivals import FeatCal

NAMES = ["_pretrained_", *TASKS]
Texts = tuple[dict[str, str], dict[str, str]]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    """Folders of models with their tokenizer, and files of texts."""
    folder = tmp_path_factory.mktemp("texts")
    tokenizer, files = word_tokenizer(), {}
    models = {n: write(llama_model(k), folder / n, tokenizer) for k, n in enumerate(NAMES)}
    for task in TASKS:
        files[task] = str(folder / f"{task}.jsonl")
        Path(files[task]).write_text("\n".join(map(json.dumps, sentences(task))))
    return models, files


def pool_of(models: dict[str, str], *, lazy: bool = False) -> Any:
    tokenizer = models["_pretrained_"]
    return CausalLMPool(OmegaConf.create(models), tokenizer=tokenizer, enable_lazy_loading=lazy)


def weights(pool: Any, **settings: Any) -> dict[str, torch.Tensor]:
    method = FeatCalAlgorithm(base_method=AVERAGE, samples_per_task=4, **settings)
    return dict(method.run(pool).state_dict())


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_own_data_give_the_model_of_the_same_data_of_the_pool(texts: Texts) -> None:
    models, files = texts
    pool, lazy = pool_of(models), pool_of(models, lazy=True)
    calibrated = weights(pool, calibration_data=files)
    assert_same(calibrated, weights(with_data(pool_of(models))))
    table = {"_target_": "datasets.load_dataset", "path": "json", "split": "train"}
    configs = {task: table | {"data_files": file} for task, file in files.items()}
    assert_same(calibrated, weights(pool, calibration_data=OmegaConf.create(configs)))
    assert pool._train_datasets is None
    assert_same(calibrated, weights(lazy, calibration_data=files, stream_experts=False))
    assert lazy.enable_lazy_loading


def test_own_data_replace_those_of_the_split_and_leave_others() -> None:
    pool = suite_pool()
    pool._val_datasets = {"mini_greek": "a", "mini_latin": "b"}
    settings = FeatCalSettings(calibration_split="val", calibration_data={"mini_greek": "c"})
    view = with_own_data(pool, settings)
    assert view._val_datasets == {"mini_greek": "c", "mini_latin": "b"}
    assert pool._val_datasets == {"mini_greek": "a", "mini_latin": "b"}
    assert with_own_data(pool, FeatCalSettings()) is pool


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"task 'one' .*\+method\.calibration_data\.one"),
        ({"calibration_data": {"onne": "a.jsonl"}},
         r"calibration_data\.onne: .* no expert 'onne' \(nearest: 'one'\)"),
        ({"calibration_data": dict.fromkeys(TASKS, "no.jsonl")},
         r"calibration_data\.one.*does not exist"),
    ],
)  # fmt: skip
def test_own_data_that_cannot_be_used_are_named(settings: Any, message: str, texts: Texts) -> None:
    with pytest.raises(CalibrationError, match=message):
        weights(pool_of(texts[0]), **settings)
    with pytest.raises(ValueError, match=r"calibration_data: .* modelpool\.train_datasets"):
        FeatCal(calibration_data={"one": "a.jsonl"})


@pytest.fixture
def classifiers(tmp_path: Path) -> dict[str, str]:
    """Folders of three DINOv2 classifiers, with a processor beside the first."""
    sizes: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    config, folders = Dinov2Config(**sizes, image_size=28, patch_size=14, num_labels=3), {}
    for seed, name in enumerate(NAMES):
        torch.manual_seed(seed)
        folders[name] = write(Dinov2ForImageClassification(config), tmp_path / name)
    for size, folder in ((28, folders["_pretrained_"]), (14, tmp_path / "other")):
        ConvNextImageProcessor(size={"shortest_edge": size}, crop_pct=1.0).save_pretrained(folder)
    return folders


def classifier_pool(entries: dict[str, Any], named: Any = None) -> Any:
    pool: Any = Dinov2ForImageClassificationPool(OmegaConf.create(entries))
    pool._program = SimpleNamespace(_modelpool=OmegaConf.create({"processor": named}))
    return pool


def test_processor_of_classifiers_is_the_bases_unless_another_is_named(
    classifiers: dict[str, str], tmp_path: Path
) -> None:
    other = str(tmp_path / "other")
    target = {"_target_": "transformers.AutoImageProcessor.from_pretrained"}
    target["pretrained_model_name_or_path"] = other
    configs = {name: {"config_path": folder} for name, folder in classifiers.items()}
    for entries in (classifiers, configs):  # FusionBench's own method fails on plain names
        for named, width in ((None, 28), (other, 14), (target, 14)):
            loaded = load_input_processor(classifier_pool(entries, named))
            batch = loaded(Image.new("RGB", (40, 40)), return_tensors="pt")
            assert batch["pixel_values"].shape[-1] == width
    with pytest.raises(CalibrationError, match=r"modelpool\.processor=nobody/none: there is"):
        load_input_processor(classifier_pool(classifiers, "nobody/none"))
