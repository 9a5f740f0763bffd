"""A plan for people to read: tables, or one line."""

from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from fusion_bench_featcal.plan.advice import LABELS, advice, size
from fusion_bench_featcal.plan.estimate import WORTH, Plan
from fusion_bench_featcal.plurals import counted

_STEPS = {
    "stem": "up to the first block",
    "passes": "block passes, both sides",
    "moments": "sums over rows",
    "folds": "folding tasks in",
    "solves": "solving",
    "update": "passes of updated blocks",
}


def show_plan(plan: Plan, console: Console | None = None) -> None:
    """Print a plan's tables to a console; None: standard output."""
    console = console or Console()
    threads = f", {counted(plan.threads, 'thread')}" if plan.device == "cpu" else ""
    console.print(
        f"{plan.model}, family {plan.family}: {counted(plan.tasks, 'task')} x "
        f"{counted(plan.samples, 'sample')} on {plan.device}{threads}"
    )
    if plan.processes > 1:
        console.print(f"{plan.processes} processes; what follows is for the busiest of them")
    if plan.calibrations > 1:
        console.print(
            f"at most {plan.calibrations} calibrations (method.trials); seconds by step and parts "
            "of memory are of one of them"
        )
    console.print(_time_table(plan))
    console.print(_memory_table(plan))
    if plan.levers:
        console.print(_lever_table(plan))
    for warning in warnings_of(plan):
        console.print(f"warning: {warning}")


def one_line(plan: Plan) -> str:
    """The line that a run logs at its start."""
    gpu = "" if plan.gpu is None else f", {size(plan.gpu)} of GPU memory"
    disk = f", {size(plan.disk)} on disk" if plan.disk else ""
    whose = f" in the busiest of {plan.processes} processes" if plan.processes > 1 else ""
    return (
        f"plan{whose}: roughly {duration(plan.seconds)} of calibration, {size(plan.host)} of host "
        f"memory{gpu}{disk}, {size(plan.read)} read from experts"
    )


def warnings_of(plan: Plan) -> list[str]:
    """Sentences on memory that is not free, with the settings that lower it."""
    needs = [("host", plan.more_host, plan.free_host), ("GPU", plan.gpu, plan.free_gpu)]
    on_disk = not plan.waiting["device"] + plan.waiting["host"]
    return [
        f"the calibration is predicted to need {size(needed)} more {kind} memory, {size(free)} "
        f"are free. {advice(plan.parts, on_disk=on_disk)}"
        for kind, needed, free in needs
        if needed is not None and free is not None and needed > free
    ]


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def _time_table(plan: Plan) -> Table:
    rows = {label: [stage[step] for stage in plan.stages] for step, label in _STEPS.items()}
    rows["together"] = [sum(stage.values()) for stage in plan.stages]
    several = len(plan.stages) > 1
    stages = [f"stage {index}" for index in range(len(plan.stages) * several)]
    table = _table("time, roughly", "step", [*stages, "all"])
    for label, values in rows.items():
        table.add_row(label, *map(duration, values * several), duration(sum(values)))
    if plan.calibrations > 1:
        blank = [""] * (len(plan.stages) * several)
        table.add_row("all calibrations, at most", *blank, duration(plan.seconds))
    return table


def _memory_table(plan: Plan) -> Table:
    places = ", ".join(place for place, held in plan.waiting.items() if held)
    rows: dict[str, int | None] = {"this process, with the libraries": plan.own}
    for part, label in LABELS.items():
        where = f" ({places})" if part == "activations" else ""
        rows[label + where] = plan.parts[part] or None
    rows["host memory, at its fullest"] = plan.host
    if plan.neighbours > 1:
        several = f"the same of {plan.neighbours} processes on a machine, at most"
        rows[several] = plan.neighbours * plan.host
    rows["GPU memory, at its fullest"] = plan.gpu
    rows |= {"read from experts": plan.read, "files written": plan.disk}
    table = _table("memory and files", "part", ["size"])
    for label, count in rows.items():
        if count is not None:
            table.add_row(label, size(count))
    return table


def _lever_table(plan: Plan) -> Table:
    gpu = ["GPU"] if plan.gpu is not None else []
    table = _table("what changes what", "method.", ["time", "host", *gpu, "read", "model"])
    table.caption, table.caption_justify = (
        "changes; memory at its fullest; =: within 2 %; model: to rounding", "left"
    )  # fmt: skip
    host = plan.host - plan.own  # of which a setting may lower something
    for lever in plan.levers:
        changes = [_change(lever.seconds - plan.seconds, plan.seconds, duration)]
        changes.append(_change(lever.host - plan.host, host, size))
        if plan.gpu is not None:
            changes.append(_change((lever.gpu or 0) - plan.gpu, plan.gpu, size))
        changes.append(_change(lever.read - plan.read, plan.read, size))
        table.add_row(lever.setting, *changes, "the same" if lever.same_model else "another")
    return table


def _change(change: float, old: float, text: Callable[[float], str]) -> str:
    """A change with its sign, as text of its unit."""
    if abs(change) <= WORTH * old:
        return "="
    return f"{'+' if change > 0 else '-'}{text(abs(change))}"


def _table(title: str, first: str, others: list[str]) -> Table:
    table = Table(first, title=title, title_justify="left")
    for name in others:
        table.add_column(name, justify="left" if name == "model" else "right")
    return table
