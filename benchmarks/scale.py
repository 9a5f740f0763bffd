"""Minutes, exchange and memory of a calibration on 1 to 64 GPUs, calculated from model shapes.

    python benchmarks/scale.py > benchmarks/results/scale.md

Nothing is measured, downloaded or calibrated. Operations and memory come from
`featcal plan --shapes`, and the exchanged tensors are those of the package, made on torch's meta
device. The rates of the GPU are below.
"""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch import Tensor

from fusion_bench_featcal.core.linear import Linear
from fusion_bench_featcal.data.batch_sizes import batch_size_of
from fusion_bench_featcal.models.fits import GPU as ASSUMED
from fusion_bench_featcal.models.shapes import FACTORS, Estimate, GroupShape, Shapes, shapes_of
from fusion_bench_featcal.modules.groups import Group
from fusion_bench_featcal.modules.sites import Site
from fusion_bench_featcal.rules.paper import Paper
from fusion_bench_featcal.rules.plus import Plus
from fusion_bench_featcal.run.processes import Processes, join_small
from fusion_bench_featcal.streams.task_sums import LinearTaskSums

GPU, GPU_MEMORY, GPUS_PER_MACHINE = "H100 SXM", 79 * 2**30, 8
PASSES, PRODUCTS, SOLVES = ASSUMED.passes, ASSUMED.products, ASSUMED.solves
COLUMN_SECONDS = 1e-6
NVLINK, NETWORK = 225e9, 25e9
STORAGE, COPY = ASSUMED.reads, 10e9
COLLECTIVE_SECONDS, BARRIER_SECONDS = 5e-5, 1e-4

RATES = {
    "forward passes in bfloat16": (f"{PASSES / 1e12:.0f} TFLOP/s", "40 % of the data sheet's 989"),
    "exact float32 products": (f"{PRODUCTS / 1e12:.0f} TFLOP/s", "67 % of the data sheet's 67"),
    "Cholesky factors and triangular solves": (
        f"{SOLVES / 1e12:.0f} TFLOP/s, plus {COLUMN_SECONDS * 1e6:.0f} µs per column of a factor",
        "half of the rate of products, and the latency of small factors",
    ),
    f"exchange between {GPUS_PER_MACHINE} GPUs": (
        f"{NVLINK / 1e9:.0f} GB/s", "half of NVLink's 450 per direction"
    ),
    "exchange between machines": (f"{NETWORK / 1e9:.0f} GB/s", "half of 400 Gbit/s per GPU"),
    "start of an exchange": (
        f"{COLLECTIVE_SECONDS * 1e6:.0f} µs, plus {BARRIER_SECONDS * 1e3:.1f} ms times log2 of the "
        "number of processes", "NCCL, and the barrier over gloo before it",
    ),
    "first read of a weight": (
        f"{STORAGE / 1e9:.0f} GB/s per machine", "NVMe, then the page cache"
    ),
    "every read of a weight": (
        f"{COPY / 1e9:.0f} GB/s per process", "check for NaN, and copy to the GPU"
    ),
}  # fmt: skip
"""Kind of work -> its rate, and where the rate comes from. All are assumptions."""

LLAMA: dict[str, Any] = {
    "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    "dtype": "bfloat16", "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
QWEN: dict[str, Any] = {
    "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False,
    "dtype": "bfloat16", "architectures": ["Qwen3MoeForCausalLM"],
}  # fmt: skip
CONFIGS = {
    "Llama 3.1 8B": transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        **LLAMA,
    ),
    "Llama 3.3 70B": transformers.LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        **LLAMA,
    ),
    "Qwen3-30B-A3B": transformers.Qwen3MoeConfig(
        hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, num_experts=128, num_experts_per_tok=8, **QWEN,
    ),
}  # fmt: skip
SIZES = (1, 2, 4, 5, 8, 64)
DOUBLED = tuple(2**n for n in range(7))
RULES = {"FeatCal": False, "FeatCal+": True}
LEAST_GAIN = 0.2


class Sized(Processes):
    """A number of processes, for their rules of division."""

    def __init__(self, size: int) -> None:
        """Set the number."""
        self.size = size


@dataclass
class Exchange:
    """Exchanges of one process.

    Attributes:
        reduced: Bytes of sums of single tasks, which one process receives.
        all_reduced: Bytes of sums over tasks, which all processes receive.
        collectives: Number of calls of NCCL.
        barriers: Number of barriers and gathers over gloo.
    """

    reduced: int = 0
    all_reduced: int = 0
    collectives: int = 0
    barriers: int = 0

    def add(self, tensors: Sequence[Tensor], times: int, *, to_all: bool) -> None:
        """Add exchanges of some tensors."""
        size = times * sum(tensor.nbytes for tensor in tensors)
        self.all_reduced += size * to_all
        self.reduced += size * (not to_all)
        self.collectives += times * len(join_small(tensors))
        self.barriers += times

    def seconds(self, processes: int) -> float:
        """Return the time with rings, in which a sum for all passes each link twice."""
        link = NVLINK if processes <= GPUS_PER_MACHINE else NETWORK
        size = self.reduced + 2 * (1 - 1 / processes) * self.all_reduced
        waits = self.barriers * math.ceil(math.log2(processes)) * BARRIER_SECONDS
        return size / link + self.collectives * COLLECTIVE_SECONDS + waits


@dataclass(frozen=True)
class Cost:
    """Cost of a calibration on some GPUs.

    Attributes:
        seconds: Part of the work -> time.
        exchanged: Bytes that a process counts as exchanged.
        memory: Bytes on the GPU with most samples, without those of a running batch.
    """

    seconds: dict[str, float]
    exchanged: int
    memory: float

    @property
    def minutes(self) -> float:
        """Return the time of all parts."""
        return sum(self.seconds.values()) / 60


@dataclass(frozen=True)
class Calibration:
    """A calibration whose cost is calculated.

    Attributes:
        shapes: The model.
        plus: Whether the rule is FeatCal+, else the paper's.
        tasks: Number of tasks.
        samples: Samples of each task.
        batch_size: Samples of a batch.
    """

    shapes: Shapes
    plus: bool
    tasks: int
    samples: int
    batch_size: int

    @cached_property
    def _estimate(self) -> Estimate:
        return self.shapes.estimate(tasks=self.tasks, samples=self.samples, plus=self.plus)

    @cached_property
    def blocks(self) -> list[tuple[list[GroupShape], bool]]:
        """Return the groups of each block, and of its routed experts (True)."""
        dense = [(groups, False) for groups in self.shapes.groups.values()]
        return [*dense, *((groups, True) for groups in self.shapes.routed.values())]

    @property
    def groups(self) -> Iterator[GroupShape]:
        """Yield all groups."""
        return (group for groups, _ in self.blocks for group in groups)

    def cost(self, size: int) -> Cost:
        """Return the cost on a number of GPUs."""
        names = [str(number) for number in range(self.tasks)]
        divided = Sized(size).divides_batches(names)
        own = len(Sized(size).own_tasks(names))
        here = self.tasks if divided else own
        per_task = math.ceil(self.samples / self.batch_size)
        batches = self.tasks * per_task
        # The sums of each task end with a barrier: processes without a batch of the task wait.
        summed = self.tasks * math.ceil(per_task / size) if divided else here * per_task
        most = math.ceil(batches / size) if divided else here * per_task
        seconds = {
            "passes": self._passes(summed, most, batches) / PASSES,
            "sums": self._estimate.moments * summed / batches / PRODUCTS,
            # After the sums of all tasks, each process completes those of its own tasks.
            "targets": sum(g.targets(plus=self.plus) for g in self.groups) * own / PRODUCTS,
            "solves": sum(
                self._solve_seconds(group) * (math.ceil(group.experts / size) / group.experts)
                for group in self.groups  # routed experts are solved by one process each
            ),
        }
        # One thread reads the files of the next expert meanwhile.
        hidden = min(self.tasks * self.shapes.bytes / STORAGE, sum(seconds.values()))
        seconds["reads"] = self._read_seconds(here) - hidden
        exchange = self._exchange(divided=divided) if size > 1 else Exchange()
        seconds["exchange"] = exchange.seconds(size) if size > 1 else 0.0
        estimate = self._estimate
        memory = estimate.features * most / batches + estimate.sums + estimate.weights
        return Cost(seconds, exchange.reduced + exchange.all_reduced, memory)

    def _passes(self, summed: int, most: int, batches: int) -> float:
        """Return the operations of passes in the process that finishes last.

        Expert and turns run while sums are added, the router and the new weights do not. Each
        process also runs one batch per block to find the modules that share inputs.
        """
        turns = self.shapes.plus_turns if self.plus else 1
        others = 1 + bool(self.shapes.routed)
        one = self.tasks * self.samples * sum(self.shapes.passes.values()) / batches
        return one * ((1 + turns) * summed + others * most + 1)

    def _solve_seconds(self, shape: GroupShape) -> float:
        """Return the time of a group's solves and of the product before them."""
        factors = FACTORS if self.plus else 1
        product = 2 * shape.experts * shape.outputs * shape.width**2
        operations = shape.solve(plus=self.plus) - product
        columns = factors * shape.experts * shape.width
        return operations / SOLVES + product / PRODUCTS + columns * COLUMN_SECONDS

    def _read_seconds(self, experts: int) -> float:
        """Return the time of reads by a process that reads some of the experts.

        A machine reads every file once. Merged model and base are read by every process.
        """
        size, again = self.shapes.bytes // self.shapes.parameters, 0
        for groups, routed in self.blocks:
            weights = [size * g.experts * g.outputs * g.width for g in groups]
            if routed:  # gate and up are read once more for the inputs of down
                again += sum(weights) + weights[0]
            elif self.plus:
                again += sum(weights[1:])  # the first turn runs the whole block
        copied = (experts + 2) * self.shapes.bytes + experts * again
        return (self.tasks + 2) * self.shapes.bytes / STORAGE + copied / COPY

    def _exchange(self, *, divided: bool) -> Exchange:
        """Return the exchanges of all blocks."""
        exchange, tasks = Exchange(), self.tasks if divided else 0
        for groups, routed in self.blocks:
            for turn in [[group] for group in groups] if self.plus else [groups]:
                task_sums, sums = zip(*(tensors(g, self.plus) for g in turn), strict=True)
                times, parts = turn[0].experts, task_sums
                if not routed:  # the groups of a turn are exchanged together
                    parts = [[tensor for part in task_sums for tensor in part]]
                for part in parts:
                    exchange.add(part, tasks * times, to_all=False)
                over_tasks = [tensor for part in sums for tensor in part]
                exchange.add(over_tasks, times, to_all=not routed)
                exchange.barriers += times  # checks of the sums
                if routed:  # the process that solves one sends its matrix
                    exchange.reduced += times * turn[0].width * turn[0].outputs * 2  # bfloat16
                    exchange.collectives += times
        return exchange


@lru_cache
def tensors(shape: GroupShape, plus: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Return the sums of one task and those over tasks, of one group or routed expert."""
    site = Site("module", "linear", has_bias=False)
    group = Group((site,), False, shape.width, (shape.outputs,), torch.bfloat16, site.name)
    rule = Plus() if plus else Paper()

    def weights() -> Linear:
        weight = torch.empty(shape.outputs, shape.width, device="meta")
        return Linear(weight, weight.new_empty(shape.outputs))

    moments = LinearTaskSums(group, weights(), rule).sums
    sums = rule.sums(group, weights(), weights()).tensors()
    return [tensor for part in moments for tensor in part.tensors()], sums


def last_gain(costs: Mapping[int, Cost]) -> int:
    """Return the number of GPUs from which twice as many save less than `LEAST_GAIN`."""
    for size, twice in pairwise(DOUBLED):
        if costs[twice].minutes > (1 - LEAST_GAIN) * costs[size].minutes:
            return size
    return DOUBLED[-1]


LABELS = {
    "passes": "passes", "sums": "sums", "targets": "targets", "solves": "solves",
    "reads": "reads", "exchange": "exchange",
}  # fmt: skip
"""Parts of the work, in the order of the tables."""


def page(options: argparse.Namespace) -> str:
    """Return the page of results."""
    batch = options.batch_size or batch_size_of("auto", "cuda", options.tokens)
    every = dict[tuple[str, str], dict[int, Cost]]()
    for name, config in CONFIGS.items():
        with TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            shapes = shapes_of(Path(folder), tokens=options.tokens)
        for rule, plus in RULES.items():
            run = Calibration(shapes, plus, options.tasks, options.samples, batch)
            every[name, rule] = {n: run.cost(n) for n in sorted({options.tasks, *SIZES, *DOUBLED})}
    details = list[str]()
    for name in CONFIGS:
        lines = [line for rule in RULES for line in detailed_lines(rule, every[name, rule])]
        details.append(f"## {name}\n\n{HEADS}\n" + "\n".join(lines))
    summary = [summary_line(*key, costs, options.tasks) for key, costs in every.items()]
    rates = [f"| {key} | {rate} | {source} |" for key, (rate, source) in RATES.items()]
    default = "" if options.batch_size else " (`batch_size=auto`)"
    return PAGE.format(
        conclusion=conclusion(every, options.tasks), tasks=options.tasks, tokens=options.tokens,
        samples=options.samples, batch=f"{batch}{default}", gpu=GPU, machine=GPUS_PER_MACHINE,
        most=DOUBLED[-1], summary="\n".join(summary), gain=f"{100 * LEAST_GAIN:.0f} %",
        factors=FACTORS, per_task=math.ceil(options.samples / batch),
        memory=f"{GPU_MEMORY / 2**30:.0f}", rates="\n".join(rates), details="\n\n".join(details),
    )  # fmt: skip


def conclusion(every: Mapping[tuple[str, str], Mapping[int, Cost]], tasks: int) -> str:
    """Return the first sentences of the page."""
    factors = [
        f"{' and '.join(f'{c[1].minutes / c[8].minutes:.1f}' for c in by_rule)} for {name}"
        for name in CONFIGS
        for by_rule in [[every[name, rule] for rule in RULES]]
    ]
    faster = sum(costs[tasks].minutes < costs[8].minutes for costs in every.values())
    most = max(costs[8].minutes / costs[DOUBLED[-1]].minutes for costs in every.values())
    return (
        f"**With 8 GPUs in place of one, FeatCal and FeatCal+ are faster by factors of\n"
        f"{', of '.join(factors)}.**\n{DOUBLED[-1]} GPUs are at most {most:.1f} times as fast as "
        f"8. {tasks} GPUs, one for each task, are\nfaster than 8 in {faster} of these "
        f"{len(every)} cases, because each process then reads one expert, and sums of\none "
        f"task are not exchanged."
    )


def summary_line(name: str, rule: str, costs: Mapping[int, Cost], tasks: int) -> str:
    """Return a model's and a rule's line of the table over all models."""
    minutes = [f"{costs[size].minutes:.1f}" for size in (1, tasks, 8, DOUBLED[-1])]
    seconds = costs[8].seconds
    parts = sorted(seconds, key=lambda key: -seconds[key])[:3]
    most = ", ".join(f"{LABELS[key]} {seconds[key] / 60:.1f}" for key in parts)
    return f"| {name} | {rule} | {' | '.join(minutes)} | {last_gain(costs)} | {most} |"


def detailed_lines(rule: str, costs: Mapping[int, Cost]) -> Iterator[str]:
    """Yield a rule's lines of a model's table."""
    for size in SIZES:
        cost = costs[size]
        mark = "*" if cost.memory > GPU_MEMORY else ""
        values = [f"{size}", f"{cost.minutes:.1f}", f"{costs[1].minutes / cost.minutes:.1f}"]
        values += [f"{cost.seconds[key] / 60:.1f}" for key in LABELS]
        values += [f"{cost.exchanged / 2**30:.0f}", f"{cost.memory / 2**30:.0f}{mark}"]
        yield f"| {rule} | {' | '.join(values)} |"


HEADS = """\
| Rule | GPUs | Minutes | Times faster | Passes | Sums | Targets | Solves | Reads | Exchange \
| GiB exchanged | GiB memory |
|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"""

PAGE = """\
# Calibrations on several GPUs, calculated

{conclusion}

**All of this is calculated from shapes and assumed rates, not measured.** No calibration of these
models was run, and none of any model on several GPUs.

`python benchmarks/scale.py` wrote this page: {tasks} tasks, {samples} samples of {tokens} tokens
each, in batches of {batch}, on {gpu} GPUs, {machine} in a machine. In minutes:

| Model | Rule | 1 GPU | {tasks} GPUs | 8 GPUs | {most} GPUs | Scales to | Most of 8 GPUs' minutes |
|---|---|--:|--:|--:|--:|--:|---|
{summary}

*Scales to* is the number of GPUs, of 1, 2, 4 and so on, from which twice as many save less than
{gain} of the time.

## Why it stops

Only passes, sums and, up to one GPU per task, targets are divided. The other columns of the tables
below are not:

- **Reads.** Unless the number of GPUs divides the number of tasks, the batches of all tasks are
  dealt out, and every process reads all experts. While one expert runs, a thread reads the next
  one's files, which is not counted here. FeatCal+ reads most weights of an expert twice, and both
  rules read those of routed experts twice or three times.
- **Targets.** The sums of a task are added up in one process, which multiplies them by the
  expert's weights (FeatCal+: and adds rows from these weights) after the sums of all tasks. More
  processes than tasks have nothing to do then.
- **Solves.** Every process solves all systems except those of routed experts, each of which one
  process solves. FeatCal+ needs up to {factors} Cholesky factors of each, counted here in full. It
  usually stops earlier.
- **Exchange.** Sums of each task go to one process if batches are dealt out, and sums over tasks
  to all processes. Routed experts are exchanged one by one, with a barrier before each exchange.
- **Batches.** A task has {per_task} batches here, and its sums end with a barrier. Of more than
  {per_task} processes some wait during every task, so passes and sums are no faster. Smaller
  batches (`batch_size`) move this limit.

## What is counted

- **Exchanged** is what a process reports as `exchanged_bytes`. For tiny Llamas the same
  calculation gave the bytes of three CPU processes exactly, apart from the drifts that the log has
  and, for FeatCal+, the trust in the samples, which are left out here.
- **Memory** is that of features in GPU memory, sums, and a block of model and expert. A running
  batch comes on top. \\* is more than the {memory} GiB of a GPU: `activations=host` moves the
  features.
- **Left out:** starts of kernels, tokens, copies of features to the host, saving and evaluation.
- **Passes of FeatCal+** are counted to the input of each group, without attention.
- **Upper bound:** apart from reading ahead no part overlaps with another.

All rates are assumptions about an {gpu}:

| Rate | Value | From |
|---|---|---|
{rates}

{details}
"""


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {"tasks": 5, "samples": 256, "tokens": 512, "batch-size": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    print(page(parser.parse_args()), end="")


if __name__ == "__main__":
    main()
