"""What a calibration will take, put together before it begins."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch
from torch import nn

from fusion_bench_featcal.engine.activations import HOST_SHARE
from fusion_bench_featcal.engine.memory import free_bytes
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.plan.constants import Constants, constants
from fusion_bench_featcal.plan.inputs import example_inputs
from fusion_bench_featcal.plan.memory import Memory, predict_memory, read_bytes
from fusion_bench_featcal.plan.rates import Rates
from fusion_bench_featcal.plan.seconds import Machine, predict_stages
from fusion_bench_featcal.plan.shares import BusiestShare
from fusion_bench_featcal.plan.work import Work, count_work
from fusion_bench_featcal.settings import FeatCalSettings

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Request:
    """What is to be predicted.

    Attributes:
        model: The merged model's structure, on the meta device.
        settings: Settings.
        tasks: Number of tasks.
        length: Tokens of a text; models of images do not heed it.
        target_length: Tokens of an encoder-decoder's target.
        held: Number of experts that are loaded whole.
        base_held: Whether the base is.
        itemsize: Bytes of a number in the experts' files; None: as in the model.
        loaded: Number of models, the merged one among them, that this process holds already.
        device: Where to calibrate.
        fused: Whether the upstream merge shares the calibration's reads.
        merges: Whether an upstream merger reads the experts, too.
        processes: Number of processes that work on it.
        neighbours: Number of those on one machine.
    """

    model: nn.Module
    settings: FeatCalSettings
    tasks: int
    length: int = 512
    target_length: int = 8
    held: int = 0
    base_held: bool = False
    itemsize: int | None = None
    loaded: int = 0
    device: torch.device = CPU
    fused: bool = False
    merges: bool = False
    processes: int = 1
    neighbours: int = 1

    @property
    def share(self) -> BusiestShare:
        """What the busiest process has to do."""
        return BusiestShare.of(
            self.settings, self.tasks, self.processes, experts=self.held, base=self.base_held
        )


@dataclass(frozen=True)
class Lever:
    """A setting that lowers something.

    Attributes:
        setting: The change.
        seconds: Predicted time with it.
        host: Predicted host memory with it.
        gpu: Predicted device memory with it; None for a CPU.
        read: Bytes that are read from experts with it, at most.
        same_model: Whether the calibrated model stays the same.
    """

    setting: str
    seconds: float
    host: int
    gpu: int | None
    read: int
    same_model: bool


@dataclass(frozen=True)
class Plan:
    """The prediction for one process, the busiest; sizes in bytes.

    Attributes:
        model: The model's class.
        family: Its family.
        device: Type of the device.
        threads: Threads that the rates were measured with.
        tasks: Number of all tasks.
        samples: Samples of each.
        processes: Number of processes.
        neighbours: Number of processes on one machine.
        stages: Seconds by step, for each stage.
        host: Peak of host memory: this process with its libraries, the merged model, and the run.
        gpu: Peak of device memory; None for a CPU.
        waiting: Where features wait: `device`, `host`, `disk` -> bytes at their fullest.
        parts: What the memory is for.
        own: Memory that this process takes now, with the libraries that a run needs too.
        more_host: What the machine's processes will take beside what is in use.
        read: Bytes that are read from experts, at most.
        disk: Bytes of files: waiting features, and blocks that `checkpoint_dir` keeps.
        free_host: What is free now, beside this process.
        free_gpu: What is free on the device; None for a CPU.
        widest: The modules with the largest statistics, which share an input.
        levers: Which setting lowers what.
    """

    model: str
    family: str
    device: str
    threads: int
    tasks: int
    samples: int
    processes: int
    neighbours: int
    stages: tuple[Mapping[str, float], ...]
    host: int
    gpu: int | None
    own: int
    more_host: int
    waiting: Mapping[str, int]
    parts: Mapping[str, int]
    read: int
    disk: int
    free_host: int
    free_gpu: int | None
    widest: tuple[str, ...]
    levers: tuple[Lever, ...] = ()

    @property
    def seconds(self) -> float:
        """All steps of all stages."""
        return sum(sum(stage.values()) for stage in self.stages)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return {**asdict(self), "seconds": self.seconds}


def predict(request: Request, rates: Rates) -> Plan:
    """Predict a calibration.

    Args:
        request: What is to be predicted.
        rates: The device's rates.

    Returns:
        The plan, which says nothing of other settings yet.

    Raises:
        CalibrationError: If the model cannot be calibrated.
        ValueError: If its inputs cannot be told, or no family knows it.
    """
    work, chosen = count(request), constants()
    share, device = request.share, request.device
    tasks = share.tasks
    settings = request.settings.replace(samples_per_task=share.samples)
    held = share.held * work.model
    memory = predict_memory(work, settings, tasks, chosen, experts_held=held, fused=request.fused)
    machine = Machine(rates, chosen)
    own = psutil.Process().memory_info().rss
    free_host, free_gpu = free_bytes(CPU) or 0, None if device.type == "cpu" else free_bytes(device)
    waiting = _waiting(request, memory, chosen, free_host, free_gpu)
    to_come = (1 + share.held - request.loaded) * work.model
    host = own + to_come + waiting["host"]
    on_device = memory.peak - held + waiting["device"]
    peak = host + (on_device if device.type == "cpu" else memory.parts["block"])
    more = request.neighbours * (peak - own)
    if not request.loaded:  # the other processes are not there yet
        more += (request.neighbours - 1) * own
    files = sum(block.parameters for block in work.blocks) if settings.checkpoint_dir else 0
    return Plan(
        model=type(request.model).__name__,
        family=resolve_family(settings.family, request.model).name,
        device=device.type,
        threads=rates.threads,
        tasks=request.tasks,
        samples=request.settings.samples_per_task,
        processes=request.processes,
        neighbours=request.neighbours,
        stages=tuple(predict_stages(work, settings, tasks, machine, solvers=share.solvers)),
        host=peak,
        gpu=None if device.type == "cpu" else on_device,
        own=own,
        more_host=more,
        waiting=waiting,
        parts=memory.parts,
        read=read_bytes(work, settings, request.tasks, mine=tasks),
        disk=waiting["disk"] + files,
        free_host=free_host,
        free_gpu=free_gpu,
        widest=_widest(work),
    )


def count(request: Request) -> Work:
    """What the requested calibration does to one batch."""
    settings = request.settings
    size = min(settings.batch_size, settings.samples_per_task)
    inputs = example_inputs(request.model, size, request.length, request.target_length)
    stored = None
    if request.itemsize is not None:
        tensors = request.model.state_dict()
        stored = {name: t.numel() * request.itemsize for name, t in tensors.items()}
    return count_work(request.model, inputs, settings, stored=stored)


def _widest(work: Work) -> tuple[str, ...]:
    """The calibrated linear modules with the largest statistics, as patterns name them."""
    groups = [group for block in work.blocks for group in block.groups]
    group = max(groups, key=lambda g: (g.width, sum(g.outputs)), default=None)
    return tuple(name.rsplit(".", 1)[-1] for name in group.names) if group else ()


def _waiting(
    request: Request, memory: Memory, chosen: Constants, free_host: int, free_gpu: int | None
) -> dict[str, int]:
    """Where features wait, as `engine.activations` chooses."""
    total, choice = memory.parts["activations"], request.settings.activations
    waiting: dict[str, int] = dict.fromkeys(("device", "host", "disk"), 0)
    if request.device.type == "cpu":
        room = max(0, free_host // request.neighbours - memory.peak)
        room = room if choice == "auto" else total
        waiting["device"] = 0 if choice == "disk" else min(total, room)
    elif choice in ("auto", "device"):
        room = max(0, (free_gpu or 0) - memory.peak) if choice == "auto" else total
        waiting["device"] = min(total, room)
    if request.device.type != "cpu" and choice in ("auto", "host"):
        room = int(HOST_SHARE * free_host / request.neighbours) if choice == "auto" else total
        waiting["host"] = min(total - waiting["device"], room)
    left = memory.carried - round((waiting["device"] + waiting["host"]) / chosen.carried)
    waiting["disk"] = max(0, left)
    return waiting
