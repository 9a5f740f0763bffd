"""Check that cells give equal tables in one process, in several, and on workers of a cluster.

    python benchmarks/grid_backends.py [--rows featcal] [--on dask ray]

Runs a small grid of `method=compare` on the bundled image suite for each backend, with an empty
store of cells, and compares every row's accuracies, samples and seeds and the outcome of every test
item, without costs. Backends whose library is missing are left out. Writes the seconds of each, and
the ratio to one process, to `results/grid_backends.md`.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from fusion_bench_featcal.results import Report

CLUSTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "dask": ("distributed", {"threads_per_worker": 1, "dashboard_address": ":0"}),
    "dask-jobqueue": ("dask_jobqueue.local", {"cores": 1, "processes": 1, "memory": "4GB"}),
}
TITLES = {
    "one": "one process",
    "jobs": "`method.jobs=2`",
    "dask": "Dask, two workers",
    "dask-jobqueue": "Dask, two jobs of dask-jobqueue's `LocalCluster`",
    "ray": "Ray on this machine, `num_cpus: 2`",
}


@contextmanager
def workers(backend: str) -> Iterator[list[str]]:
    """Start the services of a backend, and yield the command's arguments for it."""
    if backend in ("one", "jobs"):
        yield ["method.jobs=2"] if backend == "jobs" else []
    elif backend == "ray":
        yield ["method.backend=ray", "method.backend_options={num_cpus: 2}"]
    else:
        library, of_worker = CLUSTERS[backend]
        with import_module(library).LocalCluster(n_workers=2, **of_worker) as cluster:
            cluster.wait_for_workers(2)
            address = f'{{address: "{cluster.scheduler_address}"}}'
            yield ["method.backend=dask", f"method.backend_options={address}"]


def run(folder: Path, backend: str, options: argparse.Namespace) -> float:
    """Run the grid, and return its seconds without the start of the workers."""
    command = [str(Path(sys.executable).with_name("fusion_bench")), "method=compare"]
    command += ["modelpool=clip-vit-mini_TA6", "method.upstreams=[task_arithmetic]"]
    command += ["method.alone=[]", f"method.post_merging=[{options.rows}]"]
    command += ["method.samples_per_task=8", "method.steps=100"]
    command += [f"method.results_dir={folder}/{backend}-cells", f"path.log_dir={folder}/{backend}"]
    with workers(backend) as words, (folder / f"{backend}.txt").open("w") as log:
        start = time.perf_counter()
        subprocess.run([*command, *words], check=True, stdout=log, stderr=log)
        return time.perf_counter() - start


def results(folder: Path) -> Any:
    """Return the results in a report, without costs."""
    report = Report.load(folder / "task_arithmetic")
    items = {(row, t): v.tolist() for row, flags in report.items.items() for t, v in flags.items()}
    return report.rows, report.samples, report.seeds, items


def main() -> None:
    """Print the seconds of every backend, and whether its table equals that of one process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="featcal,surgery:calibration,ridge_surgery")
    parser.add_argument("--on", nargs="+", choices=TITLES, default=[*TITLES], help="backends")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    has = ("jobs", *(name for name in TITLES if find_spec(name.replace("-", "_"))))
    chosen = [backend for backend in options.on if backend in has]
    with tempfile.TemporaryDirectory() as name:
        seconds = {backend: run(Path(name), backend, options) for backend in ("one", *chosen)}
        tables = {backend: results(Path(name) / backend) for backend in seconds}
    text = f"`benchmarks/grid_backends.py`, rows {options.rows}, torch {torch.__version__},\n"
    text += f"{os.cpu_count()} cores beside other programs, 8 samples per task.\n\n"
    text += "| cells run in | same table | seconds | ratio |\n|:--|:-:|--:|--:|\n"
    for backend, taken in seconds.items():
        is_equal, ratio = tables[backend] == tables["one"], taken / seconds["one"]
        text += (
            f"| {TITLES[backend]} | {'yes' if is_equal else 'NO'} | {taken:.0f} | {ratio:.2f} |\n"
        )
    Path(__file__).parent.joinpath("results/grid_backends.md").write_text(text, encoding="utf-8")
    print(text, end="")
    sys.exit(any(table != tables["one"] for table in tables.values()))


if __name__ == "__main__":
    main()
