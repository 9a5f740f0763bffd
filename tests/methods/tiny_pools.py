"""Pools of a few CLIP towers of a few thousand parameters, with pictures of noise."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
import lightning
from fusion_bench.modelpool import CLIPVisionModelPool
from tiny_images import picture, write_clip
from transformers import CLIPProcessor

from fusion_bench_featcal.method_inputs import MethodInputs

TASKS = ("one", "two-b.c")


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
    """FusionBench's pool; data sets are lists in memory, none where their number is 0."""
    sizes = {"train": train, "test": test}
    data = {
        split: {task: pictures(task, split, number) for task in TASKS if number}
        for split, number in sizes.items()
    }
    pool: Any = CLIPVisionModelPool(
        models=dict(models),  # type: ignore[arg-type]
        processor=str(models["_pretrained_"]),  # type: ignore[arg-type]
        train_datasets=data["train"],
        test_datasets=data["test"],
    )
    pool.load_train_dataset = lambda task: data["train"][task]
    pool.load_test_dataset = lambda task: data["test"][task]
    return pool


def tiny_processor(models: Mapping[str, str]) -> CLIPProcessor:
    return CLIPProcessor.from_pretrained(models["_pretrained_"])


def inputs_of(pool: Any) -> MethodInputs:
    return MethodInputs(pool, taskpool=None, fabric=cpu_fabric())


def cpu_fabric() -> lightning.Fabric:
    return lightning.Fabric(accelerator="cpu", devices=1)
