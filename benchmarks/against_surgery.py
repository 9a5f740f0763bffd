"""FeatCal against Surgery and ProbSurgery as the number of samples grows: accuracy, time, memory.

    python benchmarks/against_surgery.py [--samples 8 16 32 64 128 256] [--seeds 42 43 44]
        [--keep FOLDER] [--out FILE] [--figure STEM]

Each cell is a `fusion_bench method=compare` of its own on the bundled image suite, on top of task
arithmetic, in a process of its own, so that one method's memory is not another's. Surgery and
ProbSurgery are trained with their published 1000 steps a task. `:calibration`: on the very samples
that FeatCal draws; without: on as many of the test split, as their authors do. What is finished
lies in `--keep` and is not run again.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import transformers

from fusion_bench_featcal.results import Report
from fusion_bench_featcal.results.drawing import (
    RULE,
    legend_below,
    marks,
    new_figure,
    save_figures,
    style,
)
from fusion_bench_featcal.results.items import half_width

SUITE, MERGER, OURS = "clip-vit-mini_TA6", "task_arithmetic", "featcal"
CELLS = (OURS, "surgery:calibration", "prob_surgery:calibration", "surgery", "prob_surgery")
MB = 2**20


@dataclass(frozen=True)
class Cell:
    """What one method made of the merged model, over seeds.

    Attributes:
        accuracies: Average accuracy by seed, 0 to 1.
        seconds: By seed.
        peaks: Largest resident set by seed, bytes.
        merged: The merged model's average accuracy.
    """

    accuracies: list[float]
    seconds: list[float]
    peaks: list[float]
    merged: float


def run(cell: str, samples: int, seed: int, steps: int, folder: Path) -> Report:
    """The report of one cell, run now unless it is there."""
    place = folder / f"{cell.replace(':', '-')}-{samples}-{steps}-{seed}"
    report = place / "log" / MERGER
    if not (report / "report.json").exists():
        command = [
            *(sys.executable, "-m", "fusion_bench.scripts.cli", "method=compare"),
            *(f"modelpool={SUITE}", f"method.upstreams=[{MERGER}]", "method.alone=[]"),
            *("method.references=[]", f"method.post_merging=['{cell}']", f"method.seed={seed}"),
            *(f"method.samples_per_task={samples}", f"method.steps={steps}"),
            *(f"method.results_dir={place}/cells", f"path.log_dir={place}/log"),
            "print_config=false",
        ]
        place.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, cwd=place, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
    return Report.load(report)


def measured(cell: str, samples: int, seeds: Sequence[int], steps: int, folder: Path) -> Cell:
    """One method with one number of samples."""
    reports = [run(cell, samples, seed, steps, folder) for seed in seeds]
    costs = [report.cost[cell] for report in reports]
    return Cell(
        [report.rows[cell]["average"] for report in reports],
        [float(cost["seconds"]) for cost in costs],
        [float(cost["peak_rss_bytes"]) for cost in costs],
        reports[0].rows[MERGER]["average"],
    )


def spread(values: Sequence[float]) -> str:
    """Mean and, of several values, half of its 95 % interval in per cent."""
    half = f" ± {100 * half_width(values):.1f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):.1f}{half}"


def table(found: Mapping[int, Mapping[str, Cell]]) -> list[str]:
    """Rows of the table, with ratios to FeatCal's with as many samples."""
    lines = [
        "| samples a task | method | accuracy, % | s | to FeatCal | peak, MiB | to FeatCal |",
        "|--:|---|--:|--:|--:|--:|--:|",
    ]
    for samples, cells in found.items():
        least = {name: (min(cell.seconds), min(cell.peaks)) for name, cell in cells.items()}
        for name, cell in cells.items():
            seconds, peak = least[name]
            ratios = ["", ""]
            if OURS in least:
                ratios = [f"{seconds / least[OURS][0]:.2f}", f"{peak / least[OURS][1]:.2f}"]
            lines.append(
                f"| {samples} | {name} | {spread(cell.accuracies)} | {seconds:.2f} | {ratios[0]} "
                f"| {peak / MB:.0f} | {ratios[1]} |"
            )
    return lines


def draw(found: Mapping[int, Mapping[str, Cell]], stem: Path) -> list[Path]:
    """Accuracy and seconds against the number of samples; the files."""
    from matplotlib.ticker import LogLocator, NullFormatter

    names = list(next(iter(found.values())))
    numbers, looks = list(found), marks(names, MERGER)
    with style():
        figure = new_figure(8.0, 3.6)
        left, right = figure.subplots(1, 2)
        merged = next(iter(next(iter(found.values())).values())).merged
        left.axhline(
            100 * merged, linewidth=0.9, **marks([MERGER], MERGER)[MERGER] | {"marker": ""}
        )
        for name in names:
            cells = [found[number][name] for number in numbers]
            mean = [100 * statistics.fmean(cell.accuracies) for cell in cells]
            left.plot(numbers, mean, label=name, linewidth=1.2, **looks[name])
            seconds = [min(cell.seconds) for cell in cells]
            right.plot(numbers, seconds, linewidth=1.2, **looks[name])
        left.set_ylabel("average accuracy, %")
        right.set_ylabel("seconds")
        right.set_yscale("log")
        right.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        right.yaxis.set_major_formatter("{x:g}")
        right.yaxis.set_minor_formatter(NullFormatter())
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.set_xticks(numbers, [str(number) for number in numbers])
            axes.set_xlabel("samples a task")
            axes.grid(color=RULE, linewidth=0.6)
            axes.set_axisbelow(True)
        legend_below(figure, *left.get_legend_handles_labels(), title=f"on {MERGER} (line)")
        figure.suptitle(SUITE, x=0.01, ha="left", fontsize=11)
    return save_figures({stem.name: figure}, stem.parent, stem.parent, "--figure")


def main() -> None:
    """Run what is missing, print the table, and write it and the figure where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256])
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    parser.add_argument("--cells", nargs="+", default=list(CELLS))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).absolute()
        found = {
            samples: {
                cell: measured(cell, samples, options.seeds, options.steps, folder)
                for cell in options.cells
            }
            for samples in options.samples
        }
    merged = found[options.samples[0]][options.cells[0]].merged
    lines = [
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{torch.get_num_threads()} threads, {psutil.cpu_count()} cores, {platform.machine()}; "
        f"`python {' '.join(sys.argv)}`",
        "",
        f"{SUITE} on {MERGER} ({100 * merged:.1f} %); seeds {options.seeds}: average accuracy is "
        "mean ± half of its 95 % interval over them, seconds and memory the least, with the "
        f"framework; {options.steps} steps",
        "",
        *table(found),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")
    if options.figure is not None:
        print("\n".join(map(str, draw(found, options.figure))))


if __name__ == "__main__":
    main()
