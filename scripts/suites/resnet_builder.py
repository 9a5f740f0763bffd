"""The small ResNet: a base on plain glyphs, then one expert per task in the task's colours.

The tasks have ten labels each, and share one head, which experts leave as it is.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from clip_builder import (
    Phase,
    PictureTest,
    augment,
    draw,
    load_training_set,
    painted_pixels,
    plain_pixels,
)
from suite_training import Builder, loss_and_accuracy, stage_generator, train
from torch import Tensor
from transformers import CLIPProcessor, ResNetForImageClassification

from fusion_bench_featcal.suites import image

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


class ResNetBuilder(Builder):
    """Trains and measures the small ResNet."""

    TASKS = image.RESNET3
    RECIPES: ClassVar = {"resnet-mini": Recipe()}

    def __init__(self, *args: Any) -> None:
        """Load the processor of the small CLIP."""
        super().__init__(*args)
        self.test = PictureTest(CLIPProcessor.from_pretrained(image.path()))

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

        def next_scores() -> tuple[Tensor, float]:
            pixels, labels = batch()
            return loss_and_accuracy(model(pixels).logits, labels)

        model.train()
        clip = self.recipe.gradient_clip
        train(optimiser, schedule, phase.steps, clip, next_scores, self.log)
        model.eval()

    @torch.no_grad()
    def accuracy(self, model: ResNetForImageClassification, task: str) -> float:
        """Return the share (0..1) of the task's test pictures that the model gets right."""
        return self.test(task, lambda pixels: model(pixels).logits)
