"""Prediction of calibrations of 7B, 70B and 405B parameters on H100 GPUs, with its assumptions."""

from dataclasses import replace
from typing import Any

import torch
from scale_model import CANDIDATES, PAPER, PARTS, PLUS, Job, Llama, Machine, seconds, solve
from transformers import LlamaConfig, LlamaForCausalLM

from fusion_bench_featcal import FeatCalSettings
from fusion_bench_featcal.plan_shapes import Request, Shapes

TASKS, SAMPLES, LENGTH = 8, 256, 512
MODELS = {
    "7B": Llama(4096, 11008, 32, 32, 32),
    "70B": Llama(8192, 28672, 64, 8, 80),
    "405B": Llama(16384, 53248, 128, 8, 126),
}
MEMORY = 80e9
H100 = Machine(
    forward=lambda width: 0.5 * 989e12,
    sums=lambda width: 0.7 * 67e12,
    solves=lambda width: 0.4 * 67e12,
    memory=0.7 * 3.35e12,
    files=5e9,
    link=0.7 * 450e9,
    network=0.7 * 50e9,
    host=0.7 * 64e9,
)
ASSUMPTIONS = f"""\
- {TASKS} tasks with {SAMPLES} samples of {LENGTH} tokens, models in bfloat16, sums and solves in
  float32. FeatCal+ tries {CANDIDATES} ridges on 4 folds.
- Peaks of an H100 SXM ([NVIDIA's data sheet](https://www.nvidia.com/en-us/data-center/h100/),
  dense, TF32 off): bfloat16 989 TFLOPS, float32 67 TFLOPS, memory 3.35 TB/s, NVLink 450 GB/s and
  PCIe 64 GB/s each way.
- Shares of these peaks that are reached: forward passes 0.5, sums and products with weights 0.7,
  Cholesky factors and triangular solves 0.4, memory and links 0.7.
- Eight GPUs a machine with files at 5 GB/s (NVMe), and 50 GB/s between machines for each GPU, of
  which 0.7 is reached.
- Nothing overlaps: reading, exchange and computation add up. Tokenizing, evaluation, kernel
  launches and waits of processes for each other are left out.
- A machine reads the experts of its tasks, the base and the merged model once. Where groups are
  summed one after another (FeatCal+, and `sums_at_once=input` where a block's sums do not fit) it
  reads experts twice. Features wait on the GPU.
- Memory is that of `featcal calibrate --plan`. A GPU has 80 GB.

*targets*: products of weights with sums, for each task. *memory*: other passes over sums and rows.
*files*: reading, writing and copies to the GPU.
"""


def needed(job: Job) -> float:
    """Return the bytes of a GPU that a calibration takes, as `featcal --plan` counts them."""
    of_model, plus = job.model, job.rule == PLUS
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=of_model.hidden,
        intermediate_size=of_model.inner,
        num_hidden_layers=1,
        num_attention_heads=of_model.heads,
        num_key_value_heads=of_model.few_heads,
    )
    with torch.device("meta"):
        whole: Any = LlamaForCausalLM(config)
    model = whole.to(torch.bfloat16)
    more: dict[str, Any] = {"rule": "plus"} if plus else {"ridge_lambda": 3.0}
    settings = FeatCalSettings(
        calibrate_norm=False, sums_at_once=job.at_once, activations="disk", **more
    )
    # Without features: a process with more neighbours than tasks has its rows alone.
    request = Request(model, settings, tasks=job.tasks, length=job.length)
    memory = Shapes.of(request).memory()
    features = 2 * job.rows * of_model.hidden * of_model.itemsize
    return features + memory["busy"]


def minutes(taken: float) -> str:
    """Return seconds as minutes, with a decimal below ten."""
    return f"{taken / 60:.{int(taken < 600)}f}"


def limits() -> str:
    """Return a sentence on the speed-up of a block's solves by several processes."""
    gains = []
    for name, model in MODELS.items():
        costs = [solve(Job(model, TASKS, SAMPLES, LENGTH), *group) for group in model.groups]
        gains.append(f"{name} {sum(costs) / max(costs):.1f}")
    return (
        "A block has four groups that different processes solve, and `mlp.down_proj` is the "
        f"dearest: solves become at most so many times as fast ({', '.join(gains)}). With FeatCal+ "
        "and `sums_at_once=input` groups follow one another, and solves become no faster."
    )


def predicted() -> list[str]:
    """Return the table of the prediction."""
    heads = ["GPUs", "minutes", "speedup", *(f"{part}, %" for part in PARTS)]
    heads += ["read by a machine, GB", "exchanged by a process, GB", "GPU memory, GB"]
    rows = ["| model | rule | " + " | ".join(heads) + " |", "|:--|:--" + "|--:" * len(heads) + "|"]
    for name, model in MODELS.items():
        for rule in (PAPER, PLUS):
            first = 0.0
            for size in (1, 8, 64):
                job = Job(model, TASKS, SAMPLES, LENGTH, rule, size)
                if needed(job) > MEMORY:
                    job = replace(job, at_once="input")
                seconds_by_part, moved = seconds(job, H100)
                total = sum(seconds_by_part.values())
                first = first or total
                gigabytes = [value / 1e9 for value in (*moved.values(), needed(job))]
                fits = " (too much)" if needed(job) > MEMORY else ""
                cells = [name, rule, str(size), minutes(total), f"{first / total:.1f}"]
                cells += [f"{100 * value / total:.0f}" for value in seconds_by_part.values()]
                cells += [f"{value:.0f}" for value in gigabytes]
                rows.append(f"| {' | '.join(cells)}{fits} |")
    return rows
