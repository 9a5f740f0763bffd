"""Training the small CLIP: a base on plain glyphs, then one expert a task in its own colours."""

import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

from fusion_bench_featcal.suites.clip_vocabulary import (
    BOS,
    EOS,
    IMAGE_SIZE,
    MAX_PROMPT_TOKENS,
    PIXEL_MEAN,
    PIXEL_STD,
)
from fusion_bench_featcal.suites.image import ImageTask, load_arrays

PLAIN_MEAN, PLAIN_STD = 0.2, 0.35
PATCH_SIZE = 7

Log = Callable[[str], None]


@dataclass(frozen=True)
class Phase:
    """Optimiser and augmentation of one phase; the latter in degrees and shares of the side."""

    steps: int
    learning_rate: float
    weight_decay: float
    warmup_steps: int
    degrees: float
    scaling: float
    shift: float


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
        default_factory=lambda: {
            "mini_mnist": 0.3,
            "mini_fashion_mnist": 0.6,
            "mini_notmnist": 0.5,
            "mini_optdigits": 0.2,
            "mini_latin": 1.0,
            "mini_greek": 1.0,
            "mini_balinese": 1.0,
            "mini_korean": 1.2,
        }
    )


def stage_generator(seed: int, stage: str) -> torch.Generator:
    """Return a generator of its own for each stage, so that stages do not depend on each other."""
    return torch.Generator().manual_seed(zlib.crc32(f"{seed}/{stage}".encode()))


def new_model(vocabulary: dict[str, int], seed: int) -> CLIPModel:
    """Return an untrained CLIP of 28 px, patch 7, 4 vision blocks of 192, 2 text blocks of 64.

    The usual initial scales barely learn at this size: token, patch and position embeddings start
    larger.
    """
    text = CLIPTextConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=MAX_PROMPT_TOKENS,
        projection_dim=64,
        bos_token_id=vocabulary[BOS],
        eos_token_id=vocabulary[EOS],
        pad_token_id=vocabulary[EOS],
    )
    vision = CLIPVisionConfig(
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
        projection_dim=64,
    )
    config = CLIPConfig(
        text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=64
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = CLIPModel(config)
        _rescale_embeddings(model)
    return model


def _rescale_embeddings(model: CLIPModel) -> None:
    scales = {
        "token_embedding.weight": 0.5,
        "position_embedding.weight": 0.5,
        "patch_embedding.weight": (3 * PATCH_SIZE**2) ** -0.5,
    }
    for name, parameter in model.named_parameters():
        for suffix, std in scales.items():
            if name.endswith(suffix):
                nn.init.normal_(parameter, std=std)


def augment(grey: Tensor, phase: Phase, generator: torch.Generator) -> Tensor:
    """Turn, scale and shift each picture by its own random affine map.

    Args:
        grey: float32 `[n, height, width]` in 0..1, 0 outside the picture.
        phase: the largest turn, scaling and shift; each is drawn evenly up to it, either way.
        generator: source of randomness.

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


def image_embeddings(model: CLIPModel, pixels: Tensor) -> Tensor:
    """Return unit-length image embeddings `[n, 64]` of `pixels` `[n, 3, 28, 28]`."""
    return F.normalize(model.visual_projection(model.vision_model(pixel_values=pixels)[1]), dim=-1)


def text_embeddings(model: CLIPModel, prompts: dict[str, Tensor]) -> Tensor:
    """Return unit-length text embeddings `[classes, 64]` of tokenised prompts."""
    return F.normalize(model.text_projection(model.text_model(**prompts)[1]), dim=-1)


@dataclass(frozen=True, eq=False)
class TrainingSet:
    """The train split of one task as grey float32 pictures in 0..1, labels, tokenised prompts."""

    name: str
    grey: Tensor
    labels: Tensor
    prompts: dict[str, Tensor]

    @classmethod
    def load(cls, name: str, processor: Callable[..., Any]) -> "TrainingSet":
        """Read the train split of a task and tokenise its prompts."""
        arrays = load_arrays(name)
        grey, labels = arrays.rows("train")
        prompts = processor(text=arrays.prompts(), padding=True, return_tensors="pt")
        pictures = torch.from_numpy(grey.astype(np.float32) / 255)
        return cls(name, pictures, torch.from_numpy(labels), dict(prompts))

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw pictures and labels with replacement."""
        rows = torch.randint(len(self.labels), (count,), generator=generator)
        return self.grey[rows], self.labels[rows]


def pretrain(
    model: CLIPModel, sets: dict[str, TrainingSet], recipe: Recipe, seed: int, log: Log
) -> None:
    """Train the whole model, in place, on plain pictures of all tasks."""
    generator = stage_generator(seed, "pretraining")
    names = list(sets)
    shares = torch.tensor([recipe.task_shares[name] for name in names])

    def loss_and_accuracy() -> tuple[Tensor, float]:
        drawn = torch.multinomial(shares, recipe.tasks_per_step, generator=generator).tolist()
        parts = [sets[names[i]].draw(recipe.images_per_task, generator) for i in drawn]
        grey = augment(torch.cat([part[0] for part in parts]), recipe.pretraining, generator)
        embeddings = image_embeddings(model, plain_pixels(grey)).split(recipe.images_per_task)
        results = []
        for i, (_, labels), pictures in zip(drawn, parts, embeddings, strict=True):
            heads = text_embeddings(model, sets[names[i]].prompts)
            logits = model.logit_scale.exp() * pictures @ heads.T
            results.append((F.cross_entropy(logits, labels), _accuracy(logits, labels)))
        losses, accuracies = zip(*results, strict=True)
        return torch.stack(losses).mean(), sum(accuracies) / len(accuracies)

    def cap_logit_scale() -> None:
        model.logit_scale.data.clamp_(max=math.log(recipe.max_logit_scale))

    _optimise(
        list(model.parameters()), recipe.pretraining, recipe, loss_and_accuracy,
        after_step=cap_logit_scale, log=log,
    )  # fmt: skip


def finetune(
    model: CLIPModel, task: ImageTask, data: TrainingSet, recipe: Recipe, seed: int, log: Log
) -> None:
    """Train the vision tower only, in place, on the task's own ink and paper."""
    generator = stage_generator(seed, task.name)
    with torch.no_grad():
        heads = model.logit_scale.exp() * text_embeddings(model, data.prompts)

    def loss_and_accuracy() -> tuple[Tensor, float]:
        grey, labels = data.draw(recipe.expert_batch, generator)
        pixels = painted_pixels(augment(grey, recipe.finetuning, generator), task)
        logits = image_embeddings(model, pixels) @ heads.T
        return F.cross_entropy(logits, labels), _accuracy(logits, labels)

    _optimise(
        list(model.vision_model.parameters()), recipe.finetuning, recipe, loss_and_accuracy,
        after_step=lambda: None, log=log,
    )  # fmt: skip


def _accuracy(logits: Tensor, labels: Tensor) -> float:
    return (logits.argmax(dim=-1) == labels).float().mean().item()


def _optimise(
    parameters: list[nn.Parameter],
    phase: Phase,
    recipe: Recipe,
    loss_and_accuracy: Callable[[], tuple[Tensor, float]],
    *,
    after_step: Callable[[], None],
    log: Log,
) -> None:
    optimiser = torch.optim.AdamW(
        parameters, lr=phase.learning_rate, betas=recipe.betas, weight_decay=phase.weight_decay
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _rate(step, phase))
    recent: list[float] = []
    for step in range(1, phase.steps + 1):
        loss, accuracy = loss_and_accuracy()
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, recipe.gradient_clip)
        optimiser.step()
        schedule.step()
        after_step()
        recent = [*recent[-99:], accuracy]
        if step % 100 == 0 or step == phase.steps:
            log(f"  step {step}/{phase.steps}: accuracy {_mean(recent):.3f} over the last steps")


def _rate(step: int, phase: Phase) -> float:
    """Linear warm-up to 1, then half a cosine to 0."""
    if step < phase.warmup_steps:
        return (step + 1) / phase.warmup_steps
    progress = (step - phase.warmup_steps) / max(1, phase.steps - phase.warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * progress))


def _mean(values: Iterable[float]) -> float:
    collected = list(values)
    return sum(collected) / len(collected)
