"""Measurement of both sides of a ratio, in turns, each in a process of its own.

A script calls itself with `--side NAME` for each measurement and prints the costs as JSON.
"""

import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

Costs = dict[str, float]
"""Name of a figure with its unit -> value."""


def costs_of(work: Callable[[], Any]) -> tuple[Any, Costs]:
    """Return the result of a function, its seconds, and the process's peak resident memory."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    costs = {"wall, s": time.perf_counter() - wall, "CPU, s": time.process_time() - cpu}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return result, costs | {"peak memory, MB": peak / 1e6}


def start(*words: object, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start this script again with its own and further arguments."""
    command = [sys.executable, *sys.argv, *map(str, words)]
    environment = os.environ | dict(env or {})
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for a started script and return the JSON in the last line of its output."""
    output, _ = process.communicate()
    if process.returncode:
        sys.exit(f"{process.args}: exit code {process.returncode}")
    return json.loads(output.splitlines()[-1])


def in_turns(
    sides: Iterable[str], repeats: int, measure: Callable[[str], Costs]
) -> dict[str, Costs]:
    """Measure all sides several times in turns.

    Args:
        sides: Names of the sides.
        repeats: Number of turns.
        measure: Measures one side.

    Returns:
        Side -> figures: the largest of a peak, the least of any other figure.
    """
    turns: dict[str, list[Costs]] = {side: [] for side in sides}
    for _ in range(repeats):
        for side, costs in turns.items():
            costs.append(measure(side))
    return {
        side: {name: (max if "peak" in name else min)(t[name] for t in costs) for name in costs[0]}
        for side, costs in turns.items()
    }


def table(sides: Mapping[str, Costs]) -> str:
    """Return a Markdown table: a row per figure, a column per side, and each side's ratio."""
    first, *others = sides
    heads = ["", first, *(f"{side} | ratio" for side in others)]
    lines = [f"| {' | '.join(heads)} |", f"|---|{'--:|' * (2 * len(sides) - 1)}"]
    for name, base in sides[first].items():
        cells = [f"{base:.1f}"]
        for side in others:
            ratio = f"{sides[side][name] / base:.2f}" if base else "-"
            cells += [f"{sides[side][name]:.1f}", ratio]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def largest_difference(folder: Path, sides: Sequence[str]) -> str:
    """Compare the parameters that two sides stored in a folder, relative to each one's norm."""
    one, other = (load_file(folder / f"{side}.safetensors") for side in sides[:2])
    value, name = max(
        (float((other[n] - tensor).norm() / tensor.norm()), n) for n, tensor in one.items()
    )
    pair = " and ".join(sides[:2])
    return f"Largest relative difference of a parameter, {pair}: {value:.1e} ({name})"


def machine() -> str:
    """Return the machine and torch's version, for the line above a table."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return (
        f"torch {torch.__version__}, {device}, {torch.get_num_threads()} of {os.cpu_count()} "
        f"cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}"
    )
