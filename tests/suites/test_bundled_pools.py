"""The shipped suites, loaded through FusionBench's pools from the shipped YAML."""

import json
from pathlib import Path
from typing import Any

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
import pytest
import torch
from configs import composed
from fusion_bench.method import SimpleAverageAlgorithm
from fusion_bench.utils import instantiate
from transformers import CLIPVisionModel, LlamaForCausalLM, T5ForConditionalGeneration

from fusion_bench_featcal.fusionbench.evaluation import evaluate
from fusion_bench_featcal.fusionbench.program import run_merger
from fusion_bench_featcal.suites import image, paths, text

CLIP, RESNET = "clip-vit-mini", "resnet-mini_TA3"
TASKS = {
    f"{CLIP}_TA6": image.TA6,
    f"{CLIP}_all8": image.ALL8,
    f"{CLIP}_alphabets2": image.ALPHABETS2,
    "flan-t5-mini_TA6": text.TA6,
    "llama-mini_TA6": text.TA6,
    RESNET: image.RESNET3,
}
CLASSES = {
    f"{CLIP}_all8": CLIPVisionModel,
    "flan-t5-mini_TA6": T5ForConditionalGeneration,
    "llama-mini_TA6": LlamaForCausalLM,
}


def pool_of(name: str) -> Any:
    return instantiate(composed(f"modelpool={name}").modelpool, _recursive_=False)


def folder_of(model: Any) -> str:
    return Path(model if isinstance(model, str) else model.pretrained_model_name_or_path).name


@pytest.mark.parametrize("name", TASKS)
def test_each_yaml_names_its_tasks_everywhere(name):
    config = composed(f"modelpool={name}", f"taskpool={name}")
    assert config.taskpool == config.modelpool.default_taskpool
    pool: Any = instantiate(config.modelpool, _recursive_=False)
    tests = config.taskpool.test_datasets
    assert tuple(pool.model_names) == tuple(tests) == TASKS[name]
    assert tuple(pool.train_dataset_names) == tuple(pool.test_dataset_names) == TASKS[name]
    for task in TASKS[name]:
        assert folder_of(pool._models[task]) == task
        assert tests[task] == pool._test_datasets[task]
        sets = pool._train_datasets[task], pool._test_datasets[task]
        assert {entry.get("task", entry.get("name")) for entry in sets} == {task}
        split = "train" if name.startswith((CLIP, RESNET)) else "calibration"
        assert [entry.split for entry in sets] == [split, "test"]


@pytest.mark.parametrize("name", CLASSES)
def test_the_pool_loads_the_base_and_all_experts(name):
    pool = pool_of(name)
    base = pool.load_model("_pretrained_")
    shapes = {key: value.shape for key, value in base.state_dict().items()}
    for task in TASKS[name][:3]:
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
    ("name", "task"),
    [
        (f"{CLIP}_alphabets2", image.ALPHABETS2[0]),
        ("flan-t5-mini_TA6", "clinc_auto"),
        ("llama-mini_TA6", "clinc_auto"),
        (RESNET, "mini_notmnist"),
    ],
)
def test_task_pools_measure_what_the_builder_measured(name, task):
    config = composed(f"modelpool={name}").modelpool
    pool: Any = instantiate(config, _recursive_=False)
    model = SimpleAverageAlgorithm(show_pbar=False).run(pool)
    task_pool = instantiate(config.default_taskpool, _recursive_=False)
    measured = evaluate(task_pool, model, name="simple_average", tasks=[task]).accuracy[task]
    suite, _, task_set = name.partition("_")
    record = json.loads(Path(paths.suite_path(f"{suite}/MEASURED.json")).read_text("utf-8"))
    assert record["seed"] == 0
    rows = record["accuracies"][task_set] if suite == CLIP else record["accuracies"]
    off_by = abs(measured - rows["simple_average"][task]) * len(pool.load_test_dataset(task))
    # another machine may round a close call the other way
    assert off_by <= (1.01 if suite == CLIP else 2.01)


def test_mergers_take_batch_norms_counts():
    pool = pool_of(RESNET)
    config = composed(f"modelpool={RESNET}", "method=task_arithmetic").method
    merged = run_merger(None, config, pool, "method.base_method").state_dict()
    counts = {v.dtype for name, v in merged.items() if name.endswith("num_batches_tracked")}
    assert counts == {torch.int64}
    assert all(torch.isfinite(value).all() for value in merged.values())
    assert "load_model" not in vars(pool)  # the pool itself is as it was
