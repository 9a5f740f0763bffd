"""Pools of CLIP towers of a few thousand parameters, and of two tasks of the bundled suite."""

import copy
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fusion_bench_featcal.pools  # noqa: F401  adapts FusionBench

# isort: split
import lightning
import pytest
import torch
from fusion_bench.modelpool import CLIPVisionModelPool
from tiny_images import picture, write_clip
from torch import nn
from transformers import CLIPModel, CLIPProcessor, CLIPVisionModel

from fusion_bench_featcal.fusionbench.method_inputs import MethodInputs
from fusion_bench_featcal.suites import image

TASKS = ("one", "two-b.c")
AVERAGE = {"_target_": "fusion_bench.method.SimpleAverageAlgorithm"}
ARITHMETIC = {"_target_": "fusion_bench.method.TaskArithmeticAlgorithm", "scaling_factor": 0.3}


def pictures(task: str, split: str, number: int) -> list[dict[str, Any]]:
    start = 1000 * (TASKS.index(task) + 1) + (500 if split == "test" else 0)
    return [{"image": picture(start + i), "label": i % 3} for i in range(number)]


def write_models(folder: Path) -> dict[str, str]:
    """Base, two experts and a merged model on disk: differently seeded CLIPs."""
    names = ("_pretrained_", *TASKS, "_merged_")
    written = [write_clip(folder / f"clip_{seed}", seed=seed) for seed in range(len(names))]
    for model in written:  # FusionBench's Surgery reads the width of features here
        config = json.loads((model / "config.json").read_text())
        config["vision_config"]["projection_dim"] = config["projection_dim"]
        (model / "config.json").write_text(json.dumps(config))
    return dict(zip(names, map(str, written), strict=True))


def tiny_pool(models: Mapping[str, Any], *, train: int = 12, test: int = 10) -> Any:
    """FusionBench's pool. Datasets are lists in memory, with none if their number is 0."""
    sizes = {"train": train, "test": test}
    data = {
        split: {task: pictures(task, split, number) for task in TASKS if number}
        for split, number in sizes.items()
    }
    pool: Any = CLIPVisionModelPool(
        models=dict(models),  # type: ignore[arg-type]
        processor=str(models.get("_pretrained_", models["one"])),  # type: ignore[arg-type]
        train_datasets=data["train"],
        test_datasets=data["test"],
    )
    pool.load_train_dataset = lambda task: data["train"][task]
    pool.load_test_dataset = lambda task: data["test"][task]
    return pool


def suite_pool(**changes: Any) -> Any:
    """Two of the bundled suite's tasks, as FusionBench's pool, without any YAML."""
    tasks = ["mini_greek", "mini_latin"]
    options = {
        "models": {"_pretrained_": image.path(), **{task: image.path(task) for task in tasks}},
        "train_datasets": {task: image.load_split(task, "train") for task in tasks},
        "processor": {"_target_": "fusion_bench_featcal.suites.image.load_processor"},
    }
    pool: Any = CLIPVisionModelPool(**(options | changes))
    pool.load_train_dataset = lambda task: options["train_datasets"][task]
    return pool


def tiny_processor(models: Mapping[str, str]) -> CLIPProcessor:
    return CLIPProcessor.from_pretrained(models["_pretrained_"])


def inputs_of(pool: Any) -> MethodInputs:
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    return MethodInputs(pool, taskpool=None, fabric=fabric)


def tower(models: Mapping[str, str], name: str) -> Any:
    return CLIPVisionModel.from_pretrained(models[name]).eval()


def projection_of(models: Mapping[str, str], name: str = "_pretrained_") -> Any:
    return CLIPModel.from_pretrained(models[name]).visual_projection.requires_grad_(False)


def refusing(pool: Any) -> Any:
    """The pool without its models: a test fails that loads one."""
    pool = copy.copy(pool)
    pool.load_model = lambda *_, **__: pytest.fail("a model was loaded")
    return pool


def in_memory(suite: Any) -> Any:
    """Inputs of a method for a suite's models and samples."""
    pool = SimpleNamespace(
        _models={},
        model_names=list(suite.experts),
        load_model=lambda task: copy.deepcopy(suite.experts[task]),
    )
    fabric = SimpleNamespace(device=torch.device("cpu"))
    experts = {t: SimpleNamespace(source=partial(pool.load_model, t)) for t in suite.experts}
    models = SimpleNamespace(experts=experts)
    parts = {"modelpool": pool, "fabric": fabric, "pooling": None, "models": models}
    return SimpleNamespace(**parts, batches=lambda _: suite.inputs, opened_batches={})


def assert_equal(result: nn.Module, expected: nn.Module) -> None:
    """Check that all tensors are bitwise equal."""
    states = result.state_dict(), expected.state_dict()
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(value, states[1][n]) for n, value in states[0].items())
