"""Choose the image suite's preset without test data or labels: by final features of train images.

Every setting of the grid is calibrated on some of each task's train images; on other train images
of the same task the calibrated model's final features are compared with the expert's. The score is
their mean cosine over the six tasks and both upstream mergers, as `method.trials` has it.

    python scripts/choose_preset.py --out docs/preset_choice.csv
"""

import argparse
import csv
import itertools
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import CLIPVisionModel

from fusion_bench_featcal import FeatCalSettings, SafetensorsExpert, calibrate
from fusion_bench_featcal.suites import image
from fusion_bench_featcal.trials import Agreement

CALIBRATION_IMAGES = 200  # of each task; the smallest task has 336 train images
HELD_OUT_IMAGES = 128  # of each task
SEED = 7  # another draw than any run's default
GRID = {
    "ridge_lambda": (1e-4, 1e-3, 1e-2, 5e-2),
    "anchor_rho": (1.0, 1.5, 2.0),
    "mix_alpha": (0.3, 0.6, 0.9),
}


def train_images(task: str, processor: object) -> Tensor:
    """A draw from a task's train split, as pixels `[n, 3, 28, 28]`."""
    data = image.load_split(task, "train")
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(SEED)).tolist()
    pictures = [data[index]["image"] for index in order[: CALIBRATION_IMAGES + HELD_OUT_IMAGES]]
    return processor(images=pictures, return_tensors="pt")["pixel_values"]  # type: ignore[operator]


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
    """Mean cosine to the experts of every setting, best first."""
    processor = image.load_processor()
    base = CLIPVisionModel.from_pretrained(image.path()).eval()
    experts = {t: CLIPVisionModel.from_pretrained(image.path(t)).eval() for t in image.TA6}
    merged = {
        "simple_average": merge(base, experts, 1 / len(experts)),
        "task_arithmetic": merge(base, experts, 0.3),
    }
    sources = {task: SafetensorsExpert(image.path(task)) for task in image.TA6}
    batches = {task: train_images(task, processor).split(50) for task in image.TA6}
    common = FeatCalSettings(
        samples_per_task=CALIBRATION_IMAGES + HELD_OUT_IMAGES, held_out=HELD_OUT_IMAGES
    )
    rows = []
    for point in grid():
        row = dict(point)
        for name, model in merged.items():
            settings = common.replace(**point)
            result = calibrate(model, base, sources, batches, settings, progress=False)
            row[name] = round(Agreement.of(result.log).mean, 5)
        row["mean"] = round((row["simple_average"] + row["task_arithmetic"]) / 2, 5)
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
