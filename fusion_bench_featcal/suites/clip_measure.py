"""What the saved checkpoints of the small CLIP reach on the test split, before any calibration."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import CLIPModel, CLIPProcessor, CLIPVisionModel

from fusion_bench_featcal.suites.clip_training import image_embeddings, text_embeddings
from fusion_bench_featcal.suites.image import ALPHABETS2, TA6, load_arrays, load_split
from fusion_bench_featcal.suites.plain_merges import (
    Accuracies,
    Weights,
    plain_merges,
    versions,
    with_average,
)


class TestBench:
    """The test split of some tasks, processed once, and the zero-shot head of each."""

    __test__ = False  # pytest takes the name for a test class

    def __init__(self, folder: Path, tasks: Sequence[str]) -> None:
        self.model = CLIPModel.from_pretrained(folder / "pretrained").eval().requires_grad_(False)
        processor: Any = CLIPProcessor.from_pretrained(folder / "pretrained")
        self.base = {
            name: value.clone() for name, value in self.model.vision_model.state_dict().items()
        }
        self.items = {task: _processed(task, processor) for task in tasks}
        self.heads = {}
        for task in tasks:
            prompts = processor(text=load_arrays(task).prompts(), padding=True, return_tensors="pt")
            self.heads[task] = text_embeddings(self.model, dict(prompts))

    def expert(self, folder: Path, task: str) -> Weights:
        """Read the vision tower of a task's expert, with the names `base` has."""
        expert = CLIPVisionModel.from_pretrained(folder / task)
        tower = getattr(expert, "vision_model", expert)  # transformers >= 5.6 has no inner tower
        return tower.state_dict()

    @torch.no_grad()
    def accuracy(self, tower: Weights, task: str) -> float:
        """Return the share (0..1) of the task's test pictures that a vision tower gets right."""
        self.model.vision_model.load_state_dict(tower)
        pixels, labels = self.items[task]
        guesses = [
            (image_embeddings(self.model, part) @ self.heads[task].T).argmax(dim=-1)
            for part in pixels.split(256)
        ]
        return (torch.cat(guesses) == labels).double().mean().item()

    def row(self, tower: Weights) -> Accuracies:
        """Return the accuracy on every task, and their average."""
        return with_average({task: self.accuracy(tower, task) for task in self.items})


def _processed(task: str, processor: Any) -> tuple[Tensor, Tensor]:
    pictures = load_split(task, "test")
    pixels = processor(images=[item["image"] for item in pictures], return_tensors="pt")
    return pixels["pixel_values"], torch.from_numpy(np.asarray(pictures.labels))


def measure(folder: Path, tasks: Sequence[str]) -> dict[str, Accuracies]:
    """Measure the base, the experts and two plain merges of one set of tasks.

    Args:
        folder: where the builder saved `pretrained` and one folder a task.
        tasks: the tasks to merge and to measure on.

    Returns:
        `base`, `experts`, `simple_average` and `task_arithmetic` (scale 0.3), each task -> accuracy
        in 0..1 and their `average`.
    """
    bench = TestBench(folder, tasks)
    experts = {task: bench.expert(folder, task) for task in tasks}
    merges = plain_merges(bench.base, experts.values())
    return {
        "base": bench.row(bench.base),
        "experts": with_average({task: bench.accuracy(experts[task], task) for task in tasks}),
        **{name: bench.row(merged) for name, merged in merges.items()},
    }


def measure_suites(folder: Path, tasks: Sequence[str]) -> dict[str, object]:
    """Measure those of the shipped sets (TA6, all8, alphabets2) whose tasks were built."""
    sets = {"TA6": TA6, "all8": TA6 + ALPHABETS2, "alphabets2": ALPHABETS2}
    return {
        "accuracies": {
            name: measure(folder, members)
            for name, members in sets.items()
            if set(members) <= set(tasks)
        },
        "versions": versions(),
    }
