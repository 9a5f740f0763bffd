"""Choose the image suite's preset without test data: agreement with the experts on train images.

Every setting of the grid is calibrated on some of each task's train images; on other train images
of the same task the calibrated model's answers are compared with the expert's answers (no label is
read). The score is the mean agreement over the six tasks and both upstream mergers.

    python scripts/choose_preset.py --out docs/preset_choice.csv
"""

import argparse
import csv
import itertools
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import CLIPModel, CLIPVisionModel

from fusion_bench_featcal import FeatCalSettings, SafetensorsExpert, calibrate
from fusion_bench_featcal.suites import image

CALIBRATION_IMAGES = 200  # of each task; the smallest task has 336 train images
HELD_OUT_IMAGES = 256  # of each task, or what is left of its train split
SEED = 7  # another draw than any run's default
GRID = {
    "ridge_lambda": (1e-4, 1e-3, 1e-2, 5e-2),
    "anchor_rho": (1.0, 1.5, 2.0),
    "mix_alpha": (0.3, 0.6, 0.9),
}


def split_train_images(task: str, processor: object) -> tuple[Tensor, Tensor]:
    """Two disjoint draws from a task's train split, as pixels `[n, 3, 28, 28]`."""
    data = image.load_split(task, "train")
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(SEED)).tolist()
    chosen = order[: CALIBRATION_IMAGES + HELD_OUT_IMAGES]
    pictures = [data[index]["image"] for index in chosen]
    pixels = processor(images=pictures, return_tensors="pt")["pixel_values"]  # type: ignore[operator]
    return pixels[:CALIBRATION_IMAGES], pixels[CALIBRATION_IMAGES:]


def class_embeddings(clip: CLIPModel, processor: object, task: str) -> Tensor:
    """The zero-shot head of a task, `[classes, projection]`."""
    words = processor(text=image.load_arrays(task).prompts(), return_tensors="pt", padding=True)  # type: ignore[operator]
    features = clip.text_projection(clip.text_model(**words).pooler_output)
    return nn.functional.normalize(features, dim=-1)


def answers(tower: nn.Module, clip: CLIPModel, head: Tensor, pixels: Tensor) -> Tensor:
    """The class that a vision tower chooses for each picture, `[n]`."""
    features = clip.visual_projection(tower(pixel_values=pixels).pooler_output)
    return (features @ head.T).argmax(dim=-1)  # the picture's norm changes no argmax


def merge(
    base: CLIPVisionModel, experts: dict[str, CLIPVisionModel], scale: float
) -> CLIPVisionModel:
    """`base + scale * sum(expert - base)`: task arithmetic, or the average at 1/T."""
    merged = CLIPVisionModel(base.config)
    weights = {
        name: value + scale * sum(e.state_dict()[name] - value for e in experts.values())
        for name, value in base.state_dict().items()
    }
    merged.load_state_dict(weights)
    return merged.eval()


def grid() -> Iterator[dict[str, float]]:
    """Every combination of the grid's values."""
    for values in itertools.product(*GRID.values()):
        yield dict(zip(GRID, values, strict=True))


@torch.no_grad()
def score_grid() -> list[dict[str, float]]:
    """Mean agreement with the experts of every setting, best first."""
    processor = image.load_processor()
    clip = CLIPModel.from_pretrained(image.path()).eval()
    base = CLIPVisionModel.from_pretrained(image.path()).eval()
    experts = {t: CLIPVisionModel.from_pretrained(image.path(t)).eval() for t in image.TA6}
    pixels = {task: split_train_images(task, processor) for task in image.TA6}
    heads = {task: class_embeddings(clip, processor, task) for task in image.TA6}
    wanted = {t: answers(experts[t], clip, heads[t], pixels[t][1]) for t in image.TA6}
    merged = {
        "simple_average": merge(base, experts, 1 / len(experts)),
        "task_arithmetic": merge(base, experts, 0.3),
    }

    def agreement(model: nn.Module) -> float:
        hits = [
            (answers(model, clip, heads[t], pixels[t][1]) == wanted[t]).double().mean()
            for t in image.TA6
        ]
        return float(torch.stack(hits).mean())

    sources = {task: SafetensorsExpert(image.path(task)) for task in image.TA6}
    batches = {task: pixels[task][0].split(64) for task in image.TA6}
    rows = []
    for point in grid():
        common = FeatCalSettings(samples_per_task=CALIBRATION_IMAGES, log_drift=False)
        settings = common.replace(**point)
        row = dict(point)
        for name, model in merged.items():
            result = calibrate(model, base, sources, batches, settings, progress=False)
            row[name] = round(agreement(result.model), 4)
        row["mean"] = round((row["simple_average"] + row["task_arithmetic"]) / 2, 4)
        rows.append(row)
        print(row, flush=True)
    return sorted(rows, key=lambda row: -row["mean"])


def main() -> None:
    """Score the grid and write it, best first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    rows = score_grid()
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"best: {rows[0]}")


if __name__ == "__main__":
    main()
