"""What does asking for the next expert's block beforehand save when nothing is in the page cache?

    python benchmarks/read_ahead.py [--turns 3] [--samples 8] [--out FILE] [sizes]

Random vision towers lie in safetensors files. Before a turn the system is told to drop their pages;
one turn calibrates with sources that are never told what comes next, one with the package's own,
and one with all files in the cache: no read-ahead can be faster than that. Turns alternate; the
fastest of each is shown, and separately the time in which weights are read and checked (file, page
faults, one pass for NaN). Major faults are the process's waits for the disk; they do not depend on
what else runs on the machine. All three must give the same bits.
"""

import argparse
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from speed_models import Shape, load, write_models
from torch import Tensor

from fusion_bench_featcal import SafetensorsExpert, calibrate
from fusion_bench_featcal.experts import ExpertModel

MB = 1e6


class Surprised:
    """The same files, of which nobody says what is read next."""

    def __init__(self, path: Path) -> None:
        """Open a checkpoint."""
        source = SafetensorsExpert(path)
        self.names, self.shape, self.tensor = source.names, source.shape, source.tensor


def forget(files: Iterable[Path]) -> None:
    """Have the system drop the files' pages."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def major_faults() -> int:
    """Times that this process has waited for a page from the disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def read(files: Iterable[Path]) -> float:
    """Read the files whole; MB a second."""
    start, size = time.perf_counter(), 0
    for file in files:
        with open(file, "rb", buffering=0) as stream:
            while part := stream.read(2**22):
                size += len(part)
    return size / MB / (time.perf_counter() - start)


@contextmanager
def timed_reads() -> Iterator[list[float]]:
    """Context in which every read of a model's tensor is timed."""
    seconds: list[float] = []
    plain = ExpertModel.tensor

    def timed(self: ExpertModel, name: str) -> Tensor:
        start = time.perf_counter()
        try:
            return plain(self, name)
        finally:
            seconds.append(time.perf_counter() - start)

    ExpertModel.tensor = timed
    try:
        yield seconds
    finally:
        ExpertModel.tensor = plain


def turn(shape: Shape, folder: Path, kind: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Seconds of one calibration, of them in reads, major faults; and its parameters."""
    tasks = [f"task_{index}" for index in range(shape.tasks)]
    settings = shape.settings(log_drift=True)
    merged = load(shape, folder / "merged")
    batches = {task: shape.batches(task) for task in tasks}
    start, faults = time.perf_counter(), major_faults()
    with timed_reads() as reads:
        model = calibrate(
            merged,
            kind(folder / "base"),
            {task: kind(folder / task) for task in tasks},
            batches,
            settings,
            progress=False,
        ).model
    costs = [time.perf_counter() - start, sum(reads), major_faults() - faults]
    return costs, model.state_dict()


def measured(shape: Shape, folder: Path, turns: int) -> list[str]:
    """Lines of the report."""
    write_models(shape, folder)
    models = [folder / "base", *(folder / f"task_{index}" for index in range(shape.tasks))]
    files = [path / "model.safetensors" for path in models]
    ways = {
        "not told what is next": (Surprised, True),
        "told": (SafetensorsExpert, True),
        "told, all in the page cache": (SafetensorsExpert, False),
    }
    forget(files)
    rates = read(files), read(files)
    turn(shape, folder, SafetensorsExpert)  # first calls of torch
    found: dict[str, list[list[float]]] = {name: [] for name in ways}
    states: list[dict[str, Tensor]] = []
    for _ in range(turns):
        for name, (kind, cold) in ways.items():
            if cold:
                forget(files)
            else:
                read(files)
            costs, state = turn(shape, folder, kind)
            found[name].append(costs)
            states = [states[0] if states else state, state]
            if not all(torch.equal(value, states[0][key]) for key, value in state.items()):
                raise SystemExit(f"{name}: another model")
    least = {
        name: [min(column) for column in zip(*rows, strict=True)] for name, rows in found.items()
    }
    first = next(iter(ways))
    size = sum(file.stat().st_size for file in files) / MB
    return [
        f"{len(files)} files, {size:.0f} MB; read whole at {rates[0]:.0f} MB/s from the disk, "
        f"{rates[1]:.0f} MB/s from the page cache; {turns} turns",
        "",
        "| | fastest, s | times as fast | in reads, s | times as fast | major faults |",
        "|---|--:|--:|--:|--:|--:|",
        *(
            f"| {name} | {all_in:.2f} | {least[first][0] / all_in:.2f} "
            f"| {reads:.2f} | {least[first][1] / reads:.2f} | {faults:.0f} |"
            for name, (all_in, reads, faults) in least.items()
        ),
    ]


def main() -> None:
    """Print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    Shape.add_arguments(parser)
    parser.set_defaults(samples=8, layers=4)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--folder", help="where the models are written (the disk that is measured)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    shape = Shape.of(options)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows = measured(shape, Path(folder), options.turns)
    lines = [
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{torch.get_num_threads()} threads, {psutil.cpu_count()} cores, {platform.machine()}; "
        f"`python {' '.join(sys.argv)}`",
        "",
        f"{shape.layers} blocks, width {shape.width}, {shape.tasks} tasks, {shape.samples} images "
        f"a task; {rows[0]}",
        *rows[1:],
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
