"""Seconds until the output of `featcal --help`, and until a run's first calibrated block.

    python benchmarks/start.py                        # this checkout
    python benchmarks/start.py --against ../earlier   # with an earlier version's checkout

Commands run in turns, each in a separate process, and the smallest of several turns counts. A run's
first block counts as calibrated when its checkpoint is written. A checkout with a `.venv` uses it.
"""

import argparse
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
RUN = ("method=featcal", "modelpool=clip-vit-mini_TA6", "method.samples_per_task=8")


def command(checkout: Path, name: str) -> str:
    """Return the path of an installed command."""
    programs = checkout / ".venv" / "bin"
    return str((programs if programs.is_dir() else BIN) / name)


def environment(checkout: Path) -> dict[str, str]:
    """Return an environment that imports a checkout's package."""
    return os.environ | {"PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1"}


def seconds_of_help(checkout: Path) -> float:
    """Return the seconds of `featcal --help`."""
    start = time.perf_counter()
    words = [command(checkout, "featcal"), "--help"]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env=environment(checkout))
    return time.perf_counter() - start


def seconds_to_first_block(checkout: Path) -> float:
    """Return the seconds from the command to the first calibrated block."""
    with TemporaryDirectory() as folder:
        block = Path(folder) / "blocks" / "block-0000.json"
        words = [*RUN, f"method.checkpoint_dir={block.parent}", f"path.log_dir={folder}/log"]
        start = time.perf_counter()
        process = subprocess.Popen(
            [command(checkout, "fusion_bench"), *words],
            cwd=folder,
            env=environment(checkout),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while not block.exists():
            if process.poll() is not None:
                sys.exit(f"the run in {checkout} ended with {process.returncode}")
            time.sleep(0.01)
        taken = time.perf_counter() - start
        process.terminate()
        process.wait()
    return taken


def main() -> None:
    """Measure in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="turns of each side")
    parser.add_argument("--against", type=Path, help="checkout of an earlier version")
    options = parser.parse_args()
    sides = {"this version": ROOT}
    if options.against is not None:
        sides = {"earlier version": options.against.resolve(), **sides}
    print(f"{platform.machine()}, {os.cpu_count()} cores; least of {options.repeats}\n")
    print("| seconds | `featcal --help` | first calibrated block |\n|---|--:|--:|")
    measures = seconds_of_help, seconds_to_first_block
    taken: dict[str, list[list[float]]] = {name: [] for name in sides}
    for _ in range(options.repeats):
        for name, checkout in sides.items():
            taken[name].append([measure(checkout) for measure in measures])
    for name, turns in taken.items():
        help_, block = map(min, zip(*turns, strict=True))
        print(f"| {name} | {help_:.2f} | {block:.1f} |")


if __name__ == "__main__":
    main()
