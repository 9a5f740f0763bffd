"""Compare the host memory of calibrations with their plans.

    python benchmarks/planned_memory.py [NAME ...]

Random models of ten shapes are calibrated, each in a separate process and streamed from files as
`featcal calibrate` does. The plan is made in that process right before. Compares the planned peak
with the peak resident set (VmHWM, from which the kernel may drop pages of files), and writes the
table to `results/planned_memory.md`. Needs 3 GB of memory and of disk.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from safetensors.torch import save_file

from fusion_bench_featcal import FeatCalSettings, SafetensorsExpert, calibrate
from fusion_bench_featcal.plan import plan_of
from fusion_bench_featcal.plan_shapes import Request
from fusion_bench_featcal.settings import PLUS

REPORT = Path(__file__).parent / "results" / "planned_memory.md"
TASKS = ("one", "two")
MIB = 2**20
LLAMA: dict[str, Any] = {"config": "Llama", "model": "LlamaForCausalLM", "vocab_size": 8000}
VISION = {"config": "CLIPVision", "model": "CLIPVisionModel"}
LLAMA_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
            "num_key_value_heads": 8}  # fmt: skip
LLAMA_100M = {"hidden_size": 768, "intermediate_size": 2688, "num_attention_heads": 12,
              "num_key_value_heads": 4}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "ViT-B/32": VISION | {"hidden_size": 768, "intermediate_size": 3072, "samples": 64,
                          "num_attention_heads": 12, "patch_size": 32},
    "ViT-L/14": VISION | {"hidden_size": 1024, "intermediate_size": 4096, "samples": 16,
                          "num_attention_heads": 16, "patch_size": 14},
    "BERT-base": {"config": "Bert", "model": "BertModel", "samples": 32, "tokens": 128},
    "T5-base": {"config": "T5", "model": "T5ForConditionalGeneration", "d_model": 768, "d_ff": 3072,
                "num_heads": 12, "num_layers": 1, "decoder_start_token_id": 0,
                "samples": 32, "tokens": 128},
    "GPT-2": {"config": "GPT2", "model": "GPT2LMHeadModel", "n_layer": 2, "samples": 16,
              "tokens": 128, "tie_word_embeddings": False},
    "Llama 1B, bfloat16, sums_at_once=input": LLAMA | LLAMA_1B | {
        "samples": 4, "tokens": 64, "dtype": "bfloat16", "set": {"sums_at_once": "input"}},
    "Llama 100M, 128000 tokens": LLAMA | LLAMA_100M | {
        "vocab_size": 128000, "samples": 8, "tokens": 64},
    "Llama 100M, many samples": LLAMA | LLAMA_100M | {"samples": 64, "tokens": 256},
    "the same, activations=disk": LLAMA | LLAMA_100M | {
        "samples": 64, "tokens": 256, "set": {"activations": "disk"}},
    "ViT-B/32, FeatCal+": VISION | {
        "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "patch_size": 32,
        "samples": 16, "set": dict(PLUS)},
}  # fmt: skip
OWN = ("config", "model", "samples", "tokens", "dtype", "set")


def empty_model(shape: dict[str, Any]) -> Any:
    """Return a model of a shape with two blocks, its parameters on the meta device."""
    values = {"num_hidden_layers": 2} | {k: v for k, v in shape.items() if k not in OWN}
    config = getattr(transformers, f"{shape['config']}Config")(**values)
    kind = getattr(transformers, shape["model"])
    torch.set_default_dtype(getattr(torch, shape.get("dtype", "float32")))
    with init_empty_weights(include_buffers=False):
        model = kind(config)
    torch.set_default_dtype(torch.float32)
    model.tie_weights()
    return model.eval()


def write_models(folder: Path, shape: dict[str, Any]) -> None:
    """Write random weights of a base, a merged model and experts near it."""
    model = empty_model(shape)
    tensors = model.state_dict(keep_vars=True)
    once = {id(tensor): name for name, tensor in reversed(tensors.items())}
    base = {name: torch.randn(tensors[name].shape) * 0.02 for name in once.values()}
    for role in ("base", "merged", *TASKS):
        near = {n: t + 0.001 * torch.randn(t.shape) for n, t in base.items()}
        stored = {n: t.to(tensors[n].dtype) for n, t in near.items()}
        save_file(stored, folder / f"{role}.safetensors", {"format": "pt"})


class Samples:
    """Random samples, created on access like data that are read."""

    def __init__(self, shape: dict[str, Any], batch_size: int) -> None:
        """Store the shape."""
        self._shape, self._batch_size = shape, batch_size

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples in batches."""
        shape, count = self._shape, self._batch_size
        for _ in range(shape["samples"] // count):
            if "tokens" not in shape:
                yield torch.randn(count, 3, 224, 224)
                continue
            ids = torch.randint(3, 1000, (count, shape["tokens"]))
            yield {"input_ids": ids} | ({"labels": ids[:, :8]} if shape["config"] == "T5" else {})


def peak_resident() -> int:
    """Return this process's peak resident set. `ru_maxrss` would include its parent's."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def measured(folder: Path, shape: dict[str, Any]) -> dict[str, Any]:
    """Plan and calibrate in this process, and return planned and measured bytes."""
    blocks = str(folder / "blocks")
    values = {"batch_size": min(32, shape["samples"]), "samples_per_task": shape["samples"],
              "checkpoint_dir": blocks, "activations_dir": str(folder)}  # fmt: skip
    settings = FeatCalSettings(**{**values, **shape.get("set", {})})
    model = empty_model(shape)
    data = {task: Samples(shape, settings.batch_size) for task in TASKS}
    length = shape.get("tokens")
    plan = plan_of(Request(model, settings, len(TASKS), length, streamed=True))
    start = time.perf_counter()
    sources = {
        name: SafetensorsExpert(folder / f"{name}.safetensors")
        for name in ("base", "merged", *TASKS)
    }
    experts = {task: sources[task] for task in TASKS}
    calibrate(model, sources["base"], experts, data, settings, progress=False,
              merged_weights=sources["merged"])  # fmt: skip
    seconds = time.perf_counter() - start
    return {"planned": plan.host, "taken": peak_resident(), "seconds": seconds}


def main() -> None:
    """Measure all shapes, or the named ones, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(SHAPES))
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measured(options.measure, SHAPES[options.names[0]])))
        return
    machine = f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}"
    rows = [
        "| shape | planned, MiB | peak, MiB | planned / peak | seconds |",
        "|---|--:|--:|--:|--:|",
    ]
    for name in options.names:
        with tempfile.TemporaryDirectory() as folder:
            write_models(Path(folder), SHAPES[name])
            again = [sys.executable, __file__, name, "--measure", folder]
            done = subprocess.run(again, check=True, stdout=subprocess.PIPE, text=True)
        result = json.loads(done.stdout.splitlines()[-1])
        planned, taken = result["planned"], result["taken"]
        rows.append(f"| {name} | {planned / MIB:.0f} | {taken / MIB:.0f} | {planned / taken:.2f} "
                    f"| {result['seconds']:.0f} |")  # fmt: skip
        print(rows[-1], flush=True)
        if options.names == list(SHAPES):
            REPORT.write_text("\n".join([machine, "", *rows]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
