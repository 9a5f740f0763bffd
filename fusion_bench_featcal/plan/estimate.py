"""Estimate of a calibration: seconds, memory and bytes of the process with the most to do."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import psutil
import torch
from torch import nn

from fusion_bench_featcal.engine.activations import HOST_SHARE
from fusion_bench_featcal.engine.augmentation import copies_of, is_joined
from fusion_bench_featcal.engine.held_out import held_out_of
from fusion_bench_featcal.engine.memory import free_bytes
from fusion_bench_featcal.engine.precision import fold_dtype, row_dtype
from fusion_bench_featcal.engine.problem import is_language_model
from fusion_bench_featcal.engine.team import Shares
from fusion_bench_featcal.experts.merging import merged_at
from fusion_bench_featcal.experts.read_plan import make_plan, reads_of
from fusion_bench_featcal.plan.dry_run import DryRun, Group, Place, dry_run, example_inputs
from fusion_bench_featcal.plan.probe import Rate, measured_rate
from fusion_bench_featcal.setting_checks import budget_in_bytes
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.trials import calibrations_of

CPU = torch.device("cpu")
SYSTEMS = 7
"""Matrices of a module's width, in float64, beside its sums while lambdas are chosen."""
HOLES, SCRATCH = 1.15, 20 * 2**20
"""Share of memory that allocators hold beside what is in use, and bytes of libraries' buffers."""


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


WORTH = 0.02
"""Least share by which a lever must lower something to be listed."""


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
    calibrations: int = 1  # at most; `stages` and `parts` are of one, all else of them together

    @property
    def seconds(self) -> float:
        """All steps of all stages of all calibrations."""
        return self.calibrations * sum(sum(stage.values()) for stage in self.stages)

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
    run, mine = _run_of(request)
    held = math.ceil(request.held * len(mine) / request.tasks) + request.base_held
    parts, peak = memory_of(run, settings, sum(mine), request.tasks, held=held, fused=request.fused)
    own = psutil.Process().memory_info().rss
    free_host, free_gpu = free_bytes(CPU) or 0, None if device.type == "cpu" else free_bytes(device)
    waiting = _waiting(request, parts["activations"], peak, free_host, free_gpu)
    model, on_gpu = parts["model"], device.type != "cpu"
    gpu = peak - parts["experts"] + round(HOLES * waiting["device"])
    calibrations = calibrations_of(settings, text=is_language_model(request.model))
    best = calibrations > 1  # beside the one that is being made
    host = own + (1 + best + held - request.loaded) * model + waiting["host"]
    host += parts["block"] if on_gpu else gpu
    more = request.neighbours * (host - own)
    if not request.loaded:  # the other processes are not there yet
        more += (request.neighbours - 1) * own
    kept = sum(block.parameters for block in run.blocks) if settings.checkpoint_dir else 0
    groups = [group for block in run.blocks for group in block.groups]
    widest = max(groups, key=lambda group: (group.width, sum(group.outputs)), default=None)
    return Plan(
        model=type(request.model).__name__,
        family=run.family,
        device=device.type,
        threads=torch.get_num_threads(),
        tasks=request.tasks,
        samples=max(_samples(request)),
        processes=request.processes,
        neighbours=request.neighbours,
        stages=_seconds(run, request, mine, rate or measured_rate(device, settings)),
        host=host,
        gpu=gpu if on_gpu else None,
        own=own,
        more_host=more,
        waiting=waiting,
        parts=parts,
        read=calibrations * math.ceil(_bytes_read(run, request) * len(mine) / request.tasks),
        disk=waiting["disk"] + kept,
        free_host=free_host,
        free_gpu=free_gpu,
        widest=tuple(name.rpartition(".")[2] for name in widest.names) if widest else (),
        calibrations=calibrations,
    )


def parts_of(request: Request) -> Mapping[str, int]:
    """Memory of the busiest process by the names in `advice.LABELS`; otherwise as `estimate`."""
    run, mine = _run_of(request)
    return memory_of(run, request.settings, sum(mine), request.tasks)[0]


def _samples(request: Request) -> list[int]:
    most = request.settings.samples_per_task
    return [min(count, most) for count in request.samples or [most] * request.tasks]


def _run_of(request: Request) -> tuple[DryRun, list[int]]:
    """One batch's way, and the samples by task of the process with the most.

    Tasks, or the batches of one, are dealt out as to the processes of a run.
    """
    settings, samples = request.settings, dict(enumerate(_samples(request)))
    size = min(settings.batch_size, max(samples.values()))
    names = tuple(map(str, samples))
    inputs = example_inputs(request.model, size, request.length, request.target_length)
    copies = {str(task): copies_of(settings, inputs, n) for task, n in samples.items()}
    busiest: list[int] = []
    for rank in range(request.processes):
        shares = Shares(names, rank, request.processes)
        mine = [
            sum(min(size, samples[int(task)] - start) for start in shares.cut(task, starts))
            for task in shares.mine
            for starts in [range(0, samples[int(task)], size)]
        ]
        held = [min(count, held_out_of(count, settings.held_out)) for count in mine]
        counts = zip(shares.mine, mine, held, strict=True)
        mine = [count + copies[task] * (count - out) for task, count, out in counts]
        busiest = max(busiest, mine, key=sum)
    sizes = {str(task): min(size, count) for task, count in samples.items()}
    joined = max(n * (1 + copies[task] * is_joined(n)) for task, n in sizes.items())
    if joined > size:
        inputs = example_inputs(request.model, joined, request.length, request.target_length)
    return dry_run(request.model, inputs, settings, request.tasks), busiest


def memory_of(
    run: DryRun,
    settings: FeatCalSettings,
    samples: int,
    tasks: int,
    *,
    held: int = 0,
    fused: bool = False,
) -> tuple[dict[str, int], int]:
    """Estimate the memory of a calibration above the merged model that it is given.

    Args:
        run: One batch's way.
        settings: Settings.
        samples: Samples of this process, of all its tasks.
        tasks: Number of tasks of all processes.
        held: Experts and bases that are loaded whole.
        fused: Whether an upstream merge holds a block of every expert.

    Returns:
        Bytes by the names in `advice.LABELS`; and all of them but the features, at the fullest
        block, with what allocators and libraries take.
    """
    model = sum(run.sizes.values())
    visits = [_visit(place, run, settings, tasks, fused=fused) for place in run.places]
    fullest = max(sum(visit.values()) for visit in visits)
    parts = {name: max(visit[name] for visit in visits) for name in visits[0]}
    parts |= {"model": model, "experts": held * model}
    carried = max(place.carried for place in run.places)
    parts["activations"] = round(samples / run.samples * carried)
    return parts, round(model + held * model + HOLES * fullest + SCRATCH)


def _visit(
    place: Place, run: DryRun, settings: FeatCalSettings, tasks: int, *, fused: bool
) -> dict[str, int]:
    """Bytes of a place where it is fullest: while a task is summed, or at the solve."""
    fold = max(fold_dtype(settings, tasks, CPU).itemsize, run.dtype.itemsize)
    folded = summed = transient = system = 0
    turns = Counter[int]()
    for group in place.groups:
        if group.turn is not None:  # beside its sums: copies of second moments, or a fold's systems
            square = group.width**2
            turns[group.turn] += group.summed + max(2 * fold, SYSTEMS * 8) * square
            continue
        square, largest = group.width**2, max(group.outputs) * group.width
        summed += group.summed
        folded += fold * ((1 + group.has_cross) * square + sum(group.outputs) * group.width)
        transient = max(transient, fold * 2 * (square + largest))
        system = max(system, fold * (square + 5 * largest))
    read = sum(run.sizes[name] for name in {run.tied[name] for name in place.needed})
    beside = max(0, summed + max(0, transient - place.peak), system - place.peak)
    return {
        "batch": place.peak,
        "statistics": max([folded + beside, *turns.values()]),
        "block": (tasks if fused else 1) * read + fold * place.calibrated + place.parameters // 2,
    }


def _bytes_read(run: DryRun, request: Request) -> int:
    """Bytes that are read of all experts, as the log counts them."""
    own = run.dtype.itemsize
    sizes = {name: n * (request.itemsize or own) // own for name, n in run.sizes.items()}
    blocks = [block.name for block in run.blocks]
    visits: dict[str, list[str]] = {}
    for place in run.places:
        visits[place.name] = list(place.needed)
        visits |= {name: list(tensors) for name, tensors in place.later.items()}
    if request.fused:  # the merge needs every tensor
        for place, names in merged_at(request.model, blocks).items():
            visits[place] += names
    reads = {
        str(task): reads_of(task, visits, blocks, run.tied, sizes.__getitem__)
        for task in range(request.tasks)
    }
    full, budget = make_plan(reads, None).bytes, request.settings.expert_read_budget
    return full if budget is None else make_plan(reads, budget_in_bytes(budget, full)).bytes


def _waiting(
    request: Request, left: int, peak: int, free_host: int, free_gpu: int | None
) -> dict[str, int]:
    """Bytes of features by place, filled in the engine's order."""
    choice, host = request.settings.activations, free_host // request.neighbours
    if request.device.type == "cpu":
        rooms = {"device": host - peak, "host": 0}
        choice = "device" if choice == "host" else choice
    else:
        rooms = {"device": (free_gpu or 0) - peak, "host": int(HOST_SHARE * host)}
    waiting = {}
    for place, room in rooms.items():
        room = max(0, room) if choice == "auto" else (choice == place) * left
        waiting[place] = min(left, room)
        left -= waiting[place]
    return {**waiting, "disk": left}


def _seconds(
    run: DryRun, request: Request, samples: Sequence[int], rate: Rate
) -> tuple[dict[str, float], ...]:
    """Seconds by step, for each stage; `samples` are those of each task of this process."""
    settings, tasks, device = request.settings, request.tasks, request.device
    widths = Counter(group.width for block in run.blocks for group in block.groups) or Counter([1])
    width, batches = widths.most_common(1)[0][0], sum(samples) / run.samples
    wide = {
        "moments": row_dtype(settings, tasks, device),
        **dict.fromkeys(("folds", "solves"), fold_dtype(settings, tasks, device)),
    }
    stages = []
    for stage in run.stages:
        groups = [block.groups for block in stage]
        flops = {
            step: batches * sum(place.flops.get(step, 0) for place in stage)
            for step in ("stem", "passes", "moments")
        }
        flops["folds"] = len(samples) * sum(map(_fold_flops, chain.from_iterable(groups)))
        flops["solves"] = sum(_solve_flops(g, min(tasks, request.processes)) for g in groups)
        flops["update"] = batches * sum(place.flops.get("update", 0) for place in stage)
        dtypes = {s: torch.promote_types(run.dtype, wide.get(s, run.dtype)) for s in flops}
        stages.append({step: flops[step] / rate(dtypes[step], width) for step in flops})
    return tuple(stages)


def _fold_flops(group: Group) -> int:
    return 2 * sum(group.outputs) * group.width**2


def _solve_flops(groups: Sequence[Group], processes: int) -> float:
    """FLOPs of the factors, and of solving and checking each module, in the busiest process."""
    each = [group.factors * group.width**3 / 3 + 2 * _fold_flops(group) for group in groups]
    return max(sum(each) / processes, max(each, default=0))
