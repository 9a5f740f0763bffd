"""Plan of a calibration: what its busiest process reads and writes, and how much memory it takes.

Everything follows from names and shapes: no weight is read and no model runs.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from fusion_bench_featcal.memory import free_bytes, memory_advice
from fusion_bench_featcal.plan_shapes import CPU, Request, Shapes
from fusion_bench_featcal.plurals import bytes_text, counted

LABELS = {
    "model": "calibrated copy of the model",
    "loaded": "models loaded whole",
    "features": "features of all samples",
    "batch": "one batch in a block",
    "sums": "sums of a block",
    "solve": "systems of its widest module",
    "block": "an expert's block, anchors, new parameters",
}
"""Parts of a calibration's memory, for people."""


@dataclass(frozen=True)
class Plan:
    """Sizes in bytes, of the busiest process."""

    model: str
    family: str
    device: str
    tasks: int
    samples: int  # most of a task
    processes: int
    neighbours: int
    parts: Mapping[str, int]  # memory by the names in `LABELS`
    waiting: Mapping[str, int]  # features on `device`, `host` or `disk`
    host: int  # host memory at its fullest: this process, the merged model and the calibration
    gpu: int | None  # device memory at its fullest; None on a CPU
    more_host: int  # what this machine's processes will need beside what is in use
    free_host: int
    free_gpu: int | None
    fetched: int  # from the hub
    read: int  # from experts
    base_read: int
    disk: int  # files of the run: waiting features, and blocks that `checkpoint_dir` keeps
    output: int  # the calibrated model's file
    advice: str  # which settings lower the memory

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, fit for JSON."""
        return asdict(self)


def plan_of(request: Request) -> Plan:
    """Plan a calibration.

    Raises:
        CalibrationError: If the model cannot be calibrated, or a read budget is too small.
        ValueError: If the model's inputs are unknown, or no family fits it.
    """
    shapes, settings, device = Shapes.of(request), request.settings, request.device
    size, on_cpu, neighbours = shapes.size, device.type == "cpu", request.neighbours
    share = math.ceil(request.tasks / request.processes) / request.tasks
    whole = math.ceil(request.held * share) + request.base_held
    parts = {"model": size, "loaded": whole * size, **shapes.memory()}
    resident, free_host = psutil.Process().memory_info().rss, free_bytes(CPU) or 0
    free_gpu = None if on_cpu else free_bytes(device)
    busy = size + parts["block"] + parts["sums"] + max(parts["batch"], parts["solve"])
    waiting = _waiting(request, parts["features"])
    busy += waiting["device"]
    host = resident + (1 + whole - request.loaded) * size + waiting["host"]
    host += busy if on_cpu else parts["block"]
    unstarted = 0 if request.loaded else (neighbours - 1) * resident  # those that have not begun
    read, base_read = shapes.reads()
    storage = max(waiting, key=lambda name: waiting[name])
    return Plan(
        model=type(request.model).__name__,
        family=shapes.family.name,
        device=device.type,
        tasks=request.tasks,
        samples=max(shapes.samples),
        processes=request.processes,
        neighbours=neighbours,
        parts=parts,
        waiting=waiting,
        host=host,
        gpu=None if on_cpu else busy,
        more_host=neighbours * (host - resident) + unstarted,
        free_host=free_host,
        free_gpu=free_gpu,
        fetched=request.fetches * size * shapes.stored // shapes.itemsize,
        read=math.ceil(read * share),
        base_read=base_read,
        disk=waiting["disk"] + shapes.blocks * bool(settings.checkpoint_dir),
        output=size,
        advice=memory_advice(settings.replace(activations=storage), device),
    )


def _waiting(request: Request, size: int) -> dict[str, int]:
    """Return the bytes of features by place."""
    activations, device = request.settings.activations, request.device
    on_device = activations == "auto" or (activations == "host" and device.type == "cpu")
    chosen = "device" if on_device else activations
    return {storage: size * (storage == chosen) for storage in ("device", "host", "disk")}


def one_line(plan: Plan) -> str:
    """Return the line that a run logs at its start."""
    gpu = "" if plan.gpu is None else f", {bytes_text(plan.gpu)} of GPU memory"
    disk = f", {bytes_text(plan.disk)} on disk" if plan.disk else ""
    whose = f" in the busiest of {plan.processes} processes" if plan.processes > 1 else ""
    return (
        f"plan{whose}: {bytes_text(plan.host)} of host memory{gpu}{disk}, "
        f"{bytes_text(plan.read)} read from experts"
    )


def warnings_of(plan: Plan) -> list[str]:
    """Return sentences on memory that is not free, with the settings that lower it."""
    needs = [("host", plan.more_host, plan.free_host), ("GPU", plan.gpu, plan.free_gpu)]
    return [
        f"the calibration is predicted to need {bytes_text(needed)} more {kind} memory, "
        f"{bytes_text(free)} are free. {plan.advice}"
        for kind, needed, free in needs
        if needed is not None and free is not None and needed > free
    ]


def show_plan(plan: Plan, console: Console | None = None) -> None:
    """Print a plan's table to a console; None: standard output."""
    console = console or Console()
    console.print(
        f"{plan.model}, family {plan.family}: {counted(plan.tasks, 'task')} x "
        f"{counted(plan.samples, 'sample')} on {plan.device}"
    )
    if plan.processes > 1:
        console.print(f"{plan.processes} processes; what follows is for the busiest of them")
    storage = next((name for name, size in plan.waiting.items() if size), "device")
    rows = {label: plan.parts[part] for part, label in LABELS.items() if plan.parts[part]}
    rows[f"host memory, at its fullest, of {bytes_text(plan.free_host)} free"] = plan.host
    if plan.neighbours > 1:
        together = f"the same of {plan.neighbours} processes on a machine, at most"
        rows[together] = plan.neighbours * plan.host
    if plan.gpu is not None:
        rows["GPU memory, at its fullest"] = plan.gpu
    rows |= {"fetched from the hub": plan.fetched} if plan.fetched else {}
    rows |= {"read from experts": plan.read, "read from the base": plan.base_read}
    rows |= {"files of the run": plan.disk, "the calibrated model's file": plan.output}
    table = Table("memory and files", "size")
    table.columns[1].justify = "right"
    for label, size in rows.items():
        where = f" ({storage})" if label == LABELS["features"] else ""
        table.add_row(label + where, bytes_text(size))
    console.print(table)
    for warning in warnings_of(plan):
        console.print(f"warning: {warning}")
