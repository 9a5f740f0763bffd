"""The shipped small CLIP, loaded through FusionBench's own pools from the shipped YAML."""

import json
from pathlib import Path

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
import pytest
import torch
from fusion_bench.constants.paths import DEFAULT_CONFIG_PATH
from fusion_bench.method import SimpleAverageAlgorithm
from fusion_bench.mixins.clip_classification import CLIPClassificationMixin
from fusion_bench.utils import instantiate
from hydra import compose, initialize_config_dir
from transformers import CLIPVisionModel

from fusion_bench_featcal.suites import image

SETS = {"TA6": image.TA6, "all8": image.ALL8, "alphabets2": image.ALPHABETS2}
MEASURED = json.loads(Path(image.path("MEASURED.json")).read_text(encoding="utf-8"))
ROWS = MEASURED["accuracies"]


def composed(name: str, *overrides: str):
    with initialize_config_dir(str(DEFAULT_CONFIG_PATH), version_base=None):
        return compose("fabric_model_fusion", [f"modelpool=clip-vit-mini_{name}", *overrides])


def pool_of(name: str):
    return instantiate(composed(name).modelpool, _recursive_=False)


def task_pool_of(name: str, target: str | None = None):
    config = composed(name).modelpool.default_taskpool
    if target is not None:
        config._target_ = target
    return instantiate(config, _recursive_=False)


def off_by_pictures(accuracy: float, expected: float, task: str) -> float:
    return abs(accuracy - expected) * len(image.load_split(task, "test"))


@pytest.mark.parametrize("name", SETS)
def test_each_yaml_names_its_tasks_everywhere(name):
    modelpool = composed(name, f"taskpool=clip-vit-mini_{name}")
    chosen, taskpool = modelpool.taskpool, modelpool.modelpool.default_taskpool
    assert chosen == taskpool
    tasks = SETS[name]
    pool = pool_of(name)
    assert tuple(pool.model_names) == tasks == tuple(taskpool.test_datasets)
    assert tuple(pool.train_dataset_names) == tasks == tuple(pool.test_dataset_names)
    for task in tasks:
        assert Path(pool.get_model_path(task)).name == task
        sets = {"train": pool._train_datasets[task], "test": pool._test_datasets[task]}
        assert {split: (entry.task, entry.split) for split, entry in sets.items()} == {
            split: (task, split) for split in sets
        }
        assert taskpool.test_datasets[task] == sets["test"]


def test_the_pool_loads_the_base_and_all_experts():
    pool = pool_of("all8")
    base = pool.load_model("_pretrained_")
    shapes = {key: value.shape for key, value in base.state_dict().items()}
    for task in image.ALL8:
        expert = pool.load_model(task)
        assert isinstance(expert, CLIPVisionModel)
        assert {key: value.shape for key, value in expert.state_dict().items()} == shapes
        assert {p.dtype for p in expert.parameters()} == {torch.float32}
        assert all(torch.isfinite(p).all() for p in expert.parameters())
        moved = (a - b for a, b in zip(expert.parameters(), base.parameters(), strict=True))
        assert any(change.abs().max() > 1e-3 for change in moved)


def test_the_pool_loads_pictures_and_processor():
    pool = pool_of("alphabets2")
    processor = pool.load_processor()
    for load, count in ((pool.load_train_dataset, 336), (pool.load_test_dataset, 144)):
        pictures = load("mini_balinese")
        assert len(pictures) == count
        pixels = processor(images=[pictures[0]["image"]], return_tensors="pt")["pixel_values"]
        assert pixels.shape == (1, 3, 28, 28)


@pytest.mark.parametrize(
    "target", ["fusion_bench.taskpool.CLIPVisionModelTaskPool", None], ids=["theirs", "ours"]
)
def test_task_pools_measure_what_the_builder_measured(target):
    merged = SimpleAverageAlgorithm(show_pbar=False).run(pool_of("alphabets2"))
    report = task_pool_of("alphabets2", target).evaluate(merged)
    for task in image.ALPHABETS2:
        expected = ROWS["alphabets2"]["simple_average"][task]
        assert off_by_pictures(report[task]["accuracy"], expected, task) <= 1.01


def test_fusionbenchs_task_pool_measures_the_base_on_all_six_tasks():
    pool = task_pool_of("TA6", "fusion_bench.taskpool.CLIPVisionModelTaskPool")
    report = pool.evaluate(pool_of("TA6").load_model("_pretrained_"))
    for task in image.TA6:
        expected = ROWS["TA6"]["base"][task]
        assert off_by_pictures(report[task]["accuracy"], expected, task) <= 1.01
    assert report["average"]["accuracy"] == pytest.approx(ROWS["TA6"]["base"]["average"], abs=1e-3)


def test_heads_for_adamerging_and_its_kin_are_built_from_the_pool_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    heads = CLIPClassificationMixin()
    heads.modelpool = pool_of("alphabets2")
    heads.zeroshot_weights = {}
    heads.setup_zero_shot_classification_head()
    assert heads.zeroshot_weights["mini_korean"].shape == (40, 64)
    assert heads.zeroshot_weights["mini_balinese"].shape == (24, 64)


def test_experts_are_good_and_plain_merges_lose():
    rows = ROWS["TA6"]
    experts = rows["experts"]["average"]
    assert experts >= 0.88
    for merge in ("simple_average", "task_arithmetic"):
        assert rows[merge]["average"] <= experts - 0.10
    assert MEASURED["seed"] == 0
