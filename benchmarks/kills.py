"""Kill calibrations, resume them, and compare the models with uninterrupted runs, bit by bit.

    python benchmarks/kills.py [--kills 50] [--without-suite]

A run kills itself (SIGKILL) while a file is half written, or before or after it is moved into
place. One run in four is killed at a random time. Every second run is killed again while it
resumes. Exits with 1 if a model is lost or different.
"""

import argparse
import collections
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "kit"))

import torch
from calibrations import cast, run_fast
from killing import MOMENTS, Calibrate, digest_of, try_kill
from tiny_models import clip_suite, t5_suite

from fusion_bench_featcal import FeatCalSettings, SafetensorsExpert, calibrate


def tiny(make_suite: Callable[[], Any]) -> Calibrate:
    """Return a function that runs one of the tests' tiny models, in float32."""
    suite = make_suite().to(torch.float32)
    suite.inputs = cast(suite.inputs, torch.float32)
    return lambda folder, resume: run_fast(suite, checkpoint_dir=str(folder), resume=resume)


def bundled() -> Calibrate:
    """Runs of the bundled CLIP suite: six experts read from files, 16 images per task."""
    from transformers import CLIPVisionModel

    from fusion_bench_featcal.suites import image

    merged = CLIPVisionModel.from_pretrained(image.path())
    sources = {task: SafetensorsExpert(image.path(task)) for task in image.TA6}
    with torch.no_grad():
        for name, parameter in merged.named_parameters():
            tensors = [source.tensor(name).float() for source in sources.values()]
            parameter.copy_(torch.stack(tensors).mean(0))
    processor = image.load_processor()
    batches = {}
    for task in image.TA6:
        rows = image.load_split(task, "train")
        pictures = [rows[index]["image"] for index in range(16)]
        batches[task] = [dict(processor(images=pictures, return_tensors="pt"))]

    def run(folder: Path, resume: bool) -> Any:
        settings = FeatCalSettings(samples_per_task=16, checkpoint_dir=str(folder), resume=resume)
        base = SafetensorsExpert(image.path())
        return calibrate(merged, base, sources, batches, settings, progress=False)

    return run


class Workload:
    """Runs of one kind, with their expected result and duration."""

    def __init__(self, name: str, calibrate: Calibrate) -> None:
        """Run the calibration once, uninterrupted."""
        self.name, self.calibrate = name, calibrate
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            result = calibrate(Path(folder), False)
            self.seconds = time.perf_counter() - start
        self.expected_digest = digest_of(result.model)
        self.blocks = len(result.log.of_kind("block"))
        self.writes = self.blocks + 2  # shards, the rest and the index

    def killed(self, seed: int) -> tuple[str, bool]:
        """Kill and resume a run. Return the outcome, and True if the model is equal."""
        with tempfile.TemporaryDirectory() as folder:
            moment, digest = try_kill(self.calibrate, Path(folder), self.writes, self.seconds, seed)
        return moment, digest == self.expected_digest


def main() -> None:
    """Print every kill and a table of the moments of kills."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--without-suite", action="store_true", help="tiny models only")
    options = parser.parse_args()
    makers: dict[str, Callable[[], Calibrate]] = {
        "tiny CLIP": lambda: tiny(clip_suite),
        "tiny T5": lambda: tiny(t5_suite),
    }
    if not options.without_suite:
        makers["bundled CLIP, 6 tasks"] = bundled
    workloads = [Workload(name, make()) for name, make in makers.items()]
    counts: collections.Counter[str] = collections.Counter()
    lost = trials = seed = 0
    while sum(counts.values()) < options.kills:
        workload = workloads[(seed // len(MOMENTS)) % len(workloads)]
        outcome, is_equal = workload.killed(seed)
        for moment in MOMENTS:
            counts[moment] += outcome.count(moment)
        lost, trials, seed = lost + (not is_equal), trials + 1, seed + 1
        print(
            f"{seed:3d} {workload.name}: {outcome}: {'identical' if is_equal else 'DIFFERENT'}",
            flush=True,
        )
    print(f"\ntorch {torch.__version__}, {torch.get_num_threads()} thread, {platform.machine()}\n")
    print("| killed | times |\n|---|--:|")
    print("\n".join(f"| {moment} | {times} |" for moment, times in counts.items()))
    print(f"\n{sum(counts.values())} kills in {trials} runs: {lost} lost or different models")
    sys.exit(1 if lost else 0)


if __name__ == "__main__":
    main()
