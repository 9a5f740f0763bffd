"""Plan of a calibration: the busiest process's downloads, reads, writes and memory, in bytes.

Computed from names and shapes. No weight is read.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from fusion_bench_featcal.files import existing, free_space
from fusion_bench_featcal.memory import ADVICE, free_bytes, free_swap
from fusion_bench_featcal.plan_shapes import CPU, Request, Shapes
from fusion_bench_featcal.plurals import bytes_text, counted
from fusion_bench_featcal.settings import CalibrationError

LABELS = {
    "model": "calibrated model",
    "outside": "embeddings",
    "loaded": "models loaded whole",
    "features": "features of all samples",
    "batch": "one batch in a block",
    "sums": "sums of a block",
    "solve": "matrices of its widest solve",
    "block": "a block of the model and of an expert",
    "weights": "anchors and new parameters of its modules",
}
"""Titles of the components of a calibration's memory."""

LIBRARIES = 60 * 2**20
"""Bytes of code and buffers of torch's libraries, loaded with the first block."""

MARGIN = 0.15
"""Relative tolerance of a planned peak. A run is only refused if the memory is shorter."""


@dataclass(frozen=True)
class Need:
    """Bytes that a run needs of one resource."""

    resource: str  # `host memory`, `GPU memory`, `disk space in FOLDER`
    needed: int
    free: int
    limit: int | None  # a run that needs more is refused, None without a limit
    advice: str

    @property
    def is_lacking(self) -> bool:
        """Return whether more is needed than is free."""
        return self.needed > self.free

    def __str__(self) -> str:
        """Return a sentence with the settings that reduce the need."""
        needed, free = bytes_text(self.needed), bytes_text(self.free)
        return f"the run needs {needed} of {self.resource}, {free} are free. {self.advice}"


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
    gpu: int | None  # peak device memory, or None on a CPU
    fetched: int  # from the hub
    read: int  # from experts
    base_read: int
    disk: int  # files of the run: stored features, and the model in `checkpoint_dir`
    output: int  # file of the calibrated model
    needs: tuple[Need, ...]  # host memory first

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
    size, on_cpu, memory = shapes.size, device.type == "cpu", shapes.memory()
    kept_model = size * (not request.streamed)  # 0 if the calibrated model is written by block
    components = {"model": kept_model, "loaded": request.whole * size}
    components |= {part: memory[part] for part in LABELS if part not in components}
    resident = psutil.Process().memory_info().rss
    busy = max(memory["busy"], memory["begin"])
    whole = (not request.streamed) + request.whole - request.loaded
    host = (
        kept_model + whole * size + components["features"] * (request.storage == "host") + LIBRARIES
    )
    host += busy if on_cpu else max(components["block"], components["outside"])
    on_disk = components["features"] * (request.storage == "disk")
    free, free_gpu = free_bytes(CPU) or 0, None if on_cpu else free_bytes(device)
    # Other systems extend swap space by themselves, and processes may be on several machines.
    is_exact = sys.platform == "linux" and request.processes == 1
    limit = int((1 + MARGIN) * (free + free_swap())) if is_exact else None
    needs = [Need("host memory", request.processes * host, free, limit, ADVICE)]
    if free_gpu is not None:  # only a warning: some GPUs share the host's memory
        needs.append(Need("GPU memory", busy, free_gpu, None, ADVICE))
    read, base_read = shapes.reads()
    return Plan(
        model=type(request.model).__name__,
        family=shapes.family.name,
        device=device.type,
        tasks=request.tasks,
        samples=max(shapes.samples),
        processes=request.processes,
        parts=components,
        storage=request.storage,
        host=resident + host,
        gpu=None if on_cpu else busy,
        fetched=request.fetches * size * shapes.stored // shapes.itemsize,
        read=math.ceil(read * request.share),
        base_read=base_read,
        disk=on_disk + size * bool(settings.checkpoint_dir),
        output=size,
        needs=(*needs, *disks_of(request, on_disk, size)),
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


def disks_of(request: Request, features: int, size: int) -> list[Need]:
    """Return a run's needs of each disk, for stored features and for the model."""
    out, blocks = request.out, request.settings.checkpoint_dir
    files = list[tuple[str, int, str]]()
    if features:
        folder = request.settings.activations_dir or gettempdir()
        files.append((folder, features, "method.activations_dir"))
    if blocks is not None:  # a resumed run has already written some
        size -= sum(path.stat().st_size for path in Path(blocks).glob("*.safetensors"))
        files.append((blocks, max(0, size), "--out" if out else "method.checkpoint_dir"))
    if out is not None:
        files.append((str(out), request.saved, "--out"))
    by_disk = dict[int, list[tuple[str, int, str]]]()
    for file in files:
        by_disk.setdefault(existing(Path(file[0])).stat().st_dev, []).append(file)
    needs = []
    for on_disk in by_disk.values():
        folders, sizes, settings = zip(*on_disk, strict=True)
        free, advice = free_space(Path(folders[0])), " or ".join(dict.fromkeys(settings))
        advice = f"Name a folder on another disk by {advice}"
        limit = free if request.processes == 1 else None
        needs.append(Need(f"disk space in {folders[0]}", sum(sizes), free, limit, advice))
    return needs


def check(plan: Plan) -> list[str]:
    """Return a sentence for each resource that is short.

    Raises:
        CalibrationError: If a need exceeds a resource's limit, so that the run cannot succeed.
    """
    lacking = [need for need in plan.needs if need.is_lacking]
    for need in lacking:
        if need.limit is not None and need.needed > need.limit:
            raise CalibrationError(f"nothing was calibrated: {need}")
    return list(map(str, lacking))


def show_plan(plan: Plan, console: Console | None = None) -> None:
    """Print a plan's table to a console, by default on standard output."""
    console = console or Console()
    console.print(
        f"{plan.model}, family {plan.family}: {counted(plan.tasks, 'task')} x "
        f"{counted(plan.samples, 'sample')} on {plan.device}"
    )
    if plan.processes > 1:
        console.print(f"{plan.processes} processes. Sizes are of the busiest one")
    rows = {label: plan.parts[part] for part, label in LABELS.items() if plan.parts[part]}
    rows[f"peak host memory ({bytes_text(plan.needs[0].free)} are free)"] = plan.host
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
    for need in plan.needs:
        if need.is_lacking:
            console.print(f"warning: {need}")
