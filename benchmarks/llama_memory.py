"""Check the promised memory limit for a language model with five experts on disk.

    python benchmarks/llama_memory.py [--blocks 4] [--width 1024] [--samples 32] [--tokens 32]

Random Llama-shaped models are written to a temporary folder as shards, and calibrated by a second
process that starts with the merged model in memory. The promise: above that, the resident set stays
below one more copy of the model (the calibrated one), the samples' activations, and two blocks'
weights for each expert and three more. Pages of mapped files count as resident, as the kernel
counts them. Needs about 2 GB of disk.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from fusion_bench_featcal import FeatCalSettings, SafetensorsExpert, calibrate
from fusion_bench_featcal.results.cost import measure

TASKS = [f"task_{index}" for index in range(5)]
BATCH = 8
VOCABULARY = 4000
MB = 1e6


def config_of(options: argparse.Namespace) -> LlamaConfig:
    """A Llama with grouped heads whose MLP is 3.5 times as wide, as in Llama 3."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.width,
        intermediate_size=options.width * 7 // 2,
        num_hidden_layers=options.blocks,
        num_attention_heads=options.width // 64,
        num_key_value_heads=options.width // 256,
        max_position_embeddings=options.tokens,
        tie_word_embeddings=True,
    )


def write_models(folder: Path, options: argparse.Namespace) -> None:
    """Save a base, five experts around it and their task arithmetic, in shards, one at a time."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(config_of(options))
    model.save_pretrained(folder / "base", max_shard_size="64MB")
    base = {name: value.clone() for name, value in model.state_dict().items()}
    merged = {name: value.clone() for name, value in base.items()}
    for task in TASKS:
        with torch.no_grad():
            for name, value in model.named_parameters():
                step = 0.01 * torch.randn_like(value)
                value.copy_(base[name] + step)
                merged[name] += 0.3 * step
        model.save_pretrained(folder / task, max_shard_size="64MB")
    merged["lm_head.weight"] = merged["model.embed_tokens.weight"]
    model.load_state_dict(merged)
    model.save_pretrained(folder / "merged", max_shard_size="64MB")


def load_merged(folder: Path) -> nn.Module:
    """Return the merged model in allocated memory, because mapped files would hide its size."""
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder / "merged"))
    with torch.no_grad():
        for shard in sorted((folder / "merged").glob("*.safetensors")):
            for name, value in load_file(shard).items():
                model.get_parameter(name).copy_(value)
    return model


def batches(task: str, options: argparse.Namespace) -> Iterator[dict[str, Tensor]]:
    """Return random sentences of one length."""
    generator = torch.Generator().manual_seed(TASKS.index(task))
    for start in range(0, options.samples, BATCH):
        shape = (min(BATCH, options.samples - start), options.tokens)
        ids = torch.randint(VOCABULARY, shape, generator=generator)
        yield {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def promised(model: Any, options: argparse.Namespace) -> dict[str, float]:
    """Return the components of the promise, in bytes."""
    width, hidden = model.config.hidden_size, model.config.intermediate_size
    block = sum(p.numel() * p.element_size() for p in model.model.layers[0].parameters())
    rows = BATCH * options.tokens * 4
    features = (
        3 * len(TASKS) * options.samples * options.tokens * width * 4
    )  # cal, expert, next expert
    passing = 2 * rows * (6 * width + 3 * hidden)  # one batch in a block, recorded on both sides
    return {
        "block": block,
        "blocks": 2 * block * (len(TASKS) + 3),
        "activations": features + passing,
        "model": sum(p.numel() * p.element_size() for p in model.parameters()),
    }


def warm_up(settings: FeatCalSettings) -> None:
    """Run a tiny calibration, so that lazily imported modules are resident before measuring."""
    small = argparse.Namespace(blocks=1, width=256, samples=settings.samples_per_task, tokens=4)
    model = LlamaForCausalLM(config_of(small))
    data = {task: batches(task, small) for task in TASKS}
    calibrate(model, model, dict.fromkeys(TASKS, model), data, settings, progress=False)


def measured(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Calibrate, and return the rise of the resident set above its level with the merged model."""
    settings = FeatCalSettings(
        ridge_lambda=1e-2,
        mix_alpha=0.15,
        anchor_rho=0.5,
        samples_per_task=options.samples,
        calibrate_norm=False,
    )
    warm_up(settings)
    merged = load_merged(folder)
    sources = {task: SafetensorsExpert(folder / task) for task in TASKS}
    before = psutil.Process().memory_info().rss
    with measure() as cost:
        calibrate(
            merged,
            SafetensorsExpert(folder / "base"),
            sources,
            {task: batches(task, options) for task in TASKS},
            settings,
            progress=False,
        )
    assert isinstance(cost.peak_rss_bytes, int)
    assert isinstance(cost.seconds, float)
    rise = cost.peak_rss_bytes - before
    return {**promised(merged, options), "rise": rise, "before": before, "seconds": cost.seconds}


def main() -> None:
    """Print promised and measured memory, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {"blocks": 4, "width": 1024, "samples": 32, "tokens": 32}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measured(Path(options.measure), options)))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder), options)
        again = [sys.executable, __file__, *sys.argv[1:], "--measure", folder]
        done = subprocess.run(again, check=True, stdout=subprocess.PIPE, text=True)
    result = json.loads(done.stdout.splitlines()[-1])
    limit = result["blocks"] + result["activations"] + result["model"]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    print(
        f"{options.blocks} blocks of {result['block'] / MB:.1f} MB, {len(TASKS)} experts on disk;"
    )
    print(f"resident before: {result['before'] / MB:.0f} MB, {result['seconds']:.0f} s\n")
    print("| MB | promised | measured | ratio |")
    print("|---|--:|--:|--:|")
    for part in ("blocks", "activations", "model"):
        print(f"| {part} | {result[part] / MB:.0f} | | |")
    print(f"| all | {limit / MB:.0f} | {result['rise'] / MB:.0f} | {result['rise'] / limit:.2f} |")


if __name__ == "__main__":
    main()
