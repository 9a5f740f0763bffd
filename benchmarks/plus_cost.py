"""CPU seconds of FeatCal+ relative to the paper's calibration, on the same models and samples.

    python benchmarks/plus_cost.py --samples 64 --repeats 3 --against ../earlier

The bundled suites are merged by task arithmetic. A further suite has random models of the shape
of MiniLM. All calibrations of a suite take turns in one process with one thread, so that other load
affects all of them. Seconds are the least of the turns, and ratios the medians over the turns. With
`--against`, the same is run with an earlier version's checkout.
"""

import argparse
import copy
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fusion_bench_featcal.fusionbench.compat  # noqa: F401

# isort: split
import torch
from fusion_bench.utils import instantiate
from fusion_bench.utils.hydra_utils import get_default_config_path
from hydra import compose, initialize_config_dir
from torch import nn
from transformers import BertConfig, BertModel

from fusion_bench_featcal import FeatCalSettings, calibrate
from fusion_bench_featcal.fusionbench.inputs import MethodInputs

SUITES = {
    "images": "clip-vit-mini_TA6", "t5": "flan-t5-mini_TA6", "llama": "llama-mini_TA6",
    "resnet": "resnet-mini_TA3", "minilm": "",
}  # fmt: skip
SCALE, LENGTH = 0.3, 32
ROWS = ("paper", "FeatCal+ without copies", "FeatCal+")

Suite = tuple[nn.Module, Any, dict[str, Any], dict[str, Any]]
"""Merged model, base, experts and batches."""


def pool_suite(pool: str, settings: FeatCalSettings) -> Suite:
    """Return models and samples of a bundled suite."""
    with initialize_config_dir(str(get_default_config_path()), version_base=None):
        config = compose("fabric_model_fusion", overrides=[f"modelpool={pool}"])
    inputs = MethodInputs(
        instantiate(config.modelpool), None, SimpleNamespace(device=torch.device("cpu"))
    )
    models = {name: inputs.modelpool.load_model(name) for name in inputs.modelpool.all_model_names}
    base = models.pop("_pretrained_")
    batches = {task: list(part) for task, part in inputs.batches(settings).items()}
    return merged_of(base, list(models.values())), base, models, batches


def minilm_suite(settings: FeatCalSettings) -> Suite:
    """Return random models of MiniLM's shape: 6 blocks of width 384, 6 tasks."""
    torch.manual_seed(0)
    shape = BertConfig(
        hidden_size=384, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=12,
        vocab_size=1000,
    )  # fmt: skip
    base = BertModel(shape).eval()
    experts = {}
    for task in range(6):
        experts[f"task_{task}"] = expert = copy.deepcopy(base)
        for parameter in expert.parameters():
            parameter.data += 0.01 * torch.randn_like(parameter)
    size = settings.batch_size, LENGTH
    batches = {
        task: [
            {"input_ids": torch.randint(1000, size), "attention_mask": torch.ones(size).long()}
            for _ in range(settings.samples_per_task // settings.batch_size)
        ]
        for task in experts
    }
    return merged_of(base, list(experts.values())), base, experts, batches


def merged_of(base: nn.Module, experts: list[nn.Module]) -> nn.Module:
    """Merge by task arithmetic."""
    merged, states = copy.deepcopy(base), [expert.state_dict() for expert in experts]
    for name, value in merged.state_dict().items():
        if value.is_floating_point():
            value += SCALE * sum(state[name] - value.clone() for state in states)
    return merged.eval()


def timed(suite: str, samples: int, repeats: int) -> dict[str, list[float]]:
    """Return the CPU seconds of each turn of each calibration."""
    paper = FeatCalSettings(samples_per_task=samples)
    rows = {
        "paper": paper,
        "FeatCal+ without copies": FeatCalSettings.plus(samples_per_task=samples, augment=None),
        "FeatCal+": FeatCalSettings.plus(samples_per_task=samples),
    }
    models = minilm_suite(paper) if suite == "minilm" else pool_suite(SUITES[suite], paper)
    seconds: dict[str, list[float]] = {row: [] for row in rows}
    for _ in range(repeats):
        for row, settings in rows.items():
            start = time.process_time()
            calibrate(*models, settings, progress=False)
            seconds[row].append(time.process_time() - start)
    return seconds


def table(results: dict[str, dict[str, list[float]]], before: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield "| suite | calibration | CPU seconds | of the paper's | of the earlier version's |"
    yield "|---|---|--:|--:|--:|"
    for suite, seconds in results.items():
        for row, values in seconds.items():
            ratios = [one / paper for one, paper in zip(values, seconds["paper"], strict=True)]
            earlier = before.get(suite, {}).get(row)
            of_earlier = f"{min(values) / min(earlier):.2f}" if earlier else "-"
            yield (
                f"| {suite} | {row} | {min(values):.2f} | {statistics.median(ratios):.2f} | "
                f"{of_earlier} |"
            )


def main() -> None:
    """Print a Markdown table of seconds and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=list(SUITES))
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--against", type=Path, help="checkout of an earlier version")
    parser.add_argument("--json", action="store_true", help="print the seconds of each turn")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {suite: timed(suite, options.samples, options.repeats) for suite in options.suites}
    if options.json:
        print(json.dumps(results))
        return
    before = {}
    if options.against is not None:
        words = ["--suites", *options.suites, "--samples", str(options.samples), "--json"]
        command = [sys.executable, __file__, *words, "--repeats", str(options.repeats)]
        paths = {"PYTHONPATH": str(options.against.resolve())}
        done = subprocess.run(command, env=os.environ | paths, capture_output=True, check=True)
        before = json.loads(done.stdout.splitlines()[-1])
    print(f"torch {torch.__version__}, 1 thread, {platform.machine()}, n = {options.samples}\n")
    print("\n".join(table(results, before)))


if __name__ == "__main__":
    main()
