"""The shipped suites, loaded through FusionBench's pools from the shipped YAML."""

import json
from pathlib import Path
from typing import Any

import fusion_bench_featcal.fusionbench.compat  # noqa: F401

# isort: split
import pytest
import torch
from configs import composed
from fusion_bench.method import SimpleAverageAlgorithm
from fusion_bench.utils import instantiate
from omegaconf import OmegaConf

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.fusionbench import load_pool_model, run_merger
from fusion_bench_featcal.suites import image, paths, text

CLIP, RESNET = "clip-vit-mini", "resnet-mini_TA3"
FLAN, LLAMA = "flan-t5-mini_TA6", "llama-mini_TA6"
OPEN_CLIP = "open-clip-vit-mini_TA6"
TASKS = {
    f"{CLIP}_TA6": image.TA6,
    f"{CLIP}_all8": image.ALL8,
    f"{CLIP}_alphabets2": image.ALPHABETS2,
    FLAN: text.TA6,
    LLAMA: text.TA6,
    RESNET: image.RESNET3,
    OPEN_CLIP: image.TA6,
}


def config_of(name: str) -> Any:
    """Config of a model pool with the task pool of its name and a merger."""
    return composed(f"modelpool={name}", f"taskpool={name}", "method=task_arithmetic")


@pytest.mark.parametrize("name", TASKS)
def test_each_yaml_names_its_tasks_everywhere(name):
    config = config_of(name)
    assert config.taskpool == config.modelpool.default_taskpool
    pool: Any = instantiate(config.modelpool, _recursive_=False)
    tests = config.taskpool.test_datasets
    assert tuple(pool.model_names) == tuple(tests) == TASKS[name]
    assert tuple(pool.train_dataset_names) == tuple(pool.test_dataset_names) == TASKS[name]
    for task in TASKS[name]:
        assert task in str(pool._models[task])
        assert tests[task] == pool._test_datasets[task]
        sets = pool._train_datasets[task], pool._test_datasets[task]
        assert {entry.get("task", entry.get("name")) for entry in sets} == {task}
        split = "calibration" if name in (FLAN, LLAMA) else "train"
        assert [entry.split for entry in sets] == [split, "test"]


@pytest.mark.parametrize(
    ("name", "task"),
    [
        (f"{CLIP}_alphabets2", image.ALPHABETS2[0]),
        (FLAN, "clinc_auto"),
        pytest.param(LLAMA, "clinc_auto", marks=pytest.mark.slow),
        pytest.param(RESNET, "mini_notmnist", marks=pytest.mark.slow),
    ],
)
def test_task_pools_measure_what_the_builder_measured(name, task):
    config = config_of(name)
    pool: Any = instantiate(config.modelpool, _recursive_=False)
    model = SimpleAverageAlgorithm(show_pbar=False).run(pool)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    tests = OmegaConf.masked_copy(config.taskpool.test_datasets, [task])
    config.taskpool.test_datasets = tests  # one task, for the sake of time
    task_pool = instantiate(config.taskpool, _recursive_=False)
    measured = task_pool.evaluate(model)[task]["accuracy"]
    suite, _, task_set = name.partition("_")
    record = json.loads(Path(paths.suite_path(f"{suite}/MEASURED.json")).read_text("utf-8"))
    rows = record["accuracies"][task_set] if suite == CLIP else record["accuracies"]
    off_by = abs(measured - rows["simple_average"][task]) * len(pool.load_test_dataset(task))
    # another machine may round a close call the other way
    assert off_by <= (1.01 if suite == CLIP else 2.01)


def test_mergers_take_batch_norms_counts():
    config = config_of(RESNET)
    pool = instantiate(config.modelpool, _recursive_=False)
    merged = run_merger(None, config.method, pool, "method.base_method").state_dict()
    counts = {v.dtype for name, v in merged.items() if name.endswith("num_batches_tracked")}
    assert counts == {torch.int64}
    assert all(torch.isfinite(value).all() for value in merged.values())


def test_what_is_not_installed_is_named_with_the_command(monkeypatch):
    def refuse(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    pool = instantiate(config_of(OPEN_CLIP).modelpool, _recursive_=False)
    with monkeypatch.context() as patch:
        patch.setattr("fusion_bench_featcal.suites.open_clip.import_module", refuse)
        with pytest.raises(CalibrationError, match=r"_pretrained_.*'open_clip.*\[openclip\]"):
            load_pool_model(pool, "_pretrained_")
    monkeypatch.setattr(paths, "PACKAGE", "no_such_package")
    with pytest.raises(FileNotFoundError, match="not installed: pip install no_such_package"):
        paths.suite_path("images")
