"""Predict the time of calibrations of 7B to 405B parameters on 1, 8 and 64 GPUs.

    python benchmarks/scale.py [--threads 1 2]

Measures rates of this machine through the package's functions, predicts from them
(`scale_model.py`) the time of a small Llama on this machine, and compares it with a real run. Then
it uses the rates of H100 GPUs instead (`scale_h100.py`). Writes both to `results/scale.md`. Seconds
of this machine are CPU seconds over threads, since other programs may use its cores.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from scale_h100 import ASSUMPTIONS, limits, predicted
from scale_model import PARTS, Job, Llama, Machine, seconds, share
from speed_models import Shape, build, load, write_models

from fusion_bench_featcal import SafetensorsExpert, calibrate
from fusion_bench_featcal.core.kernels import choose_kernel, processor, using_kernel
from fusion_bench_featcal.core.moments import Moments
from fusion_bench_featcal.core.solve import solve_ridge
from fusion_bench_featcal.families import resolve_family

RESULTS = Path(__file__).parent / "results" / "scale.md"
WIDTHS = (512, 1024, 1792)
SMALL = Shape("llama", 512, 1792, 8, length=64, layers=4, tasks=4, samples=16)


def rate(work: Callable[[], Any], amount: float) -> float:
    """Return the amount of work per second, from the fastest of a few runs."""
    taken = []
    for _ in range(4):
        start = time.process_time()
        work()
        taken.append((time.process_time() - start) / torch.get_num_threads())
    return amount / min(taken)


def rates(width: int) -> dict[str, float]:
    """Measure this machine's FLOPS at one width."""
    x, y = torch.randn(2048, width), torch.randn(2048, width)
    moments = Moments.zeros(1, 1, width, width, x)
    gram, right = x.T @ x / len(x) / width, torch.randn(1, width, width)
    shape = Shape("llama", width, width * 7 // 2, width // 64, length=64, layers=1)
    model, ids = build(shape), torch.randint(1000, (16, 64))
    family = resolve_family("llama", model)
    block = family.stages(model)[0][0]
    call = family.begin(model, {"input_ids": ids}, block)
    hidden = Llama(width, shape.inner, shape.heads, shape.heads // 4, 1)
    of_pass = ids.numel() * (2 * hidden.numbers + 4 * shape.length * width)
    of_sums = 2 * len(x) * width**2 * (share(width) + 1)
    return {
        "forward": rate(lambda: family.step(model, block, call), of_pass),
        "sums": rate(lambda: moments.add(0, x, y), of_sums),
        "solves": rate(
            lambda: solve_ridge(gram[None].clone(), right, 0.05, rounding=1e-7), 7 / 3 * width**3
        ),
    }


def machine_here(folder: Path) -> tuple[Machine, Mapping[int, Mapping[str, float]]]:
    """Measure this machine with torch's current number of threads."""
    by_width = {width: rates(width) for width in WIDTHS}

    def at(part: str) -> Callable[[int], float]:
        return lambda width: by_width[min(WIDTHS, key=lambda other: abs(other - width))][part]

    one, other = (Moments.zeros(1, 1, 1792, 1792, torch.zeros(())) for _ in range(2))
    touched = 3 * sum(tensor.nbytes for tensor in one.tensors())
    merged = rate(lambda: one.merge(other, torch.ones(1)), touched)
    size = (folder / "base" / "model.safetensors").stat().st_size

    def read() -> None:
        source = SafetensorsExpert(folder / "base")
        for name in source.names():
            source.tensor(name).clone()

    return Machine(at("forward"), at("sums"), at("solves"), merged, rate(read, size)), by_width


def calibrated(folder: Path) -> float:
    """Calibrate the small Llama, and return the seconds."""
    names = [f"task_{index}" for index in range(SMALL.tasks)]
    experts = {name: SafetensorsExpert(folder / name) for name in names}
    batches = {name: SMALL.batches(name) for name in names}
    models = load(SMALL, folder / "merged"), SafetensorsExpert(folder / "base")
    settings = SMALL.settings(log_drift=True)
    start = time.process_time()
    calibrate(*models, experts, batches, settings, progress=False)
    return (time.process_time() - start) / torch.get_num_threads()


def measured(threads: int) -> tuple[list[str], str]:
    """Return rows of rates, and one of the small Llama's predicted and measured seconds."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = Llama(SMALL.width, SMALL.inner, SMALL.heads, SMALL.heads // 4, SMALL.layers, 4)
    job = Job(model, SMALL.tasks, SMALL.samples, SMALL.length)
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        write_models(SMALL, Path(name))
        with using_kernel(choose_kernel("auto", torch.device("cpu"))):
            machine, by_width = machine_here(Path(name))
        taken = min(calibrated(Path(name)) for _ in range(2))
    seconds_by_part, _ = seconds(job, machine)
    seconds_by_part.pop("exchange")
    total = sum(seconds_by_part.values())
    cells = [f"{seconds_by_part[part]:.2f}" for part in seconds_by_part]
    rows = [
        f"| {threads} | {width} | {' | '.join(f'{value / 1e9:.0f}' for value in row.values())} "
        f"| {machine.memory / 1e9:.1f} | {machine.files / 1e9:.1f} |"
        for width, row in by_width.items()
    ]
    return (
        rows,
        f"| {threads} | {' | '.join(cells)} | {total:.1f} | {taken:.1f} | {total / taken:.2f} |",
    )


HEAD = f"""\
`python benchmarks/scale.py`, torch {torch.__version__}, {processor()},
{os.cpu_count()} cores, beside other programs.

## Measured

Rates through the package's functions in float32, CPU seconds over threads (files are cached):

| threads | width | forward, GFLOPS | sums, GFLOPS | solves, GFLOPS | memory, GB/s | files, GB/s |
|--:|--:|--:|--:|--:|--:|--:|
"""
SECOND = f"""
A Llama of {SMALL.layers} blocks of width {SMALL.width}, {SMALL.tasks} tasks with {SMALL.samples}
samples of {SMALL.length} tokens: seconds that these rates predict, by part, and those of a run.

"""


def main() -> None:
    """Write measurements and predictions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    results = [measured(threads) for threads in parser.parse_args().threads]
    heads = ["threads", *(part for part in PARTS if part != "exchange")]
    heads += ["predicted", "measured", "ratio"]
    text = HEAD + "\n".join(row for rows, _ in results for row in rows) + "\n" + SECOND
    text += f"| {' | '.join(heads)} |\n{'|--:' * len(heads)}|\n"
    text += "\n".join(row for _, row in results) + "\n\n"
    text += f"## Predicted\n\nNothing below was measured. Assumptions:\n\n{ASSUMPTIONS}\n"
    text += "\n".join(predicted()) + f"\n\n{limits()}\n"
    RESULTS.write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
