"""Work of a calibration of a Llama from its shapes, and its seconds on a machine with given rates.

`scale.py` measures the rates of one machine, `scale_h100.py` gives the rates of another one. Counts
are FLOPs (a multiplication and an addition are two) and bytes, without norms and embeddings.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fusion_bench_featcal.core.products import _strips
from fusion_bench_featcal.core.solve import PROBES
from fusion_bench_featcal.processes import Processes
from fusion_bench_featcal.team import Team

PAPER, PLUS = "FeatCal", "FeatCal+"
CANDIDATES = 3  # ridges that FeatCal+ tries, each on four folds, if the least error is near
PARTS = ("forward", "sums", "targets", "solves", "memory", "exchange", "files")


@dataclass(frozen=True)
class Llama:
    """Shapes of a model."""

    hidden: int
    inner: int
    heads: int
    few_heads: int
    blocks: int
    itemsize: int = 2

    @property
    def groups(self) -> list[tuple[int, int]]:
        """Inputs and outputs of the modules that share an input, in forward order."""
        few = self.hidden * self.few_heads // self.heads
        outputs = self.hidden + 2 * few, self.hidden, 2 * self.inner, self.hidden
        return list(zip((self.hidden, self.hidden, self.hidden, self.inner), outputs, strict=True))

    @property
    def numbers(self) -> int:
        """Parameters of a block."""
        return sum(inputs * outputs for inputs, outputs in self.groups)


@dataclass(frozen=True)
class Job:
    """A calibration."""

    model: Llama
    tasks: int
    samples: int
    length: int
    rule: str = PAPER
    size: int = 1  # processes
    at_once: str = "block"  # the setting `sums_at_once`

    @property
    def rows(self) -> float:
        """Rows of a process."""
        return self.tasks * self.samples * self.length / self.size

    @property
    def folds(self) -> int:
        """Folds of the sums."""
        return 4 if self.rule == PLUS else 1

    @property
    def by_group(self) -> bool:
        """True if groups are summed and solved one after another."""
        return self.rule == PLUS or self.at_once == "input"


@dataclass(frozen=True)
class Machine:
    """Rates of one process. Rates in FLOPS are functions of the width.

    The others are bytes per second: of its memory, to and from the processes of its machine, to
    other machines, from files (of a machine), and from the host to its device.
    """

    forward: Callable[[int], float]
    sums: Callable[[int], float]
    solves: Callable[[int], float]
    memory: float
    files: float
    link: float = 1e12
    network: float = 1e12
    host: float = 1e12
    processes: int = 8  # of a machine


def passes(job: Job) -> float:
    """Return the forward passes of a block: expert, model up to each group, solved block."""
    if not job.by_group:
        return 3.0
    before, done = [], 0
    for inputs, outputs in job.model.groups:
        before.append(done / job.model.numbers)
        done += inputs * outputs
    return 2.0 + sum(before) + (job.rule == PAPER)  # the paper's first pass goes to the end


def share(inputs: int) -> float:
    """Share of a Gram matrix that is formed."""
    return sum((stop - start) * stop for start, stop in _strips(inputs)) / inputs**2


def sums(job: Job, inputs: int, outputs: int) -> tuple[float, float]:
    """FLOPs of a group's sums over rows, and of its products for each task."""
    few, plus = 2 * outputs <= inputs, job.rule == PLUS
    width = outputs if few else inputs
    of_rows = 2 * share(inputs) * inputs**2 + 2 * inputs * width
    of_rows += 2 * inputs * outputs * (few and not plus)  # the expert on the target's input
    of_task = 0.0 if few else 2.0 * outputs * inputs**2
    if plus:  # rows out of the expert's weights
        of_task += 2 * share(inputs) * outputs * inputs**2 + 4 * outputs**2 * inputs * few
    return job.rows * of_rows, of_task


def solve(job: Job, inputs: int, outputs: int) -> float:
    """FLOPs of a group's solve."""
    tried = job.folds * CANDIDATES if job.rule == PLUS else 0
    return (1 + tried) * inputs**3 / 3 + 2 * outputs * inputs**2


def sizes(job: Job, inputs: int, outputs: int) -> tuple[int, int]:
    """Bytes of a group's sums over a task's rows, and over tasks, as they are exchanged."""
    width = outputs if 2 * outputs <= inputs else inputs
    of_tasks = job.folds * inputs**2 + outputs * inputs
    of_tasks += job.folds * PROBES * inputs * (job.rule == PLUS)
    return 4 * job.folds * (inputs**2 + width * inputs), 4 * of_tasks


def seconds(job: Job, machine: Machine) -> tuple[dict[str, float], dict[str, float]]:
    """Return seconds of the busiest process by part, and its bytes, of all blocks."""
    model = job.model
    seconds_by_part: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    processes = Processes()
    processes.size = job.size
    team = Team(processes, [str(task) for task in range(job.tasks)], torch.device("cpu"))
    members = [team.members(str(task)) for task in range(job.tasks)]
    led = max(Counter(ranks[0] for ranks in members).values())
    split = any(len(ranks) > 1 for ranks in members)
    attention = 4 * job.rows * job.length * model.hidden
    flops = passes(job) * (2 * job.rows * model.numbers + attention)
    seconds_by_part["forward"] = model.blocks * flops / machine.forward(model.hidden)
    exchanged, costs = 0.0, dict[int, float]()
    for index, (inputs, outputs) in enumerate(model.groups):
        of_rows, of_task = sums(job, inputs, outputs)
        rate, (rows, tasks) = machine.sums(inputs), sizes(job, inputs, outputs)
        seconds_by_part["sums"] += model.blocks * of_rows / rate
        seconds_by_part["targets"] += (
            model.blocks * (led * of_task + 2 * outputs * inputs**2) / rate
        )
        touched = 8 * (led * rows + tasks) + 24 * job.rows * inputs
        seconds_by_part["memory"] += model.blocks * touched / machine.memory
        costs[index] = solve(job, inputs, outputs) / machine.solves(inputs)
        exchanged += tasks + rows * split + model.itemsize * outputs * inputs
    for _ in range(model.blocks):
        dealt, loads = team._deal(costs), dict.fromkeys(range(job.size), 0.0)
        for group, owner in dealt.items():
            loads[owner] += costs[group]
        seconds_by_part["solves"] += sum(costs.values()) if job.by_group else max(loads.values())
    here = range(min(job.size, machine.processes))
    experts = sum(any(rank in here for rank in ranks) for ranks in members)
    again = 1 + job.by_group
    block = model.numbers * model.itemsize
    read = model.blocks * block * (again * experts + 2)
    messages = again * sum(0 in ranks for ranks in members) + 2
    seconds_by_part["files"] = (
        read + model.blocks * block
    ) / machine.files  # and the written block
    seconds_by_part["files"] += model.blocks * block * messages / machine.host
    exchanged *= model.blocks * (job.size > 1)
    between = machine.network if job.size > machine.processes else machine.link
    seconds_by_part["exchange"] = exchanged / between
    return seconds_by_part, {"read": read, "exchanged": exchanged}
