"""Cost and gain of waiting asleep (`OMP_WAIT_POLICY=passive`), idle and beside a neighbour.

    python benchmarks/openmp_waiting.py [--threads 2] [--repeat 5]

The bundled CLIP is calibrated on random pictures of three tasks, each time in a process of its own:
by default, then with the setting, in turns, first on the machine as it is and then beside one
process that only counts. The table shows medians of the seconds, and of the ratios of each pair.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time

import torch

SAMPLES, BATCH = 32, 16


def calibrate_once(threads: int) -> None:
    """Print the seconds of one calibration, after one that only warms up."""
    from transformers import CLIPVisionModel

    from fusion_bench_featcal import FeatCalSettings, SafetensorsExpert, calibrate
    from fusion_bench_featcal.suites import image

    torch.set_num_threads(threads)
    base = CLIPVisionModel.from_pretrained(image.path("pretrained"))
    size = base.config.image_size
    experts = {task: SafetensorsExpert(image.path(task)) for task in list(image.TASKS)[:3]}
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(SAMPLES, 3, size, size, generator=generator)
    batches = {task: [{"pixel_values": part} for part in pixels.split(BATCH)] for task in experts}
    for samples in (BATCH, SAMPLES):
        settings = FeatCalSettings(samples_per_task=samples, anchor_rho=1.0)
        start = time.perf_counter()
        calibrate(base, base, experts, batches, settings, progress=False)
        seconds = time.perf_counter() - start
    print(seconds)


def timed(policy: str | None, threads: int) -> float:
    """Seconds of a calibration in a process with that policy; None: without any."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    if policy is not None:
        environment["OMP_WAIT_POLICY"] = policy
    command = [sys.executable, __file__, "--threads", str(threads), "--child"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=2, help="threads of the calibration (2)")
    parser.add_argument("--repeat", type=int, default=5, help="pairs of each kind (5)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return calibrate_once(options.threads)
    print(f"torch {torch.__version__}, {options.threads} threads on {os.cpu_count()} cores of")
    print(f"{platform.machine()}; load before: {os.getloadavg()[0]:.1f}\n")
    print("| beside | default, s | passive, s | default / passive |")
    print("|---|--:|--:|--:|")
    for beside in ("nothing of ours", "one busy process"):
        busy = beside.startswith("one")
        neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if busy else None
        try:
            pairs = [
                (timed(None, options.threads), timed("passive", options.threads))
                for _ in range(options.repeat)
            ]
        finally:
            if neighbour is not None:
                neighbour.kill()
        usual, passive = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(one / other for one, other in pairs)
        print(f"| {beside} | {usual:.2f} | {passive:.2f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
