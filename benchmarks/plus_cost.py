"""CPU seconds of FeatCal+ relative to the paper's calibration.

    python benchmarks/plus_cost.py --samples 256 --repeats 3

Every calibration is of the same merged model (task arithmetic, six tasks of the bundled image
suite) on the same samples, in batches of 16, as the commands run them, in one process with one
thread. They take turns, so that other load affects all of them. Ratios are medians over the turns.
Held-out samples and a second calibration with drift weights are left out.
"""

import argparse
import copy
import platform
import statistics
import time
from typing import Any

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
import torch
from transformers import CLIPVisionModel

from fusion_bench_featcal import FeatCalSettings, calibrate
from fusion_bench_featcal.data.pictures import to_pixels
from fusion_bench_featcal.settings import PLUS
from fusion_bench_featcal.suites import image

SCALE, BATCH = 0.3, 16
ALONE: dict[str, Any] = {**PLUS, "held_out": 0, "task_weights": None}
ROWS: dict[str, dict[str, Any]] = {
    "paper": {},
    "FeatCal+ without copies": ALONE | {"augment": None},
    "FeatCal+": ALONE,
}


def pictures(task: str, samples: int) -> list[dict[str, torch.Tensor]]:
    """Return processed training pictures of a task, in batches."""
    items, processor = image.load_split(task, "train"), image.load_processor()
    chosen = torch.randperm(len(items), generator=torch.Generator().manual_seed(42))[:samples]
    processed = [to_pixels(items[int(n)]["image"], processor, task, None) for n in chosen]
    return [{"pixel_values": part} for part in torch.stack(processed).split(BATCH)]


def merged_of(base: torch.nn.Module, experts: list[torch.nn.Module]) -> torch.nn.Module:
    """Merge by task arithmetic."""
    merged, states = copy.deepcopy(base), [expert.state_dict() for expert in experts]
    start = base.state_dict()
    merged.load_state_dict(
        {
            name: value + SCALE * sum(state[name] - value for state in states)
            if value.is_floating_point()
            else value
            for name, value in start.items()
        }
    )
    return merged


def main() -> None:
    """Print a Markdown table of seconds and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    base = CLIPVisionModel.from_pretrained(image.path()).eval()
    experts = {task: CLIPVisionModel.from_pretrained(image.path(task)).eval() for task in image.TA6}
    merged = merged_of(base, list(experts.values()))
    batches = {task: pictures(task, options.samples) for task in experts}
    seconds: dict[str, list[float]] = {row: [] for row in ROWS}
    for _ in range(options.repeats):
        for row, changes in ROWS.items():
            settings = FeatCalSettings(samples_per_task=options.samples, **changes)
            start = time.process_time()
            calibrate(merged, base, experts, batches, settings, progress=False)
            seconds[row].append(time.process_time() - start)
    print(
        f"`python benchmarks/plus_cost.py --samples {options.samples} --repeats "
        f"{options.repeats}`: clip-vit-mini, {len(experts)} tasks, torch {torch.__version__}, "
        f"1 thread, {platform.machine()}\n"
    )
    print(
        "| calibration | CPU seconds | of the paper's (least and most of a turn) |\n|---|--:|--:|"
    )
    for row, values in seconds.items():
        ratios = [
            seconds_of_row / paper
            for seconds_of_row, paper in zip(values, seconds["paper"], strict=True)
        ]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(
            f"| {row} | {statistics.median(values):.1f} | "
            f"{statistics.median(ratios):.2f} ({spread}) |"
        )


if __name__ == "__main__":
    main()
