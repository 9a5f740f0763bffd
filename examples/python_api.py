"""FeatCal+ in Python, without FusionBench: the bundled small CLIP, merged, calibrated, evaluated.

python examples/python_api.py
"""

import argparse
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import CLIPModel, CLIPProcessor, CLIPVisionModel

from fusion_bench_featcal import SafetensorsExpert, calibrate
from fusion_bench_featcal.suites import image

TASKS = image.TA6
PROCESSOR: Any = CLIPProcessor.from_pretrained(image.path())


def load(name: str) -> CLIPVisionModel:
    """Load a vision model of the suite: `pretrained`, or a task's expert."""
    return CLIPVisionModel.from_pretrained(image.path(name), dtype=torch.float32).eval()


def merge(base: CLIPVisionModel, scale: float = 0.3) -> CLIPVisionModel:
    """Merge by task arithmetic: the base plus the scaled sum of the experts' changes."""
    merged, base_weights = load("pretrained"), base.state_dict()
    with torch.no_grad():
        for task in TASKS:
            expert = load(task).state_dict()
            for name, parameter in merged.named_parameters():
                parameter += scale * (expert[name] - base_weights[name])
    return merged


def pixels(task: str, split: str, count: int) -> tuple[Tensor, Tensor]:
    """Draw processed images `[count, 3, 28, 28]` and labels `[count]` with a seed."""
    items = image.load_split(task, split)
    indices = torch.randperm(len(items), generator=torch.Generator().manual_seed(0))[:count]
    chosen_items = [items[index] for index in indices.tolist()]
    prepared = PROCESSOR(images=[item["image"] for item in chosen_items], return_tensors="pt")
    return prepared["pixel_values"], torch.tensor([item["label"] for item in chosen_items])


@torch.no_grad()
def accuracy(model: torch.nn.Module, clip: CLIPModel, task: str, count: int) -> float:
    """Return the share of `count` test images whose nearest prompt is that of their class."""
    images, labels = pixels(task, "test", count)
    prompts = PROCESSOR(text=image.load_arrays(task).prompts(), return_tensors="pt", padding=True)
    texts = clip.text_projection(clip.text_model(**prompts).pooler_output)
    features = clip.visual_projection(model(images).pooler_output)
    nearest = (normalize(features, dim=-1) @ normalize(texts, dim=-1).T).argmax(dim=-1)
    return (nearest == labels).float().mean().item()


def main(samples: int, test_images: int) -> dict[str, list[float]]:
    """Print and return each task's accuracy before and after calibration."""
    base = load("pretrained")
    merged = merge(base)
    result = calibrate(
        merged,
        base,
        experts={task: SafetensorsExpert(image.path(task)) for task in TASKS},
        # Any iterables of model inputs, without labels.
        batches={
            task: [{"pixel_values": part} for part in pixels(task, "train", samples)[0].split(64)]
            for task in TASKS
        },
    )
    clip = CLIPModel.from_pretrained(image.path(), dtype=torch.float32).eval()
    print(f"{'accuracy, %':20} {'merged':>8} {'FeatCal+':>8}")
    table = {}
    for task in TASKS:
        table[task] = [accuracy(m, clip, task, test_images) for m in (merged, result.model)]
        print(f"{task:20} {100 * table[task][0]:8.1f} {100 * table[task][1]:8.1f}")
    means = torch.tensor(list(table.values())).mean(dim=0).tolist()
    print(f"{'average':20} {100 * means[0]:8.1f} {100 * means[1]:8.1f}")
    # result.model.save_pretrained("calibrated"); result.log.write("calibration_log.jsonl")
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=256, help="calibration images per task")
    parser.add_argument("--test-images", type=int, default=1000, help="test images per task")
    arguments = parser.parse_args()
    main(arguments.samples, arguments.test_images)
