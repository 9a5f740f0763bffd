"""A plan for people to read: tables, or one line."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from fusion_bench_featcal.plan.prediction import Plan

_STEPS = {
    "reading": "reading experts",
    "stem": "up to the first block",
    "passes": "block passes, both sides",
    "moments": "sums over rows",
    "folds": "folding tasks in",
    "solves": "solving",
    "update": "passes of updated blocks",
}
_PARTS = {
    "model": "calibrated copy of the model",
    "experts": "models loaded whole",
    "activations": "features of all samples",
    "batch": "one batch in a block",
    "statistics": "sums and systems of a block",
    "block": "an expert's block, anchors, new parameters",
}


def show_plan(plan: Plan, console: Console | None = None) -> None:
    """Print a plan's tables.

    Args:
        plan: The plan.
        console: Where to; None: standard output.
    """
    console = console or Console()
    console.print(
        f"{plan.model}, family {plan.family}: {plan.tasks} tasks x {plan.samples} samples on "
        f"{plan.device}" + (f", {plan.threads} threads" if plan.device == "cpu" else "")
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
    """What a run's log says at its start."""
    gpu = "" if plan.gpu is None else f", {size(plan.gpu)} of GPU memory"
    disk = f", {size(plan.disk)} on disk" if plan.disk else ""
    whose = f" in the busiest of {plan.processes} processes" if plan.processes > 1 else ""
    return (
        f"plan{whose}: about {duration(plan.seconds)} of calibration, {size(plan.host)} of host "
        f"memory{gpu}{disk}, {size(plan.read)} read from experts"
    )


def warnings_of(plan: Plan) -> list[str]:
    """Where a plan exceeds what is free, with the settings that lower it."""
    found = []
    if plan.more_host > plan.free_host:
        found.append(_too_much("host", plan.more_host, plan.free_host, plan))
    if plan.gpu is not None and plan.free_gpu is not None and plan.gpu > plan.free_gpu:
        found.append(_too_much("GPU", plan.gpu, plan.free_gpu, plan))
    return found


def _too_much(kind: str, wanted: int, free: int, plan: Plan) -> str:
    return (
        f"the calibration is predicted to need {size(wanted)} more {kind} memory, {size(free)} "
        f"are free. {advice(plan.parts, plan.waiting)}"
    )


def advice(parts: Mapping[str, int], waiting: Mapping[str, int]) -> str:
    """Which settings lower the largest parts.

    Args:
        parts: Bytes by part.
        waiting: Where features wait.

    Returns:
        A sentence for messages.
    """
    settings = {
        "activations": "method.activations=disk or a lower method.samples_per_task",
        "batch": "a lower method.batch_size",
        "experts": "method.stream_experts=true",
        "statistics": "method.modules without the widest modules",
    }
    if not waiting.get("device", 1) + waiting.get("host", 0):
        del settings["activations"]  # they wait on disk already
    largest = sorted((name for name in settings if parts[name]), key=lambda n: -parts[n])[:3]
    named = [f"{_PARTS[name]}, {size(parts[name])} ({settings[name]})" for name in largest]
    return f"What settings lower, the largest first: {'; '.join(named)}"


def size(count: float) -> str:
    """Bytes for people."""
    for unit, step in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= step:
            return (
                f"{count / step:.2f} {unit}" if count < 10 * step else f"{count / step:.1f} {unit}"
            )
    return f"{count / 1024:.0f} KiB"


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def _time_table(plan: Plan) -> Table:
    several = len(plan.stages) > 1
    table = Table(title="time", title_justify="left")
    table.add_column("step")
    names = [f"stage {index}" for index in range(len(plan.stages))] if several else []
    for name in (*names, "all"):
        table.add_column(name, justify="right")

    def row(label: str, values: Sequence[float]) -> None:
        shown = values if several else []
        table.add_row(label, *map(duration, shown), duration(sum(values)))

    for step, label in _STEPS.items():
        row(label, [stage[step] for stage in plan.stages])
    row("together", [sum(stage.values()) for stage in plan.stages])
    return table


def _memory_table(plan: Plan) -> Table:
    table = Table(title="memory and files", title_justify="left")
    table.add_column("part")
    table.add_column("size", justify="right")
    table.add_row("this process, with the libraries", size(plan.own))
    for part, label in _PARTS.items():
        if plan.parts[part]:
            where = ""
            if part == "activations":
                used = [place for place, held in plan.waiting.items() if held]
                where = f" ({', '.join(used)})" if used else ""
            table.add_row(label + where, size(plan.parts[part]))
    table.add_row("host memory, at its fullest", f"{size(plan.host)}")
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
        caption="memory at its fullest; read: from experts, at most; model: to rounding",
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
