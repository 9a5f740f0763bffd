"""How do time and peak memory grow in tasks, samples, width and depth?

    python benchmarks/scaling.py [--turns 1] [--out FILE] [base point as in speed_models.py]

Random vision towers in safetensors files, one factor at a time around a base point, a process for
each point. Seconds are CPU seconds of `calibrate`; memory is the largest resident set, and its rise
over what was there before: libraries and the merged model. The exponent is that between a row and
the one before it: 1 is growth in proportion.
"""

import argparse
import dataclasses
import json
import math
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from speed_models import Shape, load, write_models

from fusion_bench_featcal import SafetensorsExpert, calibrate
from fusion_bench_featcal.results import measure

MB = 1e6
FACTORS = {
    "tasks": (2, 4, 8, 16),
    "samples": (8, 16, 32, 64, 128),
    "width": (192, 384, 768),
    "layers": (2, 4, 8, 12),
}


def points(base: Shape, factors: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, int, Shape]]:
    """Factor, value and shape of every point; the base's own value is among each factor's."""
    for factor, values in factors.items():
        for value in sorted({*values, getattr(base, factor)}):
            changes = {factor: value}
            if factor == "width":
                changes |= {"inner": 4 * value, "heads": max(1, value // 64)}
            yield factor, value, dataclasses.replace(base, **changes)


def calibrated(shape: Shape, folder: Path) -> dict[str, float]:
    """Seconds and bytes of one calibration, in a process of its own."""
    merged = load(shape, folder / "merged")
    tasks = [f"task_{index}" for index in range(shape.tasks)]
    batches: Any = {task: shape.batches(task) for task in tasks}
    settings = shape.settings(log_drift=True)
    base = SafetensorsExpert(folder / "base")
    experts = {task: SafetensorsExpert(folder / task) for task in tasks}
    before = psutil.Process().memory_info().rss
    start = time.process_time()
    with measure() as cost:
        calibrate(merged, base, experts, batches, settings, progress=False)
    seconds = time.process_time() - start
    assert isinstance(cost.peak_rss_bytes, int)
    return {
        "seconds": seconds,
        "peak": cost.peak_rss_bytes,
        "rise": cost.peak_rss_bytes - before,
    }


def point(shape: Shape, turns: int) -> dict[str, float]:
    """The least of some turns at one point."""
    with tempfile.TemporaryDirectory() as folder:
        write_models(shape, Path(folder))
        command = [sys.executable, __file__, "--child", folder, *shape.arguments()]
        found = []
        for _ in range(turns):
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
    return {key: min(row[key] for row in found) for key in found[0]}


def exponent(before: tuple[int, float], here: tuple[int, float]) -> float:
    """The power by which a cost grew between two values of a factor."""
    return math.log(here[1] / before[1]) / math.log(here[0] / before[0])


def rows(base: Shape, factors: dict[str, tuple[int, ...]], turns: int) -> Iterator[str]:
    """Rows of the table, as they are measured."""
    known: dict[Shape, dict[str, float]] = {}
    at_base = known[base] = point(base, turns)
    previous: tuple[str, int, dict[str, float]] | None = None
    for factor, value, shape in points(base, factors):
        found = known[shape] = known.get(shape) or point(shape, turns)
        grown = ["", ""]
        if previous is not None and previous[0] == factor:
            grown = [
                f"{exponent((previous[1], previous[2][key]), (value, found[key])):.2f}"
                for key in ("seconds", "rise")
            ]
        previous = factor, value, found
        yield (
            f"| {factor} | {value}{' (base)' if shape == base else ''} | {found['seconds']:.2f} "
            f"| {found['seconds'] / at_base['seconds']:.2f} | {grown[0]} "
            f"| {found['peak'] / MB:.0f} | {found['rise'] / MB:.0f} "
            f"| {found['rise'] / at_base['rise']:.2f} | {grown[1]} |"
        )


def chosen_factors(options: argparse.Namespace) -> dict[str, tuple[int, ...]]:
    """The values that the command line gives, or the usual ones."""
    given = {factor: getattr(options, f"vary_{factor}") for factor in FACTORS}
    if any(values is not None for values in given.values()):
        return {factor: tuple(values) for factor, values in given.items() if values is not None}
    return FACTORS


def main() -> None:
    """Print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    Shape.add_arguments(parser)
    parser.set_defaults(layers=4, width=384, inner=1536, heads=6, tasks=4, samples=16)
    for factor in FACTORS:
        parser.add_argument(f"--vary-{factor}", type=int, nargs="+")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    base = Shape.of(options)
    if options.child is not None:
        print(json.dumps(calibrated(base, options.child)))
        return
    lines = [
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{torch.get_num_threads()} threads, {psutil.cpu_count()} cores, {platform.machine()}; "
        f"`python {' '.join(sys.argv)}`",
        "",
        f"Base point: {base.layers} blocks of width {base.width}, {base.tokens} tokens, "
        f"{base.tasks} tasks, {base.samples} images a task; least of {options.turns} turns",
        "",
        "| factor | value | CPU s | to base | exponent | peak, MB | rise | to base | exponent |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    print("\n".join(lines), flush=True)
    for row in rows(base, chosen_factors(options), options.turns):
        print(row, flush=True)
        lines.append(row)
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
