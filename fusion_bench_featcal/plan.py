"""Plan of a calibration: bytes that its busiest process fetches, reads, writes and keeps in memory.

Computed from names and shapes. No weight is read.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from fusion_bench_featcal.memory import ADVICE, free_bytes
from fusion_bench_featcal.plan_shapes import CPU, Request, Shapes, size_of
from fusion_bench_featcal.plurals import bytes_text, counted

LABELS = {
    "model": "calibrated model",
    "outside": "embeddings of the model and of an expert",
    "loaded": "models loaded whole",
    "features": "features of all samples",
    "batch": "one batch in a block",
    "sums": "sums of a block",
    "solve": "systems of its widest module",
    "block": "a block of the model and of an expert, anchors, new parameters",
}
"""Titles of the parts of a calibration's memory."""


@dataclass(frozen=True)
class Plan:
    """Sizes in bytes, of the busiest process."""

    model: str  # class of the model
    family: str
    device: str
    tasks: int
    samples: int  # largest number per task
    processes: int
    parts: Mapping[str, int]  # memory, by the keys of `LABELS`
    storage: str  # of features: `device`, `host` or `disk`
    host: int  # peak host memory of a process, with its libraries and the merged model
    gpu: int | None  # peak device memory; None on a CPU
    more_host: int  # host memory that is still to be allocated
    free_host: int
    free_gpu: int | None
    fetched: int  # from the hub
    read: int  # from experts
    base_read: int
    disk: int  # files of the run: stored features, and blocks in `checkpoint_dir`
    output: int  # file of the calibrated model

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def plan_of(request: Request) -> Plan:
    """Plan a calibration.

    Raises:
        CalibrationError: If the model cannot be calibrated, or a read budget is too small.
        ValueError: If the model's inputs are unknown, or no family fits it.
    """
    shapes, settings, device = Shapes.of(request), request.settings, request.device
    size, on_cpu = shapes.size, device.type == "cpu"
    kept = size * (not request.streamed)  # the calibrated model, where it is not written away
    parts = {"model": kept, "loaded": request.whole * size, **shapes.memory()}
    parts["outside"] = shapes.outside * (1 + shapes.runs_experts)
    resident = psutil.Process().memory_info().rss
    at_host = settings.activations == "host" and not on_cpu
    storage = "host" if at_host else "disk" if settings.activations == "disk" else "device"
    together = parts.pop("together")
    busy = parts["block"] + max(parts["batch"], parts["solve"])
    busy += together if storage == "device" else parts["sums"]
    busy = max(busy, parts["outside"])
    whole = (not request.streamed) + request.whole - request.loaded
    host = resident + kept + whole * size + parts["features"] * at_host
    host += busy if on_cpu else max(parts["block"], parts["outside"])
    blocks = size_of(p for b in shapes.modules for p in shapes.model.get_submodule(b).parameters())
    disk = parts["features"] * (storage == "disk") + blocks * bool(settings.checkpoint_dir)
    read, base_read = shapes.reads()
    return Plan(
        model=type(request.model).__name__,
        family=shapes.family.name,
        device=device.type,
        tasks=request.tasks,
        samples=max(shapes.samples),
        processes=request.processes,
        parts=parts,
        storage=storage,
        host=host,
        gpu=None if on_cpu else busy,
        more_host=request.processes * (host - resident),
        free_host=free_bytes(CPU) or 0,
        free_gpu=None if on_cpu else free_bytes(device),
        fetched=request.fetches * size * shapes.stored // shapes.itemsize,
        read=math.ceil(read * request.share),
        base_read=base_read,
        disk=disk,
        output=size,
    )


def one_line(plan: Plan) -> str:
    """Return the log line of a plan."""
    gpu = "" if plan.gpu is None else f", {bytes_text(plan.gpu)} of GPU memory"
    disk = f", {bytes_text(plan.disk)} on disk" if plan.disk else ""
    process = f" in the busiest of {plan.processes} processes" if plan.processes > 1 else ""
    return (
        f"plan{process}: {bytes_text(plan.host)} of host memory{gpu}{disk}, "
        f"{bytes_text(plan.read)} read from experts"
    )


def warnings_of(plan: Plan) -> list[str]:
    """Return warnings of insufficient memory for a process, with the settings that lower it."""
    needs = [("host", plan.more_host, plan.free_host), ("GPU", plan.gpu, plan.free_gpu)]
    return [
        f"the calibration is predicted to need {bytes_text(needed)} more {kind} memory, "
        f"{bytes_text(free)} are free. {ADVICE}"
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
        console.print(f"{plan.processes} processes. Sizes are of the busiest one")
    rows = {label: plan.parts[part] for part, label in LABELS.items() if plan.parts[part]}
    rows[f"peak host memory ({bytes_text(plan.free_host)} are free)"] = plan.host
    if plan.gpu is not None:
        rows["peak GPU memory"] = plan.gpu
    rows |= {"fetched from the hub": plan.fetched} if plan.fetched else {}
    rows |= {"read from experts": plan.read, "read from the base": plan.base_read}
    rows |= {"files of the run": plan.disk, "the calibrated model's file": plan.output}
    table = Table("memory and files", "size")
    table.columns[1].justify = "right"
    for label, size in rows.items():
        suffix = f" ({plan.storage})" if label == LABELS["features"] else ""
        table.add_row(label + suffix, bytes_text(size))
    console.print(table)
    for warning in warnings_of(plan):
        console.print(f"warning: {warning}")
