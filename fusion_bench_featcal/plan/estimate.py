"""Estimate of a calibration: seconds, memory and bytes of the process with the most to do."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import psutil
import torch
from torch import nn
from torch.nn import functional

from fusion_bench_featcal.core.kernels import choose_kernel, with_kernel
from fusion_bench_featcal.engine.activations import HOST_SHARE
from fusion_bench_featcal.engine.memory import free_bytes
from fusion_bench_featcal.engine.precision import fold_dtype, row_dtype
from fusion_bench_featcal.plan.counting import Group, Work, count_work, example_inputs
from fusion_bench_featcal.plan.memory import HOLES, Memory, predict_memory, read_bytes
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings

CPU = torch.device("cpu")
EFFICIENCY = 0.55
"""Share of a single product's speed that whole calibrations reach: the rest is element by element.
benchmarks/plan.py found 0.4 to 0.65."""

WORTH = 0.02
"""Least share by which a lever must lower something to be listed."""

Rate = Callable[[torch.dtype, int], float]
"""FLOP/s of products of numbers of a dtype, about so wide."""


@dataclass(frozen=True)
class Request:
    """The calibration to be estimated."""

    model: nn.Module  # structure of the merged model, on the meta device
    settings: FeatCalSettings
    tasks: int
    length: int = 512  # tokens of a text
    target_length: int = 8  # tokens of an encoder-decoder's target
    samples: Sequence[int] = ()  # of each task; empty: `samples_per_task` of each
    held: int = 0  # experts that are loaded whole
    base_held: bool = False
    itemsize: int | None = None  # bytes of a number in the experts' files; None: as in the model
    loaded: int = 0  # models that this process holds already, the merged one included
    device: torch.device = CPU
    fused: bool = False  # whether the upstream merge shares the calibration's reads
    merges: bool = False  # whether an upstream merger reads the experts as well
    processes: int = 1
    neighbours: int = 1  # processes on one machine


@dataclass(frozen=True)
class Lever:
    """Another setting, and the estimate with it, as in `Plan`."""

    setting: str
    seconds: float
    host: int
    gpu: int | None
    read: int
    same_model: bool  # whether the calibrated model stays the same


@dataclass(frozen=True)
class Plan:
    """The estimate for the busiest process; sizes in bytes."""

    model: str
    family: str
    device: str
    threads: int
    tasks: int
    samples: int  # most of a task
    processes: int
    neighbours: int  # processes on one machine
    stages: tuple[Mapping[str, float], ...]  # seconds by step; rough
    host: int  # peak of host memory: this process with its libraries, the merged model, the run
    gpu: int | None  # peak of device memory; None on a CPU
    own: int  # memory of this process now
    more_host: int  # host memory that this machine's processes will need beside what is in use
    waiting: Mapping[str, int]  # features on `device`, `host` and `disk`, at their fullest
    parts: Mapping[str, int]  # memory by the names in `advice.LABELS`
    read: int  # bytes read from experts
    disk: int  # files: waiting features, and blocks that `checkpoint_dir` keeps
    free_host: int
    free_gpu: int | None
    widest: tuple[str, ...]  # the modules with the largest statistics
    levers: tuple[Lever, ...] = ()

    @property
    def seconds(self) -> float:
        """All steps of all stages."""
        return sum(sum(stage.values()) for stage in self.stages)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return {**asdict(self), "seconds": self.seconds}


def estimate(request: Request, rate: Rate | None = None) -> Plan:
    """Estimate a calibration, at the machine's speed `rate` (by default `probe` measures it).

    Raises:
        CalibrationError: If the model cannot be calibrated, or a read budget is too small.
        ValueError: If the model's inputs are unknown, or no family fits it.
    """
    device, settings = request.device, request.settings
    work, mine, held, memory = _work_of(request)
    read = read_bytes(work, settings, request.tasks, itemsize=request.itemsize, fused=request.fused)
    own = psutil.Process().memory_info().rss
    free_host, free_gpu = free_bytes(CPU) or 0, None if device.type == "cpu" else free_bytes(device)
    waiting = _waiting(request, memory, free_host, free_gpu)
    model, on_gpu = memory.parts["model"], device.type != "cpu"
    gpu = memory.peak - memory.parts["experts"] + round(HOLES * waiting["device"])
    host = own + (1 + held - request.loaded) * model + waiting["host"]
    host += memory.parts["block"] if on_gpu else gpu
    more = request.neighbours * (host - own)
    if not request.loaded:  # the other processes are not there yet
        more += (request.neighbours - 1) * own
    kept = sum(block.parameters for block in work.blocks) if settings.checkpoint_dir else 0
    widest = max(work.groups, key=lambda group: (group.width, sum(group.outputs)), default=None)
    return Plan(
        model=type(request.model).__name__,
        family=work.family,
        device=device.type,
        threads=torch.get_num_threads(),
        tasks=request.tasks,
        samples=max(_samples(request)),
        processes=request.processes,
        neighbours=request.neighbours,
        stages=seconds_of(work, request, mine, rate or measured_rate(request)),
        host=host,
        gpu=gpu if on_gpu else None,
        own=own,
        more_host=more,
        waiting=waiting,
        parts=memory.parts,
        read=math.ceil(read * len(mine) / request.tasks),
        disk=waiting["disk"] + kept,
        free_host=free_host,
        free_gpu=free_gpu,
        widest=tuple(name.rpartition(".")[2] for name in widest.names) if widest else (),
    )


def memory_of(request: Request) -> Memory:
    """Memory of the busiest process; otherwise as `estimate`."""
    return _work_of(request)[-1]


def _samples(request: Request) -> list[int]:
    most = request.settings.samples_per_task
    return [min(count, most) for count in request.samples or [most] * request.tasks]


def _work_of(request: Request) -> tuple[Work, list[int], int, Memory]:
    """Counts of a batch; of the busiest process samples by task, models held whole, and memory."""
    settings, samples = request.settings, _samples(request)
    batch = min(settings.batch_size, max(samples))
    inputs = example_inputs(request.model, batch, request.length, request.target_length)
    work = count_work(request.model, inputs, settings)
    mine = busiest_share(samples, batch, request.processes)
    held = math.ceil(request.held * len(mine) / request.tasks) + request.base_held
    memory = predict_memory(
        work, settings, sum(mine), request.tasks, held=held, fused=request.fused
    )
    return work, mine, held, memory


def busiest_share(samples: Sequence[int], batch: int, processes: int) -> list[int]:
    """Samples, task by task, of the process with the most.

    Tasks are dealt out in turn; where there are more processes than tasks, each task's batches are.
    """
    tasks = len(samples)
    if processes <= tasks:
        return max((list(samples[rank::processes]) for rank in range(processes)), key=sum)
    shares = []
    for task, count in enumerate(samples):
        members = len(range(task, processes, tasks))
        shares.append([min(count, -(-math.ceil(count / batch) // members) * batch)])
    return max(shares)


def _waiting(
    request: Request, memory: Memory, free_host: int, free_gpu: int | None
) -> dict[str, int]:
    """Bytes of features by place, filled in the engine's order."""
    left, choice = memory.parts["activations"], request.settings.activations
    host = free_host // request.neighbours
    if request.device.type == "cpu":
        rooms = {"device": host - memory.peak, "host": 0}
        choice = "device" if choice == "host" else choice
    else:
        rooms = {"device": (free_gpu or 0) - memory.peak, "host": int(HOST_SHARE * host)}
    waiting = {}
    for place, room in rooms.items():
        room = max(0, room) if choice == "auto" else (choice == place) * left
        waiting[place] = min(left, room)
        left -= waiting[place]
    return {**waiting, "disk": left}


def seconds_of(
    work: Work, request: Request, samples: Sequence[int], rate: Rate
) -> tuple[dict[str, float], ...]:
    """Seconds by step, for each stage; `samples` are those of each task of this process."""
    settings, tasks, device = request.settings, request.tasks, request.device
    mixes, drift = settings.mix_alpha > 0, settings.log_drift
    batches, sides = sum(samples) / work.batch, 1 + (mixes or drift)
    dtypes = work.dtype, row_dtype(settings, tasks, device), fold_dtype(settings, tasks, device)
    widths = Counter(group.width for group in work.groups) or Counter([1])
    width = widths.most_common(1)[0][0]
    passing, summing, folding = (
        rate(torch.promote_types(work.dtype, dtype), width) for dtype in dtypes
    )
    stages = []
    for stem, *blocks in work.stages:
        groups = [group for block in blocks for group in block.groups]
        updated = sum(b.flops for b in blocks if drift or b is not work.blocks[-1])
        solves = sum(_solve_flops(b.groups, min(tasks, request.processes)) for b in blocks)
        stages.append(
            {
                "stem": (not work.whole_model) * sides * batches * stem.flops / passing,
                "passes": sides * batches * sum(block.flops for block in blocks) / passing,
                "moments": batches * sum(_sum_flops(g, mixes=mixes) for g in groups) / summing,
                "folds": len(samples) * sum(map(_fold_flops, groups)) / folding,
                "solves": solves / folding,
                "update": batches * updated / passing,
            }
        )
    return tuple(stages)


def _sum_flops(group: Group, *, mixes: bool) -> float:
    """FLOPs of one batch's sums: half a Gram matrix, and the cross moment or what stands for it."""
    cross = 2 * (sum(group.outputs) if group.is_narrow else group.width)
    return group.rows * group.width * (group.width + mixes * cross)


def _fold_flops(group: Group) -> int:
    return 2 * sum(group.outputs) * group.width**2


def _solve_flops(groups: Sequence[Group], processes: int) -> float:
    """FLOPs of the factors, and of solving and checking each module, in the busiest process."""
    each = [group.width**3 / 3 + 2 * _fold_flops(group) for group in groups]
    return max(sum(each) / processes, max(each, default=0))


def measured_rate(request: Request) -> Rate:
    """Speed of this machine with the kernel that the calibration will choose."""
    kernel = choose_kernel(request.settings.linear_kernel, request.device)
    return lambda dtype, width: probe(request.device, kernel, dtype, width)


@cache
def probe(device: torch.device, kernel: str, dtype: torch.dtype, width: int) -> float:
    """FLOP/s of a linear layer, as whole calibrations reach them; measured once in a process.

    Of CPU time where there is one thread, else of wall-clock time. `kernel` multiplies float32
    matrices on a CPU.
    """
    if device.type == "mps" and dtype == torch.float64:
        dtype = torch.float32
    rows, width = 512, min(max(width, 64), 1024)
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.randn(n, width, generator=generator).to(device, dtype) for n in (rows, width)
    )
    one_thread = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if one_thread else time.perf_counter
    seconds = []
    with torch.no_grad(), with_kernel(kernel, nullcontext)():
        while len(seconds) < 4 or (sum(seconds) < 0.02 and len(seconds) < 50):
            start = clock()
            functional.linear(left, right)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(max(clock() - start, 1e-9))
    return EFFICIENCY * 2 * rows * width**2 / min(seconds[1:])


def with_levers(request: Request, plan: Plan, rate: Rate | None = None) -> Plan:
    """Add the settings to a request's plan that lower time, memory or reads, least memory first."""
    found = []
    for setting, changed, same_model in _changes(request, plan):
        try:
            other = estimate(changed, rate)
        except CalibrationError:  # the pattern leaves a module out that is needed
            continue
        if any(
            new < (1 - WORTH) * old for new, old in zip(_costs(other), _costs(plan), strict=True)
        ):
            found.append(
                Lever(setting, other.seconds, other.host, other.gpu, other.read, same_model)
            )
    found.sort(key=lambda lever: (lever.gpu or 0) + lever.host)
    return replace(plan, levers=tuple(found))


def _costs(plan: Plan) -> tuple[float, ...]:
    return plan.seconds, plan.host - plan.own, plan.gpu or 0, plan.read


def _changes(request: Request, plan: Plan) -> Iterator[tuple[str, Request, bool]]:
    """Settings that may lower something, the request with each, and whether the model stays."""
    settings = request.settings

    def changed(**changes: object) -> Request:
        return replace(request, settings=settings.replace(**changes))

    if (half := settings.samples_per_task // 2) > 0:
        yield f"samples_per_task={half}", changed(samples_per_task=half), False
    if (half := settings.batch_size // 2) > 0:
        yield f"batch_size={half}", changed(batch_size=half), True
    if request.device.type != "cpu" and plan.waiting["device"]:
        yield "activations=host", changed(activations="host"), True
    if plan.waiting["device"] + plan.waiting["host"]:
        yield "activations=disk", changed(activations="disk"), True
    if request.held or request.base_held:
        yield "stream_experts=true", replace(request, held=0, base_held=False), True
    elif settings.expert_read_budget is None and not request.merges:
        yield "expert_read_budget=50%", changed(expert_read_budget="50%"), False
    if request.fused:
        yield "fuse_merge=false", replace(request, fused=False), True
    if settings.log_drift:
        yield "log_drift=false", changed(log_drift=False), True
    if settings.mix_alpha > 0:
        yield "mix_alpha=0 log_drift=false", changed(mix_alpha=0.0, log_drift=False), False
    if settings.max_length is not None and (half := request.length // 2) > 1:
        shorter = replace(request, length=half, settings=settings.replace(max_length=half))
        yield f"max_length={half}", shorter, False
    if settings.modules is None and plan.widest:
        without = [f"!{name}" for name in plan.widest]
        yield f"modules={without}", changed(modules=without), False
