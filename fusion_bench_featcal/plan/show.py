"""A plan for people to read: tables, or one line."""

from rich.console import Console
from rich.table import Table

from fusion_bench_featcal.plan.advice import LABELS, advice, size
from fusion_bench_featcal.plan.estimate import Plan

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
    threads = f", {plan.threads} threads" if plan.device == "cpu" else ""
    console.print(
        f"{plan.model}, family {plan.family}: {plan.tasks} tasks x {plan.samples} samples on "
        f"{plan.device}{threads}"
    )
    if plan.processes > 1:
        console.print(f"{plan.processes} processes; what follows is for the busiest of them")
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
    several = len(plan.stages) > 1
    table = Table("step", title="time, roughly", title_justify="left")
    for index in range(len(plan.stages) * several):
        table.add_column(f"stage {index}", justify="right")
    table.add_column("all", justify="right")
    rows = {label: [stage[step] for stage in plan.stages] for step, label in _STEPS.items()}
    rows["together"] = [sum(stage.values()) for stage in plan.stages]
    for label, values in rows.items():
        table.add_row(label, *map(duration, values * several), duration(sum(values)))
    return table


def _memory_table(plan: Plan) -> Table:
    table = Table("part", title="memory and files", title_justify="left")
    table.add_column("size", justify="right")
    table.add_row("this process, with the libraries", size(plan.own))
    places = ", ".join(place for place, held in plan.waiting.items() if held)
    for part, label in LABELS.items():
        if plan.parts[part]:
            where = f" ({places})" if part == "activations" else ""
            table.add_row(label + where, size(plan.parts[part]))
    table.add_row("host memory, at its fullest", size(plan.host))
    if plan.neighbours > 1:
        all_of_them = f"the same of {plan.neighbours} processes on a machine, at most"
        table.add_row(all_of_them, size(plan.neighbours * plan.host))
    if plan.gpu is not None:
        table.add_row("GPU memory, at its fullest", size(plan.gpu))
    table.add_row("read from experts", size(plan.read))
    table.add_row("files written", size(plan.disk))
    return table


def _lever_table(plan: Plan) -> Table:
    table = Table(
        title="what lowers what",
        title_justify="left",
        caption="memory at its fullest; model: to rounding",
        caption_justify="left",
    )
    table.add_column("method.", min_width=24)
    for name in ("time", "host", *([] if plan.gpu is None else ["GPU"]), "read", "model"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for lever in plan.levers:
        gpu = [] if plan.gpu is None else [size(lever.gpu or 0)]
        same = "the same" if lever.same_model else "another"
        cells = (duration(lever.seconds), size(lever.host), *gpu, size(lever.read), same)
        table.add_row(lever.setting, *cells)
    return table
