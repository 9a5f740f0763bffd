"""The shipped suites, loaded through FusionBench's own pools from the shipped YAML."""

import json
from pathlib import Path
from typing import Any

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
import pytest
import torch
from configs import composed
from fusion_bench.method import SimpleAverageAlgorithm
from fusion_bench.mixins.clip_classification import CLIPClassificationMixin
from fusion_bench.utils import instantiate
from transformers import CLIPVisionModel, LlamaForCausalLM, T5ForConditionalGeneration

from fusion_bench_featcal.fusionbench.evaluation import evaluate
from fusion_bench_featcal.suites import image, paths, text

CLIP = "clip-vit-mini"
IMAGES = (CLIP, "resnet-mini")
TASKS = {
    f"{CLIP}_TA6": image.TA6,
    f"{CLIP}_all8": image.ALL8,
    f"{CLIP}_alphabets2": image.ALPHABETS2,
    "flan-t5-mini_TA6": text.TA6,
    "llama-mini_TA6": text.TA6,
    "resnet-mini_TA3": image.RESNET3,
}
CLASSES = {
    f"{CLIP}_all8": CLIPVisionModel,
    "flan-t5-mini_TA6": T5ForConditionalGeneration,
    "llama-mini_TA6": LlamaForCausalLM,
}
POOLS = pytest.mark.parametrize("name", TASKS)


def pool_of(name: str) -> Any:
    return instantiate(composed(f"modelpool={name}").modelpool, _recursive_=False)


def task_pool_of(name: str, target: str | None = None) -> Any:
    config = composed(f"modelpool={name}").modelpool.default_taskpool
    if target is not None:
        config._target_ = target
    return instantiate(config, _recursive_=False)


def measured(name: str) -> dict[str, Any]:
    """Row -> task -> accuracy that the builder measured."""
    suite, _, tasks = name.partition("_")
    record = json.loads(Path(paths.suite_path(f"{suite}/MEASURED.json")).read_text("utf-8"))
    assert record["seed"] == 0
    rows = record["accuracies"]
    return rows[tasks] if suite == CLIP else rows


def folder_of(model: Any) -> str:
    return Path(model if isinstance(model, str) else model.pretrained_model_name_or_path).name


@POOLS
def test_each_yaml_names_its_tasks_everywhere(name: str) -> None:
    config = composed(f"modelpool={name}", f"taskpool={name}")
    assert config.taskpool == config.modelpool.default_taskpool
    pool, tests = pool_of(name), config.taskpool.test_datasets
    assert tuple(pool.model_names) == tuple(tests) == TASKS[name]
    assert tuple(pool.train_dataset_names) == tuple(pool.test_dataset_names) == TASKS[name]
    for task in TASKS[name]:
        assert folder_of(pool._models[task]) == task
        assert tests[task] == pool._test_datasets[task]
        sets = pool._train_datasets[task], pool._test_datasets[task]
        assert {entry.get("task", entry.get("name")) for entry in sets} == {task}
        seen = "train" if name.startswith(IMAGES) else "calibration"
        assert [entry.split for entry in sets] == [seen, "test"]


@pytest.mark.parametrize("name", CLASSES)
def test_the_pool_loads_the_base_and_all_experts(name: str) -> None:
    pool = pool_of(name)
    base = pool.load_model("_pretrained_")
    shapes = {key: value.shape for key, value in base.state_dict().items()}
    for task in TASKS[name]:
        expert = pool.load_model(task)
        assert isinstance(expert, CLASSES[name])
        assert {key: value.shape for key, value in expert.state_dict().items()} == shapes
        assert {p.dtype for p in expert.parameters()} == {torch.float32}
        assert all(torch.isfinite(p).all() for p in expert.parameters())
        moved = (a - b for a, b in zip(expert.parameters(), base.parameters(), strict=True))
        assert any(change.abs().max() > 1e-3 for change in moved)
        if not name.startswith(CLIP):
            embedding = base.get_input_embeddings().weight
            assert torch.equal(expert.get_input_embeddings().weight, embedding)
            assert base.get_output_embeddings().weight is embedding


@pytest.mark.parametrize(
    ("name", "target", "row", "tasks"),
    [
        (f"{CLIP}_alphabets2", None, "simple_average", image.ALPHABETS2),
        (f"{CLIP}_TA6", "fusion_bench.taskpool.CLIPVisionModelTaskPool", "base", image.TA6[3:]),
        ("flan-t5-mini_TA6", None, "simple_average", ["clinc_auto"]),
        ("llama-mini_TA6", None, "simple_average", ["clinc_auto"]),
    ],
)
def test_task_pools_measure_what_the_builder_measured(
    name: str, target: str | None, row: str, tasks: list[str]
) -> None:
    pool, taskpool = pool_of(name), task_pool_of(name, target)
    is_merged = row == "simple_average"
    average = SimpleAverageAlgorithm(show_pbar=False)
    model = average.run(pool) if is_merged else pool.load_model("_pretrained_")
    found = evaluate(taskpool, model, name=row, tasks=tasks)
    for task in tasks:
        number = len(pool.load_test_dataset(task))
        # another machine may round a close call the other way
        off_by = abs(found.accuracy[task] - measured(name)[row][task]) * number
        assert off_by <= (1.01 if name.startswith(CLIP) else 2.01)


def test_heads_for_adamerging_and_its_kin_are_built_from_the_pool_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    heads = CLIPClassificationMixin()
    heads.modelpool = pool_of(f"{CLIP}_alphabets2")
    heads.zeroshot_weights = {}
    heads.setup_zero_shot_classification_head()
    assert heads.zeroshot_weights["mini_korean"].shape == (40, 64)
    assert heads.zeroshot_weights["mini_balinese"].shape == (24, 64)
