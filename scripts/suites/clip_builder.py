"""The small CLIP: a base on plain glyphs, then one expert per task in the task's colours."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from suite_training import Builder, loss_and_accuracy, stage_generator, train
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPModel, CLIPProcessor

from fusion_bench_featcal.suites import image
from fusion_bench_featcal.suites.image import ImageTask, load_arrays

PLAIN_MEAN, PLAIN_STD = 0.2, 0.35
PIXEL_MEAN, PIXEL_STD = 0.45, 0.35  # of the processor
EMBEDDING_SCALES = {
    "token_embedding.weight": 0.5,
    "position_embedding.weight": 0.5,
    "patch_embedding.weight": (3 * 7**2) ** -0.5,
}


@dataclass(frozen=True)
class Phase:
    """Optimiser and augmentation of one phase, the latter in degrees and shares of the side."""

    steps: int
    learning_rate: float
    weight_decay: float
    warmup_steps: int
    degrees: float
    scaling: float
    shift: float

    def rate(self, step: int) -> float:
        """Return the share of the learning rate: linear warm-up to 1, then half a cosine to 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class Recipe:
    """Every number of the training recipe."""

    pretraining: Phase = Phase(2000, 1e-3, 0.05, 50, degrees=7, scaling=0.07, shift=0.05)
    finetuning: Phase = Phase(400, 2e-4, 0.01, 0, degrees=10, scaling=0.10, shift=0.07)
    tasks_per_step: int = 4
    images_per_task: int = 24
    expert_batch: int = 48
    betas: tuple[float, float] = (0.9, 0.98)
    gradient_clip: float = 1.0
    max_logit_scale: float = 30.0
    task_shares: dict[str, float] = field(
        default_factory=lambda: dict(
            zip(image.ALL8, (0.3, 0.6, 0.5, 0.2, 1.0, 1.0, 1.0, 1.2), strict=True)
        )
    )


class ClipBuilder(Builder):
    """Trains and measures the small CLIP: pretraining all of it, experts the vision tower."""

    TASKS = image.ALL8
    RECIPES: ClassVar = {"clip-vit-mini": Recipe()}
    SETS: ClassVar = {"TA6": image.TA6, "all8": image.ALL8, "alphabets2": image.ALPHABETS2}

    def __init__(self, *args: Any) -> None:
        """Load the processor."""
        super().__init__(*args)
        self.processor: Any = CLIPProcessor.from_pretrained(self.folder)
        self.test = PictureTest(self.processor)

    def initialise(self, model: CLIPModel) -> None:
        """Scale up the embeddings, because the usual scales barely learn at this size."""
        for name, parameter in model.named_parameters():
            for suffix, std in EMBEDDING_SCALES.items():
                if name.endswith(suffix):
                    nn.init.normal_(parameter, std=std)

    def pretrain(self, model: CLIPModel) -> None:
        """Train the whole model on plain pictures of all tasks."""
        recipe, generator = self.recipe, stage_generator(self.seed, "pretraining")
        tasks_per_step = min(recipe.tasks_per_step, len(self.tasks))
        count = recipe.images_per_task
        sets = [load_training_set(task) for task in self.tasks]
        prompts = [self._prompts(task) for task in self.tasks]
        shares = torch.tensor([recipe.task_shares[task] for task in self.tasks])

        def cap_logit_scale() -> None:
            model.logit_scale.data.clamp_(max=math.log(recipe.max_logit_scale))

        def next_scores() -> tuple[Tensor, float]:
            cap_logit_scale()
            chosen = torch.multinomial(shares, tasks_per_step, generator=generator).tolist()
            grey, labels = zip(*(draw(sets[i], count, generator) for i in chosen), strict=True)
            pixels = plain_pixels(augment(torch.cat(grey), recipe.pretraining, generator))
            embeddings = image_embeddings(model, pixels).split(count)
            logits = [
                model.logit_scale.exp() * pictures @ text_embeddings(model, prompts[i]).T
                for i, pictures in zip(chosen, embeddings, strict=True)
            ]
            losses, right = zip(*map(loss_and_accuracy, logits, labels), strict=True)
            return torch.stack(losses).mean(), sum(right) / len(right)

        self._train(model, recipe.pretraining, next_scores)
        cap_logit_scale()

    def finetune(self, model: CLIPModel, task: str) -> None:
        """Train the vision tower on the task's ink and paper."""
        recipe, generator = self.recipe, stage_generator(self.seed, task)
        data, colours = load_training_set(task), image.TASKS[task]
        with torch.no_grad():
            heads = model.logit_scale.exp() * text_embeddings(model, self._prompts(task))

        def next_scores() -> tuple[Tensor, float]:
            grey, labels = draw(data, recipe.expert_batch, generator)
            pixels = painted_pixels(augment(grey, recipe.finetuning, generator), colours)
            return loss_and_accuracy(image_embeddings(model, pixels) @ heads.T, labels)

        self._train(model.vision_model, recipe.finetuning, next_scores)

    def _train(self, trained: nn.Module, phase: Phase, next_scores: Any) -> None:
        optimiser = torch.optim.AdamW(
            trained.parameters(),
            lr=phase.learning_rate,
            betas=self.recipe.betas,
            weight_decay=phase.weight_decay,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, phase.rate)
        clip = self.recipe.gradient_clip
        train(optimiser, schedule, phase.steps, clip, next_scores, self.log)

    def expert_part(self, model: CLIPModel) -> tuple[dict[str, Tensor], Any, str]:
        """Return the vision tower, stored as a `CLIPVisionModel`."""
        # Tensors are named as all versions of transformers read them. From 5.6 on, a tower's own
        # `save_pretrained` leaves out the prefix, and older versions would then load nothing.
        tower = {f"vision_model.{name}": t for name, t in model.vision_model.state_dict().items()}
        return tower, model.config.vision_config, "CLIPVisionModel"

    @torch.no_grad()
    def accuracy(self, model: CLIPModel, task: str) -> float:
        """Return the share (0..1) of the task's test pictures that the model gets right."""
        heads = text_embeddings(model, self._prompts(task))
        return self.test(task, lambda pixels: image_embeddings(model, pixels) @ heads.T)

    def _prompts(self, task: str) -> dict[str, Tensor]:
        prompts = load_arrays(task).prompts()
        return dict(self.processor(text=prompts, padding=True, return_tensors="pt"))


def load_training_set(task: str) -> tuple[Tensor, Tensor]:
    """Return the train split of a task: grey float32 pictures in 0..1 `[n, 28, 28]`, labels."""
    grey, labels = load_arrays(task).rows("train")
    return torch.from_numpy(grey.astype(np.float32) / 255), torch.from_numpy(labels)


def draw(
    data: tuple[Tensor, Tensor], count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw pictures and labels with replacement."""
    grey, labels = data
    rows = torch.randint(len(labels), (count,), generator=generator)
    return grey[rows], labels[rows]


def augment(grey: Tensor, phase: Phase, generator: torch.Generator) -> Tensor:
    """Rotate, scale and shift each picture by a separate random affine map.

    Args:
        grey: Float32 `[n, height, width]` in 0..1, 0 outside the picture.
        phase: The largest turn, scaling and shift in either direction, drawn uniformly.
        generator: Source of randomness.

    Returns:
        Pictures of the same shape.
    """
    angle, scale, right, down = 2 * torch.rand(4, len(grey), generator=generator) - 1
    angle = angle * math.radians(phase.degrees)
    scale = 1 + scale * phase.scaling
    cos, sin = scale * angle.cos(), scale * angle.sin()
    # affine_grid measures in half sides of the picture
    rows = [cos, -sin, 2 * phase.shift * right, sin, cos, 2 * phase.shift * down]
    theta = torch.stack(rows, dim=1).view(-1, 2, 3)
    grid = F.affine_grid(theta, [len(grey), 1, *grey.shape[1:]], align_corners=False)
    return F.grid_sample(grey[:, None], grid, align_corners=False)[:, 0]


def plain_pixels(grey: Tensor) -> Tensor:
    """Turn grey pictures `[n, h, w]` in 0..1 into white-on-black model inputs `[n, 3, h, w]`."""
    return ((grey - PLAIN_MEAN) / PLAIN_STD)[:, None].expand(-1, 3, -1, -1)


def painted_pixels(grey: Tensor, task: ImageTask) -> Tensor:
    """Turn grey pictures `[n, h, w]` in 0..1 into the task's model inputs `[n, 3, h, w]`."""
    paper, ink = (torch.tensor(rgb)[None, :, None, None] / 255 for rgb in (task.paper, task.ink))
    share = grey[:, None]
    return (paper * (1 - share) + ink * share - PIXEL_MEAN) / PIXEL_STD


class PictureTest:
    """Test pictures as model inputs, and the share of them that a model gets right."""

    def __init__(self, processor: Any) -> None:
        """Start with no pictures read."""
        self._processor = processor
        self._read: dict[str, tuple[Tensor, Tensor]] = {}

    def __call__(self, task: str, logits: Callable[[Tensor], Tensor]) -> float:
        """Return the share (0..1) of the task's test pictures with the right largest logit."""
        if task not in self._read:
            data = image.load_split(task, "test")
            pixels = self._processor(images=[item["image"] for item in data], return_tensors="pt")
            self._read[task] = (
                pixels["pixel_values"],
                torch.tensor([item["label"] for item in data]),
            )
        pixels, labels = self._read[task]
        guesses = [logits(part).argmax(-1) for part in pixels.split(256)]
        return (torch.cat(guesses) == labels).double().mean().item()


def image_embeddings(model: CLIPModel, pixels: Tensor) -> Tensor:
    """Return unit-length image embeddings `[n, 64]` of `pixels` `[n, 3, 28, 28]`."""
    return F.normalize(model.visual_projection(model.vision_model(pixel_values=pixels)[1]), dim=-1)


def text_embeddings(model: CLIPModel, prompts: dict[str, Tensor]) -> Tensor:
    """Return unit-length text embeddings `[classes, 64]` of tokenised prompts."""
    return F.normalize(model.text_projection(model.text_model(**prompts)[1]), dim=-1)
