"""Fine-tune the vision tower of a CLIP on a folder of images per class, with a fixed text tower.

    python train_expert.py my_alphabet/train my_alphabet/expert my_alphabet/test

starts from the bundled base and prints the accuracies of base and expert on the last folder, which
is optional. For another task change the constants.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from transformers import CLIPModel, CLIPProcessor, CLIPVisionModel

from fusion_bench_featcal.suites import image

BASE = image.path()  # the base of all your experts: a folder or a hub id
PROMPT = "a drawing of the {}"  # as `templates` of the task
STEPS, BATCH, LEARNING_RATE = 200, 32, 3e-4  # a ViT-B/32 on photographs: rather 4000, 128, 1e-5


def augmented(pixels: Tensor) -> Tensor:
    """Turn, scale and shift each image a little, against overfitting."""
    angle, scale, right, down = 0.15 * (2 * torch.rand(4, len(pixels)) - 1)
    cos, sin = (1 + scale) * angle.cos(), (1 + scale) * angle.sin()
    maps = torch.stack([cos, -sin, right, sin, cos, down], dim=1).view(-1, 2, 3)
    grid = F.affine_grid(maps, list(pixels.shape), align_corners=False)
    return F.grid_sample(pixels, grid, padding_mode="border", align_corners=False)


def load(folder: Path, processor: Any, classes: list[str]) -> tuple[Tensor, Tensor]:
    """Return pixels and labels of the images in `folder`, which has a folder per class."""
    files = sorted(folder.glob("*/*"))
    unknown = sorted({file.parent.name for file in files} - set(classes))
    if unknown or not files:
        problem = f"no training images of {', '.join(unknown)}" if unknown else "no images"
        sys.exit(f"{folder}: {problem}; expected a folder of images for each class")
    pictures = [Image.open(file).convert("RGB") for file in files]
    labels = torch.tensor([classes.index(file.parent.name) for file in files])
    return processor(images=pictures, return_tensors="pt")["pixel_values"], labels


def logits(clip: Any, tower: Any, pixels: Tensor, head: Tensor) -> Tensor:
    """Return scores `[images, classes]`."""
    return F.normalize(clip.visual_projection(tower(pixels).pooler_output), dim=-1) @ head.T


def accuracy(clip: Any, tower: Any, head: Tensor, pixels: Tensor, labels: Tensor) -> float:
    """Return the accuracy in percent."""
    with torch.no_grad():
        predictions = torch.cat(
            [logits(clip, tower, p, head).argmax(1) for p in pixels.split(BATCH)]
        )
    return 100 * (predictions == labels).float().mean().item()


def train(images: Path, expert: Path, test: Path | None = None) -> None:
    """Train a vision tower on a folder of images per class, and save it to `expert`."""
    torch.manual_seed(42)
    processor: Any = CLIPProcessor.from_pretrained(BASE)
    clip: Any = CLIPModel.from_pretrained(BASE)
    tower: Any = CLIPVisionModel.from_pretrained(BASE)
    classes = sorted(path.name for path in images.iterdir())
    pixels, labels = load(images, processor, classes)
    test_set = load(test, processor, classes) if test else None
    prompts = processor(text=[PROMPT.format(c) for c in classes], padding=True, return_tensors="pt")
    with torch.no_grad():  # the zero-shot head, one embedding per class, which is not trained
        embeddings = clip.text_projection(clip.text_model(**prompts).pooler_output)
        head = clip.logit_scale.exp() * F.normalize(embeddings, dim=-1)
    optimizer = torch.optim.AdamW(tower.parameters(), lr=LEARNING_RATE, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for step in range(1, STEPS + 1):
        rows = torch.randint(len(labels), (BATCH,))
        loss = F.cross_entropy(logits(clip, tower, augmented(pixels[rows]), head), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step} of {STEPS}: loss {loss.item():.2f}")
    tower.save_pretrained(expert)
    if test_set:
        for name, folder in (("base", BASE), ("expert", expert)):
            saved = CLIPVisionModel.from_pretrained(folder)
            print(f"{name}: {accuracy(clip, saved, head, *test_set):.1f} % of {test} right")


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit("usage: train_expert.py IMAGES EXPERT [TEST] (TEST: images as in IMAGES)")
    train(*map(Path, sys.argv[1:]))
