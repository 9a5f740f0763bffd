"""Plan of a calibration: bytes to fetch, to read and to write, from names and shapes alone."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.plurals import bytes_text, counted
from fusion_bench_featcal.experts import known_bytes
from fusion_bench_featcal.experts.budget import granted
from fusion_bench_featcal.families import resolve_family, stages_of
from fusion_bench_featcal.families.open_clip import split
from fusion_bench_featcal.files import existing, free_space
from fusion_bench_featcal.modules.models import names_in_order
from fusion_bench_featcal.modules.sites import find_all_modules
from fusion_bench_featcal.rules import rule_of
from fusion_bench_featcal.settings import FeatCalSettings


@dataclass(frozen=True)
class Plan:
    """Sizes in bytes.

    Attributes:
        model: Class of the model.
        family: Its family.
        tasks: Number of tasks.
        fetched: To fetch from the hub.
        read: To read from experts, all of them together.
        base_read: To read from the base.
        output: The calibrated model.
        free: Free space of the disk with the output folder, or None without one.
        folder: That folder.
    """

    model: str
    family: str
    tasks: int
    fetched: int
    read: int
    base_read: int
    output: int
    free: int | None = None
    folder: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def plan_of(
    model: nn.Module,
    settings: FeatCalSettings,
    tasks: Sequence[str],
    *,
    itemsize: int | None = None,
    fetches: int = 0,
    out: Path | None = None,
) -> Plan:
    """Plan a calibration.

    Args:
        model: The merged model's structure, on any device.
        settings: Settings.
        tasks: The tasks.
        itemsize: Bytes of a number in the models' files, by default as in the structure.
        fetches: Number of whole models to fetch from the hub.
        out: Folder of the calibrated model, by default `settings.checkpoint_dir`.

    Raises:
        CalibrationError: If the model cannot be calibrated, or a read budget is too small.
        ValueError: If no family fits the model.
    """
    family, rule = resolve_family(settings.family, model), rule_of(settings)
    arranged = split(model)
    stages = stages_of(family, arranged)
    modules = find_all_modules(arranged, stages, settings, calibrate_norm=rule.calibrate_norm)
    runs_experts = rule.runs_experts
    names = names_in_order(arranged, stages, modules, runs_experts=runs_experts)
    solved = {name for of_block in modules.values() for s in of_block.sites for name in s.names}
    tensors, stored = arranged.state_dict(keep_vars=True), model.state_dict(keep_vars=True)

    def size(name: str, tensors: Any = tensors) -> int:
        return tensors[name].numel() * (itemsize or tensors[name].element_size())

    sizes = {task: {name: (str(id(tensors[name])), size(name)) for name in names} for task in tasks}
    whole = sum({id(t): size(name, stored) for name, t in stored.items()}.values())
    folder = out or (Path(settings.checkpoint_dir) if settings.checkpoint_dir else None)
    return Plan(
        model=type(model).__name__,
        family=family.name,
        tasks=len(tasks),
        fetched=fetches * whole,
        read=granted(settings.expert_read_budget, sizes).bytes or 0,
        base_read=sum(map(size, solved)) if rule.reads_base else 0,
        output=whole,
        free=None if folder is None else free_space(existing(folder)),
        folder="" if folder is None else str(folder),
    )


def stored_itemsize(source: Any) -> int | None:
    """Return the bytes per number in a source's files, or None if unknown."""
    try:
        name = min(source.names())
        return known_bytes(source, name) // math.prod(source.shape(name))
    except (AttributeError, ValueError, ZeroDivisionError, CalibrationError):
        return None


def check(plan: Plan) -> None:
    """Refuse a run whose model has no room on its disk.

    Raises:
        CalibrationError: Naming the folder.
    """
    if plan.free is not None and plan.free < plan.output:
        raise CalibrationError(
            f"nothing was calibrated: the run needs {bytes_text(plan.output)} of disk space in "
            f"{plan.folder}, {bytes_text(plan.free)} are free. Name a folder on another disk"
        )


def one_line(plan: Plan) -> str:
    """Return the log line of a plan."""
    fetched = f"{bytes_text(plan.fetched)} to fetch, " if plan.fetched else ""
    return f"plan: {fetched}{bytes_text(plan.read)} read from experts"


def show_plan(plan: Plan, console: Console | None = None) -> None:
    """Print a plan's table to a console, by default on standard output."""
    console = console or Console()
    console.print(f"{plan.model}, family {plan.family}: {counted(plan.tasks, 'task')}")
    rows = {
        "to fetch from the hub": plan.fetched,
        "read from experts": plan.read,
        "read from the base": plan.base_read,
        "the calibrated model": plan.output,
        f"free in {plan.folder}": plan.free,
    }
    table = Table("files", "size")
    table.columns[1].justify = "right"
    for label, size in rows.items():
        if size or (size is not None and label != "to fetch from the hub"):
            table.add_row(label, bytes_text(size))
    console.print(table)
