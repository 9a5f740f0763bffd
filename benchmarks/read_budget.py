"""Loss of accuracy when not all of the experts' weights may be read.

    python benchmarks/read_budget.py [--samples 32] [--test 300] [--budgets 75 50 25]

The bundled image suite's six experts, on two merged models and with two settings (the paper's, and
a smaller lambda without a base). A budget is spent on modules in forward order; where it ends, the
merged model's weights stand in. Scores: agreement with the experts on train images that were not
calibrated on, and the share of the merged-to-expert gap that is recovered on the test images, both
as a mean over mergers and settings. `none` is a full read.

Last the seconds of budgeted runs: four experts with three blocks of ViT-B/32's width and random
weights, whose files the system has to read from the disk.
"""

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CLIPModel, CLIPVisionConfig, CLIPVisionModel

from fusion_bench_featcal import FeatCalSettings, SafetensorsExpert, calibrate
from fusion_bench_featcal.experts.safetensors_files import safetensors_files
from fusion_bench_featcal.suites import image

SEED = 7  # another draw than any run's default
HELD_OUT_IMAGES = 100  # of each task
SETTINGS = {
    "paper": {"ridge_lambda": 0.05, "mix_alpha": 0.3, "anchor_rho": 2.0},
    "preset": {"ridge_lambda": 1e-4, "mix_alpha": 0.3, "anchor_rho": 1.0},
}
SCALES = {"simple_average": 1 / len(image.TA6), "task_arithmetic": 0.3}


@dataclass
class Suite:
    """The bundled suite, loaded.

    Attributes:
        base: The base.
        clip: The model whose projection the heads belong to.
        merged: Upstream merger -> merged model.
        merged_score: Upstream merger -> its mean test accuracy.
        pixels: Task -> images to calibrate on.
        sets: Name of a test -> task -> images and the right answers.
        heads: Task -> class embeddings.
        expert_score: Mean test accuracy of the experts, each on its own task.
    """

    base: CLIPVisionModel
    clip: CLIPModel
    merged: dict[str, CLIPVisionModel] = field(default_factory=dict)
    merged_score: dict[str, float] = field(default_factory=dict)
    pixels: dict[str, Tensor] = field(default_factory=dict)
    sets: dict[str, dict[str, tuple[Tensor, Tensor]]] = field(
        default_factory=lambda: {"held out": {}, "test": {}}
    )
    heads: dict[str, Tensor] = field(default_factory=dict)
    expert_score: float = 0.0


def pixels_of(task: str, split: str, indices: Any = None) -> tuple[Tensor, Tensor]:
    """Images of a split, `[n, 3, 28, 28]`, and their labels."""
    data = image.load_split(task, split)
    items = [data[int(i)] for i in (range(len(data)) if indices is None else indices)]
    processor: Any = image.load_processor()
    found = processor(images=[item["image"] for item in items], return_tensors="pt")
    return found["pixel_values"], torch.tensor([item["label"] for item in items])


def load_suite(samples: int, test: int) -> Suite:
    """Load models and images; answers on train images are the experts' own."""
    clip = CLIPModel.from_pretrained(image.path()).eval()
    base = CLIPVisionModel.from_pretrained(image.path()).eval()
    experts = {t: CLIPVisionModel.from_pretrained(image.path(t)).eval() for t in image.TA6}
    suite = Suite(base, clip)
    processor: Any = image.load_processor()
    for task in image.TA6:
        words = processor(text=image.load_arrays(task).prompts(), return_tensors="pt", padding=True)
        features = clip.text_projection(clip.text_model(**words).pooler_output)
        suite.heads[task] = nn.functional.normalize(features, dim=-1)
        count = len(image.load_split(task, "train"))
        order = torch.randperm(count, generator=torch.Generator().manual_seed(SEED))
        chosen = order[: samples + HELD_OUT_IMAGES].tolist()
        pixels, _ = pixels_of(task, "train", chosen)
        suite.pixels[task] = pixels[:samples]
        held_out = pixels[samples:]
        answers = choose(suite, experts[task], task, held_out)
        suite.sets["held out"][task] = (held_out, answers)
        suite.sets["test"][task] = pixels_of(task, "test", range(min(test, test_size(task))))
    suite.expert_score = score(suite, "test", experts.__getitem__)
    for name, scale in SCALES.items():
        suite.merged[name] = merge(base, experts, scale)
        suite.merged_score[name] = score(suite, "test", lambda _, n=name: suite.merged[n])
    return suite


def test_size(task: str) -> int:
    """Number of test images."""
    return len(image.load_split(task, "test"))


def merge(base: Any, experts: dict[str, Any], scale: float) -> CLIPVisionModel:
    """`base + scale * sum(expert - base)`: task arithmetic, or the average at 1/T."""
    merged = CLIPVisionModel(base.config)
    states = [expert.state_dict() for expert in experts.values()]
    merged.load_state_dict(
        {n: v + scale * sum(state[n] - v for state in states) for n, v in base.state_dict().items()}
    )
    return merged.eval()


def choose(suite: Suite, tower: nn.Module, task: str, pixels: Tensor) -> Tensor:
    """The class that a vision tower chooses for each picture, `[n]`."""
    parts = [tower(pixel_values=part).pooler_output for part in pixels.split(256)]
    features = suite.clip.visual_projection(torch.cat(parts))
    return (features @ suite.heads[task].T).argmax(dim=-1)


def score(suite: Suite, which: str, tower_of: Callable[[str], nn.Module]) -> float:
    """Mean share of right answers over the tasks."""
    hits = [
        (choose(suite, tower_of(task), task, pixels) == wanted).double().mean()
        for task, (pixels, wanted) in suite.sets[which].items()
    ]
    return float(torch.stack(hits).mean())


def calibrated(suite: Suite, merger: str, settings: FeatCalSettings) -> tuple[nn.Module, float]:
    """The calibrated model, and the share of a full read that was read."""
    sources = {task: SafetensorsExpert(image.path(task)) for task in image.TA6}
    batches = {task: pixels.split(32) for task, pixels in suite.pixels.items()}
    merged = suite.merged[merger]
    result = calibrate(merged, suite.base, sources, batches, settings, progress=False)
    read = result.reads["totals"]["experts_read"]
    limit = result.reads["plan"]["limit"]
    assert limit is None or read <= limit
    return result.model, read / result.reads["plan"]["full"]


def row(suite: Suite, budget: str | None) -> Iterator[dict[str, float]]:
    """Scores under one budget, for each merger and setting."""
    for merger in SCALES:
        for values in SETTINGS.values():
            settings = FeatCalSettings(
                samples_per_task=len(next(iter(suite.pixels.values()))),
                log_drift=False,
                expert_read_budget=budget,
                **values,  # type: ignore[arg-type]
            )
            model, read = calibrated(suite, merger, settings)
            test = score(suite, "test", lambda _, model=model: model)
            merged = suite.merged_score[merger]
            yield {
                "read": read,
                "held out": score(suite, "held out", lambda _, model=model: model),
                "test": test,
                "recovered": (test - merged) / (suite.expert_score - merged),
            }


def accuracies(suite: Suite, budgets: Sequence[int]) -> None:
    """Print one line a budget."""
    print("| budget | read | agreement, held out | test accuracy | gap recovered |")
    print("|---|--:|--:|--:|--:|")
    for budget in [None, *(f"{budget}%" for budget in budgets)]:
        found = list(row(suite, budget))
        means = {key: sum(r[key] for r in found) / len(found) for key in found[0]}
        print(
            f"| {budget or 'none'} | {means['read']:.1%} | {means['held out']:.4f} "
            f"| {means['test']:.4f} | {means['recovered']:.1%} |",
            flush=True,
        )


def forget(path: Path) -> None:
    """Have the system drop a checkpoint's files from its memory."""
    for file in safetensors_files(path):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds(budgets: Sequence[int], folder: Path, repetitions: int = 3, tasks: int = 4) -> None:
    """Print the seconds of calibrations under a budget, the fastest of some."""
    torch.manual_seed(SEED)
    config = CLIPVisionConfig(num_hidden_layers=3)
    base = CLIPVisionModel(config).eval()
    for task in range(tasks):
        torch.manual_seed(task)
        CLIPVisionModel(config).save_pretrained(folder / f"task-{task}")
    names = [f"task-{task}" for task in range(tasks)]
    batches = {name: [torch.randn(2, 3, 224, 224)] for name in names}
    taken: dict[str | None, list[float]] = {}
    read: dict[str | None, int] = {}
    for _ in range(repetitions):
        for budget in [None, *(f"{budget}%" for budget in budgets)]:
            for name in names:
                forget(folder / name)
            settings = FeatCalSettings(
                samples_per_task=2, log_drift=False, expert_read_budget=budget
            )
            sources = {name: SafetensorsExpert(folder / name) for name in names}
            start = time.perf_counter()
            result = calibrate(base, base, sources, batches, settings, progress=False)
            taken.setdefault(budget, []).append(time.perf_counter() - start)
            read[budget] = result.reads["totals"]["experts_read"]
    print("| budget | read | seconds | of a full read |")
    print("|---|--:|--:|--:|")
    whole = min(taken[None])
    for budget, found in taken.items():
        fastest = min(found)
        size = f"{read[budget] / 1e9:.2f} GB"
        print(f"| {budget or 'none'} | {size} | {fastest:.1f} | {fastest / whole:.2f} |")


@torch.no_grad()
def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--test", type=int, default=300, help="test images of a task, at most")
    parser.add_argument("--budgets", type=int, nargs="+", default=[75, 50, 25])
    options = parser.parse_args()
    suite = load_suite(options.samples, options.test)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    merged = ", ".join(f"{name} {value:.4f}" for name, value in suite.merged_score.items())
    print(f"{options.samples} samples and at most {options.test} test images a task;")
    print(f"on the test images: experts {suite.expert_score:.4f}, {merged}\n")
    with tempfile.TemporaryDirectory() as folder:
        accuracies(suite, options.budgets)
        print("\nSeconds of calibrating, three blocks of ViT-B/32's width, four experts\n")
        seconds(options.budgets, Path(folder))


if __name__ == "__main__":
    main()
