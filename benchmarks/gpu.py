"""Time, memory and energy on a GPU: FeatCal, a direct implementation, Surgery and ProbSurgery.

    python benchmarks/gpu.py ROWS.jsonl [--minutes 8] [MODEL ...]
    python benchmarks/gpu.py ROWS.jsonl --processes 8 [MODEL ...]    # on one GPU and on eight
    python benchmarks/gpu.py ROWS.jsonl --device cpu --tiny    # to try it without a GPU

A row is appended to ROWS as soon as it is measured, and rows that are there are not measured again.
After the given minutes the running side is stopped. The table of all rows is printed at the end and
written beside ROWS, with the ending .md.

All sides of a model share one process and read random weights from files in memory, for Llama in
bfloat16. A side that took less than 20 seconds runs twice, and its faster turn counts. The direct
implementation (straightforward.py) holds all experts on the GPU. "Anew" computes features of the
merged model and the expert in every step of training, as the authors of Surgery and ProbSurgery do.
Without it they are computed once. With --processes, FeatCal and FeatCal+ also run on several GPUs,
one for each process. These processes start beforehand, and the costs are the first one's.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import random_models
import torch
import torch.distributed as dist
from random_models import batches, load, write_models
from safetensors import safe_open
from safetensors.torch import save_file
from sides import machine
from straightforward import calibrate_plainly
from torch import Tensor

from fusion_bench_featcal import FeatCalSettings, SafetensorsExpert, TorchProcesses, calibrate
from fusion_bench_featcal.lab.rivals.corrections import CorrectionData
from fusion_bench_featcal.lab.rivals.features import final_features
from fusion_bench_featcal.lab.rivals.surgery import ProbSurgery, Surgery
from fusion_bench_featcal.results.cost import measure


@dataclass(frozen=True)
class Size:
    """Sizes of a measurement. All blocks of a model cost the same."""

    blocks: int
    all_blocks: int
    tasks: int
    samples: int
    tokens: int = 0
    steps: int = 1000

    def __str__(self) -> str:
        """Return the sizes in words."""
        blocks = f"{self.blocks} of {self.all_blocks} blocks, {self.tasks} tasks"
        tokens = f" of {self.tokens} tokens" if self.tokens else ""
        return f"{blocks}, {self.samples} samples per task{tokens}"


SIZES = {
    "vit-b-32": Size(12, 12, 8, 256),
    "vit-l-14": Size(24, 24, 8, 256),
    "t5-base": Size(12, 12, 8, 256, 128),
    "llama-3b": Size(28, 28, 3, 64, 512),
    "llama-8b": Size(2, 32, 3, 64, 512),
    "llama-70b": Size(2, 80, 3, 64, 512),
}
PAPER, PLUS, PLAIN = "FeatCal", "FeatCal+", "direct"
SURGERY: dict[str, tuple[type[Surgery], bool]] = {
    "Surgery": (Surgery, False),
    "ProbSurgery": (ProbSurgery, False),
    "Surgery, anew": (Surgery, True),
    "ProbSurgery, anew": (ProbSurgery, True),
}
SIDES = (PAPER, PLUS, PLAIN)
TOGETHER = " on {} devices"
JOBS: list[tuple[str, tuple[str, ...]]] = [
    ("vit-b-32", (*SIDES, "Surgery", "ProbSurgery")),
    *((name, SIDES) for name in SIZES if name != "vit-b-32"),
    ("vit-b-32", ("Surgery, anew", "ProbSurgery, anew")),
]
REPEATED = 20  # seconds below which a side runs twice
FIGURES = {
    "seconds": ("seconds", 1.0),
    "peak_accelerator_bytes": ("GPU memory, GB", 1e-9),
    "peak_rss_bytes": ("host memory, GB", 1e-9),
    "gpu_energy_wh": ("energy, Wh", 1.0),
}
Data = dict[str, list[dict[str, Tensor]]]


# --- one model, in a process of its own


@dataclass(frozen=True)
class Job:
    """One model's files and data."""

    name: str
    size: Size
    folder: Path
    data: Data
    device: str

    def load(self, model: str) -> Any:
        """Return a stored model on the device."""
        return load(self.folder / model, self.name, self.size.blocks).to(self.device)

    def on_device(self, task: str) -> list[dict[str, Tensor]]:
        """Return a task's batches on the device."""
        return [{n: t.to(self.device) for n, t in batch.items()} for batch in self.data[task]]

    def run(self, side: str) -> Any:
        """Read the models of a side, and calibrate or train. Return the calibrated model."""
        settings = FeatCalSettings(calibrate_norm=self.name.startswith("vit"))
        if side in SURGERY:
            return self.train(*SURGERY[side])
        if side == PLAIN:
            merged, base = self.load("merged"), self.load("base")
            experts, data = ({task: read(task) for task in self.data}
                             for read in (self.load, self.on_device))  # fmt: skip
            calibrate_plainly(merged, base, experts, data, settings)
            return merged
        if side == PLUS:
            settings = FeatCalSettings.plus()
        settings = settings.replace(samples_per_task=self.size.samples)
        experts = {task: SafetensorsExpert(self.folder / task) for task in self.data}
        base = SafetensorsExpert(self.folder / "base")
        merged = load(self.folder / "merged", self.name, self.size.blocks)
        options: dict[str, Any] = {"device": self.device, "progress": False}
        options["processes"] = TorchProcesses() if dist.is_initialized() else None
        return calibrate(merged, base, experts, self.data, settings, **options).model

    def run_together(self, side: str, processes: int) -> dict[str, float]:
        """Run a side in several processes, and return the cost of the first one."""
        state = side, processes, random_models.WIDTHS, torch.get_default_dtype()
        torch.multiprocessing.spawn(self.join, state, processes)
        return json.loads((self.folder / "cost.json").read_text())

    def join(
        self, rank: int, side: str, processes: int, widths: dict[str, Any], dtype: torch.dtype
    ) -> None:
        """Run a side as one of several processes, which starts without the script's state."""
        job, is_cuda = self, self.device == "cuda"
        random_models.WIDTHS.update(widths)
        torch.set_default_dtype(dtype)
        if is_cuda:
            torch.cuda.set_device(rank)
            job = replace(self, device=f"cuda:{rank}")
        store = dist.FileStore(str(self.folder / f"store {side}"), processes)
        backend = "cpu:gloo,cuda:nccl" if is_cuda else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=processes)
        dist.barrier()
        with measure() as cost:
            job.run(side)
        if rank == 0:
            (self.folder / "cost.json").write_text(json.dumps(cost.as_dict()))
        TorchProcesses().leave()

    def train(self, method: type[Surgery], anew: bool) -> None:
        """Train the corrections of Surgery or ProbSurgery."""
        merged, lessons = self.load("merged"), dict[str, CorrectionData]()
        for task in self.data:
            features = [Features(m, self.on_device(task)) for m in (merged, self.load(task))]
            before, target = features if anew else (each.all() for each in features)
            lessons[task] = CorrectionData(before, [target])  # type: ignore[arg-type]
        method(steps=self.size.steps).fit_all(lessons)  # type: ignore[reportCallIssue]


class Features:
    """Final features of a model on a task's samples, computed at each access."""

    def __init__(self, model: Any, data: list[dict[str, Tensor]]) -> None:
        """Keep the model and its inputs."""
        self.model = model
        self.inputs = torch.cat([batch["pixel_values"] for batch in data])
        self.device = self.inputs.device
        self.shape = len(self.inputs), model.config.hidden_size

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.inputs)

    @torch.no_grad()
    def __getitem__(self, rows: Tensor) -> Tensor:
        """Return the features of some samples, `[n, d]`."""
        return final_features(self.model, {"pixel_values": self.inputs[rows]})

    def all(self) -> Tensor:
        """Return the features of all samples, `[n, d]`."""
        numbers = torch.arange(len(self), device=self.device)
        return torch.cat([self[rows] for rows in numbers.split(random_models.BATCH)])


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Create tensors in a floating-point dtype inside the context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def measure_model(name: str, sides: list[str], rows: Path, device: str, processes: int = 1) -> None:
    """Write random models, run all sides, and append a row for each to a file."""
    size = SIZES[name]
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    # As their like is published.
    dtype = torch.bfloat16 if name.startswith("llama") else torch.float32
    with TemporaryDirectory(dir=memory) as folder, default_dtype(dtype):
        with torch.device(device):
            write_models(Path(folder), name, size.blocks, size.tasks)
        data = {f"task_{i}": list(batches(name, i, size.samples, size.tokens))
                for i in range(size.tasks)}  # fmt: skip
        job = Job(name, size, Path(folder), data, device)
        for side in sides:
            row = {"model": name, "sizes": str(size), "side": side, "machine": machine()}
            try:
                if side.endswith(together := TOGETHER.format(processes)):
                    row |= job.run_together(side.removesuffix(together), processes)
                    model = None
                else:
                    model, costs = measured(job, side)
                    row |= costs
                if side in (PAPER, PLAIN):
                    store(model, job.folder / side)
                if side == PLAIN and (job.folder / PAPER).exists():
                    row["difference"] = difference(job.folder)
                del model
            except torch.OutOfMemoryError:
                row["failure"] = "out of memory"
            if device != "cpu":
                torch.cuda.empty_cache()
            with rows.open("a") as file:
                file.write(json.dumps(row) + "\n")


def measured(job: Job, side: str) -> tuple[Any, dict[str, float]]:
    """Run a side once, or twice if it is quick. Return its model and the cost of the faster."""
    turns = list[dict[str, float]]()
    model = None
    while not turns or (len(turns) < 2 and turns[0]["seconds"] < REPEATED):
        del model
        with measure() as cost:
            model = job.run(side)
        turns.append(cost.as_dict())
    return model, min(turns, key=lambda each: each["seconds"])


def store(model: Any, file: Path) -> None:
    """Write a model's parameters to a file, where they are no memory of the sides to come."""
    state = {n: p.detach().cpu().contiguous() for n, p in model.named_parameters()}
    save_file(state, file)


def difference(folder: Path) -> float:
    """Return the distance of both calibrated models, relative to the update by the package."""
    files = (folder / "merged" / "model.safetensors", folder / PAPER, folder / PLAIN)
    before, one, other = (safe_open(file, "pt") for file in files)
    moved = apart = 0.0
    for name in one.keys():  # noqa: SIM118 (no mapping)
        values = one.get_tensor(name).double()
        moved += float((values - before.get_tensor(name)).square().sum())
        apart += float((values - other.get_tensor(name)).square().sum())
    return (apart / moved) ** 0.5


# --- all models, and the table


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file. A last line that was not written whole is left out."""
    rows = list[dict[str, Any]]()
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            print(f"{path}: not a whole row: {line}", file=sys.stderr)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return Markdown with a table for each model: a row per side, and FeatCal's ratio to it."""
    sections = list[str]()
    for name in dict.fromkeys(row["model"] for row in rows):
        model_rows = {row["side"]: row for row in rows if row["model"] == name}
        first = next(iter(model_rows.values()))
        heads = ["", *(label for label, _ in FIGURES.values()), "seconds, ratio to FeatCal"]
        lines = [f"## {name}: {first['sizes']}\n", f"| {' | '.join(heads)} |"]
        lines.append(f"|---|{'--:|' * (len(heads) - 1)}")
        seconds = model_rows.get(PAPER, {}).get("seconds")
        for side, row in model_rows.items():
            cells = [f"{row[key] * unit:.3g}" if key in row else "-"
                     for key, (_, unit) in FIGURES.items()]  # fmt: skip
            ratio = f"{row['seconds'] / seconds:.2f}" if seconds and "seconds" in row else "-"
            label = f"{side} ({row['failure']})" if "failure" in row else side
            lines.append(f"| {' | '.join([label, *cells, ratio])} |")
        if (apart := model_rows.get(PLAIN, {}).get("difference")) is not None:
            lines.append(f"\nFeatCal and {PLAIN}: {apart:.1e} of the update apart.")
        lines.append(f"\n{first['machine']}\n")
        sections.append("\n".join(lines))
    return "\n".join(sections)


def shrink() -> None:
    """Make all models tiny, with few samples and steps."""
    for name, (_, _, _, last) in random_models.WIDTHS.items():
        head_count = 2 if name.startswith("llama") else last
        random_models.WIDTHS[name] = (32, 64, 4, head_count)
    for name, size in SIZES.items():
        tokens = min(size.tokens, 8)
        SIZES[name] = replace(size, blocks=2, tasks=2, samples=4, tokens=tokens, steps=3)


def run_jobs(
    jobs: list[tuple[str, tuple[str, ...]]], rows: Path, end: float, start: Callable[..., Any]
) -> None:
    """Run jobs until a time of the clock `time.monotonic`, each in a process of its own."""
    for name, sides in jobs:
        measured = {(row["model"], row["side"]) for row in read_rows(rows)}
        missing = [side for side in sides if (name, side) not in measured]
        if not missing:
            continue
        if time.monotonic() >= end:
            print(f"{name}: not reached ({', '.join(missing)})", file=sys.stderr, flush=True)
            continue
        process = start("--model", name, "--sides", *missing)
        try:
            code = process.wait(timeout=end - time.monotonic())
            if code:
                print(f"{name}: exit code {code}", file=sys.stderr, flush=True)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            print(f"{name}: stopped at the time limit", file=sys.stderr, flush=True)
        rows.with_suffix(".md").write_text(table(read_rows(rows)))


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(SIZES))
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models: to try this script")
    parser.add_argument("--processes", type=int, default=1, help="GPUs of one calibration")
    parser.add_argument("--model", choices=SIZES, help=argparse.SUPPRESS)
    parser.add_argument("--sides", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    random_models.BATCH = 64
    if options.tiny:
        shrink()
    if options.model:
        count = options.processes
        measure_model(options.model, options.sides, options.rows, options.device, count)
        return
    if unknown := {*options.models} - {*SIZES}:
        parser.error(f"no models {', '.join(sorted(unknown))}: there are {', '.join(SIZES)}")
    words = [sys.executable, __file__, str(options.rows), "--device", options.device]
    words += ["--tiny"] if options.tiny else []
    words += ["--processes", str(options.processes)]
    jobs = [job for job in JOBS if not options.models or job[0] in options.models]
    if options.processes > 1:
        several = tuple(side + TOGETHER.format(options.processes) for side in (PAPER, PLUS))
        jobs = [(name, (PAPER, PLUS, *several)) for name in dict(jobs)]
    end = time.monotonic() + 60 * options.minutes
    run_jobs(jobs, options.rows, end, lambda *more: subprocess.Popen([*words, *more]))
    print(table(read_rows(options.rows)))


if __name__ == "__main__":
    main()
