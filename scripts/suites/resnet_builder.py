"""The small ResNet: a base on plain glyphs, then one expert per task in the task's colours.

The tasks have ten labels each, and share one head, which experts leave as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from clip_builder import Phase, augment, draw, load_training_set, painted_pixels, plain_pixels
from suite_training import Log, stage_generator, tensors_of, train
from torch import Tensor
from torch.nn import functional as F
from transformers import CLIPProcessor, ResNetConfig, ResNetForImageClassification

from fusion_bench_featcal.suites import image
from fusion_bench_featcal.suites.image import ImageTask

LABELS = 10

# Experts move so far that their mean loses much accuracy, as is typical of CNNs.
_PRETRAINING = Phase(500, 2e-3, 0.05, 50, degrees=7, scaling=0.07, shift=0.05)
_FINETUNING = Phase(600, 3e-3, 0.01, 0, degrees=10, scaling=0.10, shift=0.07)


@dataclass(frozen=True)
class Recipe:
    """Every number of the training recipe."""

    pretraining: Phase = _PRETRAINING
    finetuning: Phase = _FINETUNING
    images_per_task: int = 32
    expert_batch: int = 96
    gradient_clip: float = 1.0


class ResNetBuilder:
    """Trains and measures the small ResNet."""

    TASKS = image.RESNET3
    RECIPES: ClassVar = {"resnet-mini": Recipe()}
    sets: ClassVar = {}
    spelled_out: ClassVar = ()
    size: ClassVar[dict[str, Any]] = {}  # where it is not the suite's

    def __init__(
        self, suite: str, folder: Path, tasks: Sequence[str], recipe: Recipe, seed: int, log: Log
    ) -> None:
        """Prepare a build."""
        self.tasks, self.recipe, self.seed, self.log = tasks, recipe, seed, log
        self.processor: Any = CLIPProcessor.from_pretrained(image.path())
        self.test_pixels = cache(self._test_pixels)

    @staticmethod
    def find_task(name: str) -> ImageTask:
        """Return the task of a name. A ValueError lists the names."""
        return image.pick({task: image.TASKS[task] for task in image.RESNET3}, name, "ResNet task")

    def new_model(self) -> ResNetForImageClassification:
        """Return the untrained model: 28 px, a stem, three layers of 24, 48 and 80 channels."""
        config: dict[str, Any] = {
            "embedding_size": 16,
            "hidden_sizes": [24, 48, 80],
            "depths": [1, 1, 1],
            "layer_type": "basic",
            "num_labels": LABELS,
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return ResNetForImageClassification(ResNetConfig(**(config | self.size)))

    def pretrain(self, model: ResNetForImageClassification) -> None:
        """Train the whole model on plain pictures of all tasks."""
        recipe, generator = self.recipe, stage_generator(self.seed, "pretraining")
        sets = [load_training_set(task) for task in self.tasks]

        def batch() -> tuple[Tensor, Tensor]:
            pictures = [draw(data, recipe.images_per_task, generator) for data in sets]
            grey, labels = (torch.cat(part) for part in zip(*pictures, strict=True))
            return plain_pixels(augment(grey, recipe.pretraining, generator)), labels

        self._train(model, recipe.pretraining, batch)

    def finetune(self, model: ResNetForImageClassification, task: str) -> None:
        """Train all but the head on the task's ink and paper."""
        recipe, generator = self.recipe, stage_generator(self.seed, task)
        data, colours = load_training_set(task), image.TASKS[task]
        model.classifier.requires_grad_(False)

        def batch() -> tuple[Tensor, Tensor]:
            grey, labels = draw(data, recipe.expert_batch, generator)
            return painted_pixels(augment(grey, recipe.finetuning, generator), colours), labels

        self._train(model, recipe.finetuning, batch)

    def _train(self, model: ResNetForImageClassification, phase: Phase, batch: Any) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimiser = torch.optim.AdamW(
            trained, lr=phase.learning_rate, weight_decay=phase.weight_decay
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, phase.rate)

        def loss_and_accuracy() -> tuple[Tensor, float]:
            pixels, labels = batch()
            logits = model(pixels).logits
            right = (logits.argmax(-1) == labels).float().mean().item()
            return F.cross_entropy(logits, labels), right

        model.train()
        clip = self.recipe.gradient_clip
        train(optimiser, schedule, phase.steps, clip, loss_and_accuracy, self.log)
        model.eval()

    def expert_part(
        self, model: ResNetForImageClassification
    ) -> tuple[dict[str, Tensor], Any, str]:
        """Return the whole model."""
        return tensors_of(model), model.config, type(model).__name__

    @torch.no_grad()
    def accuracy(self, model: ResNetForImageClassification, task: str) -> float:
        """Return the share (0..1) of the task's test pictures that the model gets right."""
        pixels, labels = self.test_pixels(task)
        guesses = [model(part).logits.argmax(-1) for part in pixels.split(256)]
        return (torch.cat(guesses) == labels).double().mean().item()

    def _test_pixels(self, task: str) -> tuple[Tensor, Tensor]:
        pictures = image.load_split(task, "test")
        pixels = self.processor(images=[item["image"] for item in pictures], return_tensors="pt")
        return pixels["pixel_values"], torch.from_numpy(pictures.labels)
