"""Calibrate the results of FusionBench's mergers on the bundled suite, and write a table of all.

    python benchmarks/mergers.py [--samples 64] [--out benchmarks/results/mergers.md]

Takes about half a minute a merger; what is measured lies in `outputs/mergers`, and is kept.
"""

import argparse
import json
import logging
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from stock_mergers import NAMES, merger_of

SUITE = "clip-vit-mini_TA6"
RESULTS = Path(__file__).parent / "results" / "mergers.md"
log = logging.getLogger(__name__)


def measure(name: str, folder: Path, samples: int) -> None:
    """Run the command for one merger; its report stays in the folder."""
    words = [
        "method=featcal", f"method@method.base_method={name}", f"modelpool={SUITE}",
        f"method.samples_per_task={samples}", "method.presets={}", "method.compare_with=[merged]",
        f"path.log_dir={folder}",
    ]  # fmt: skip
    command = [sys.executable, "-m", "fusion_bench.scripts.cli", *words]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "screen.txt").open("w") as screen:
        done = subprocess.run(command, stdout=screen, stderr=screen, cwd=folder, check=False)
    log.info("%s: %s", name, "measured" if done.returncode == 0 else "failed")


def accuracies(report: Path) -> str:
    """Average and worst task, merged and calibrated, as cells; dashes without a report."""
    if not report.is_file():
        return "- | - | - | -"
    rows = json.loads(report.read_text(encoding="utf-8"))["rows"]
    cells = []
    for row in (next(name for name in rows if name != "featcal"), "featcal"):
        tasks = [value for task, value in rows[row].items() if task != "average"]
        cells.append((100 * sum(tasks) / len(tasks), 100 * min(tasks)))
    (merged, worst), (calibrated, raised) = cells
    return f"{merged:.1f} | {calibrated:.1f} | {worst:.1f} | {raised:.1f}"


def page(folder: Path, samples: int) -> str:
    """The whole table."""
    lines = [
        "| method | as upstream merger | average | + FeatCal | worst task | + FeatCal |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for name in sorted(NAMES, key=lambda n: (bool(merger_of(n).why_not), n)):
        why_not = merger_of(name).why_not
        report = folder / name.replace("/", "-") / "report.json"
        lines.append(f"| {name} | {why_not or 'runs'} | {accuracies(report)} |")
    runs = sum(not merger_of(name).why_not for name in NAMES)
    lines += [
        "",
        f"- {runs} of {len(NAMES)} methods of FusionBench {version('fusion-bench')} run as "
        "upstream mergers (each is tried on a stock pool with tiny stand-ins)",
        f"- accuracies in % on {SUITE} with {samples} samples per task and the methods' own "
        f"defaults, measured on {platform.machine()} ({platform.system()}, CPU) with transformers "
        f"{version('transformers')}; dashes: not measured",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure what is not there yet, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--runs", type=Path, default=Path("outputs/mergers"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only-write", action="store_true", help="measure nothing more")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    runs = options.runs.resolve()
    for name in NAMES:
        folder = runs / name.replace("/", "-")
        if merger_of(name).measured and not folder.exists() and not options.only_write:
            measure(name, folder, options.samples)
    options.out.write_text(page(runs, options.samples), encoding="utf-8")


if __name__ == "__main__":
    main()
