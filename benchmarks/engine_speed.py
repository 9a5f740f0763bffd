"""Time and peak memory of the engine and of the straightforward implementation, in one run.

    python benchmarks/engine_speed.py --layers 2 --samples 32 --repeats 3
    python benchmarks/engine_speed.py --layers 12 --samples 4 --repeats 1     # for peak memory
    python benchmarks/engine_speed.py --against ../earlier   # with an earlier version's checkout

Both sides run in turn, each in a separate process, on the same stored models. Measurements begin
with reading the models and end with the calibrated model. The comparison uses the smallest CPU and
wall seconds of several turns (on a busy machine CPU seconds are more reliable), the largest peak of
resident memory, and the results.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file
from speed_models import Shape, load
from straightforward import calibrate_plainly, gemm_rate
from torch import nn

from fusion_bench_featcal import SafetensorsExpert, calibrate

SIDES = ("plain", "engine")
NAMES = {"plain": "straightforward", "before": "earlier version", "engine": "this engine"}


def run_plain(shape: Shape, folder: Path, tasks: list[str]) -> nn.Module:
    """Calibrate by the straightforward implementation."""
    models = {name: load(shape, folder / name) for name in ("merged", "base", *tasks)}
    merged, base = models.pop("merged"), models.pop("base")
    data = {task: shape.batches(task) for task in tasks}
    calibrate_plainly(merged, base, models, data, shape.settings())
    return merged


def run_engine(
    shape: Shape, folder: Path, tasks: list[str], changes: Mapping[str, Any]
) -> nn.Module:
    """Calibrate by the package, with experts streamed from their files."""
    sources = {name: SafetensorsExpert(folder / name) for name in ("base", *tasks)}
    return calibrate(
        load(shape, folder / "merged"),
        sources.pop("base"),
        sources,
        {task: shape.batches(task) for task in tasks},
        shape.settings(**changes),
        progress=False,
    ).model


def child(side: str, shape: Shape, folder: Path, changes: Mapping[str, Any]) -> None:
    """Run one side and print its costs as JSON."""
    tasks = sorted(path.name for path in folder.glob("task_*"))
    rate = gemm_rate(shape)
    start, cpu = time.perf_counter(), time.process_time()
    if side == "plain":
        model = run_plain(shape, folder, tasks)
    else:
        model = run_engine(shape, folder, tasks, changes)
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    rate = max(rate, gemm_rate(shape))
    save_file(
        {n: p.contiguous() for n, p in model.named_parameters()}, folder / f"{side}.safetensors"
    )
    print(json.dumps({"wall": wall, "cpu": cpu, "peak": peak, "rate": rate}))


def prepare(shape: Shape, folder: Path) -> None:
    """Write the models in a process that ends before the measurement."""
    code = "import sys; from pathlib import Path; from speed_models import Shape, write_models\n"
    code += f"write_models({shape!r}, Path({str(folder)!r}))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)


def measure(
    side: str, shape: Shape, folder: Path, changes: list[str], earlier: Path | None = None
) -> dict[str, float]:
    """Run one side's turn. The side `before` is the engine of an earlier checkout."""
    script, env, run = __file__, dict(os.environ), side
    if earlier is not None and side == "before":
        script, run = str(earlier / "benchmarks" / "engine_speed.py"), "engine"
        env["PYTHONPATH"] = str(earlier)
    command = [sys.executable, script, f"--side={run}", f"--folder={folder}", *shape.arguments()]
    command += [f"--set={change}" for change in changes]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env)
    if run != side:
        (folder / f"{run}.safetensors").rename(folder / f"{side}.safetensors")
    return json.loads(done.stdout.splitlines()[-1])


def largest_difference(folder: Path, sides: Sequence[str] = SIDES) -> tuple[float, str]:
    """Return the largest relative difference of a parameter between two sides, and its name."""
    one, other = (load_file(folder / f"{side}.safetensors") for side in sides)
    return max(
        (float((one[n].double() - other[n]).norm() / one[n].double().norm()), n) for n in one
    )


def table(shape: Shape, turns: dict[str, list[dict[str, float]]]) -> str:
    """Return a Markdown table of the sides and their ratios."""
    first = next(iter(turns))
    least = {s: {k: min(t[k] for t in turns[s]) for k in ("wall", "cpu")} for s in turns}
    peak = {s: max(t["peak"] for t in turns[s]) / 1e9 for s in turns}
    lines = ["| | wall seconds | CPU seconds | peak RSS, GB |", "|---|--:|--:|--:|"]
    for side in turns:
        cells = f"{least[side]['wall']:.1f} | {least[side]['cpu']:.1f} | {peak[side]:.2f} |"
        lines.append(f"| {NAMES[side]} | {cells}")
    plain, ours = least[first], least["engine"]
    ratios = [plain["wall"] / ours["wall"], plain["cpu"] / ours["cpu"]]
    ratios.append(peak[first] / peak["engine"])
    lines.append("| **ratio** | " + " | ".join(f"**{ratio:.2f}**" for ratio in ratios) + " |")
    if first != "plain":
        return "\n".join(lines)
    rate = max(turn["rate"] for side in SIDES for turn in turns[side])
    bound = shape.plain_flops() / rate
    lines.append(
        f"\nStraightforward: {shape.plain_flops() / 1e12:.2f} TFLOP at {rate / 1e9:.0f} GFLOP "
        f"per CPU second take {bound:.1f} CPU seconds; it takes {plain['cpu'] / bound:.2f} times "
        "that."
    )
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    Shape.add_arguments(parser)
    parser.add_argument("--repeats", type=int, default=2, help="turns of each side")
    parser.add_argument(
        "--set", action="append", default=[], help="a setting of the engine: mix_alpha=0"
    )
    parser.add_argument("--out", type=Path, help="also append the table to this Markdown file")
    parser.add_argument(
        "--against", type=Path, help="checkout of an earlier version, in place of the plain side"
    )
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Run the sides in turn and print the comparison."""
    options = parse()
    shape = Shape.of(options)
    if options.side:
        changes = dict(change.split("=") for change in options.set)
        child(
            options.side, shape, options.folder, {k: yaml.safe_load(v) for k, v in changes.items()}
        )
        return
    with TemporaryDirectory() as folder:
        prepare(shape, Path(folder))
        sides = SIDES if options.against is None else ("before", "engine")
        turns: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
        for _ in range(options.repeats):
            for side in sides:
                taken = measure(side, shape, Path(folder), options.set, options.against)
                turns[side].append(taken)
        difference, name = largest_difference(Path(folder), sides)
    report = (
        f"{shape}; {''.join(f'{change}, ' for change in options.set)}{platform.machine()}, "
        f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}; "
        f"least of {options.repeats}\n\n{table(shape, turns)}\n"
        f"Largest relative difference of a parameter: {difference:.1e} ({name}).\n"
    )
    publish(report, options.out)


def publish(report: str, out: Path | None) -> None:
    """Print a report, and append it to a file if one is given."""
    print(report)
    if out:
        with out.open("a", encoding="utf-8") as file:
            file.write(f"\n{report}")


if __name__ == "__main__":
    main()
