"""Distillation's learning rate, chosen without labels or test data on the bundled image suite.

    python benchmarks/distillation_rate.py --out benchmarks/results/distillation_rate.md

Every rate trains the same merged model (task arithmetic) on the same images of each task; the score
is the cosine of final features to the expert's on other train images of the same draw, averaged
over images and tasks.
"""

import argparse
import copy
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import CLIPVisionModel

from fusion_bench_featcal import FeatCalSettings
from fusion_bench_featcal.calibration_data import draw_samples
from fusion_bench_featcal.methods.distillation import Distillation, Lesson
from fusion_bench_featcal.progress import progress_bar
from fusion_bench_featcal.suites import image

SCALE = 0.3
HELD_OUT = 64
RATES = (1e-4, 3e-4, 1e-3, 3e-3)


def drawn(task: str, samples: int, seed: int) -> Tensor:
    """Pixels of a task's train images, `[samples + HELD_OUT, 3, 28, 28]`: a run's, then others."""
    data = image.load_split(task, "train")
    settings = FeatCalSettings(samples_per_task=samples + HELD_OUT, seed=seed)
    pictures = [data[index]["image"] for index in draw_samples(len(data), task, settings)]
    return image.load_processor()(images=pictures, return_tensors="pt")["pixel_values"]


@torch.no_grad()
def features(model: nn.Module, pixels: Tensor) -> Tensor:
    """A vision tower's final features, `[n, d]`."""
    return model(pixel_values=pixels).pooler_output


def merge(base: nn.Module, experts: list[nn.Module]) -> nn.Module:
    """Task arithmetic."""
    merged = copy.deepcopy(base)
    with torch.no_grad():
        for name, value in merged.named_parameters():
            value += SCALE * sum(expert.get_parameter(name) - value for expert in experts)
    return merged


def tower(name: str = "pretrained") -> nn.Module:
    """One of the suite's models, float32 and frozen."""
    return CLIPVisionModel.from_pretrained(image.path(name)).float().eval().requires_grad_(False)


def main() -> None:
    """Train with every rate and write the scores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    experts = {task: tower(task) for task in image.TA6}
    merged = merge(tower(), list(experts.values()))
    pixels = {task: drawn(task, options.samples, options.seed) for task in experts}
    wanted = {task: features(expert, pixels[task]) for task, expert in experts.items()}
    used = slice(options.samples)
    lessons = {
        task: [
            Lesson({"pixel_values": part}, None, target)
            for part, target in zip(
                pixels[task][used].split(16), wanted[task][used].split(16), strict=True
            )
        ]
        for task in experts
    }

    def cosine(model: nn.Module) -> float:
        other = slice(options.samples, None)
        found = [
            functional.cosine_similarity(features(model, pixels[task][other]), target[other])
            for task, target in wanted.items()
        ]
        return float(torch.stack([part.mean() for part in found]).mean())

    lines = [f"| merged | {cosine(merged):.4f} | - |"]
    trained = [name for name, _ in merged.named_parameters() if ".layers." in name]
    for rate in progress_bar(options.rates, what="rates: "):
        model, start = copy.deepcopy(merged), time.process_time()
        method = Distillation(learning_rate=rate, steps=options.steps, seed=options.seed)
        method.train(model, trained, lessons)
        lines.append(f"| {rate:g} | {cosine(model):.4f} | {time.process_time() - start:.0f} |")
    text = "\n".join(
        [
            f"`python benchmarks/distillation_rate.py`: clip-vit-mini_TA6, task arithmetic "
            f"({SCALE}), {options.samples} images a task, {options.steps} steps, cosine on "
            f"{HELD_OUT} other train images a task; torch {torch.__version__}, "
            f"{os.environ.get('OMP_NUM_THREADS', torch.get_num_threads())} thread",
            "",
            "| learning rate | held-out cosine | CPU seconds |",
            "|--:|--:|--:|",
            *lines,
        ]
    )
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
