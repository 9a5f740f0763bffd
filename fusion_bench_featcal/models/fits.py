"""Estimates of the memory and the time of a calibration, before the run."""

from dataclasses import dataclass

import torch

from fusion_bench_featcal.models.shapes import Estimate
from fusion_bench_featcal.run.devices import free_bytes
from fusion_bench_featcal.run.progress import duration

BASELINE = 550_000_000
"""Bytes of Python, torch and transformers."""

CARDS = (24, 48, 80)
"""Memory of common GPUs in GB."""


@dataclass(frozen=True)
class Rates:
    """Operations and bytes per second of a device.

    Attributes:
        name: The device.
        passes: Operations of forward passes in 16 bits.
        wide_passes: Operations of forward passes in float32.
        products: Operations of sums and targets in float32.
        solves: Operations of Cholesky factors and triangular solves.
        reads: Bytes of weights.
        batch: Seconds of a batch's run through a block that do not depend on its size.
    """

    name: str
    passes: float
    wide_passes: float
    products: float
    solves: float
    reads: float
    batch: float

    def seconds(self, estimate: Estimate) -> float:
        """Return the time of a calibration without scores, as if no part overlapped another."""
        passes = self.passes if estimate.number_bytes < 4 else self.wide_passes
        sums = estimate.moments + estimate.targets
        operations = estimate.passes / passes + sums / self.products + estimate.solves / self.solves
        return operations + estimate.read / self.reads + estimate.batches * self.batch


CPU = Rates("one core of an AMD EPYC with AVX2", 5e9, 45e9, 30e9, 10e9, 1e9, 0.015)
"""Measured by benchmarks/plan.py. Without bfloat16 instructions, passes in 16 bits are slow."""

GPU = Rates("an H100 or H200 GPU", 400e12, 45e12, 45e12, 20e12, 3e9, 0.004)
"""Assumed, as no GPU was measured: 40 % of the data sheet's rate in bfloat16, 67 % in float32."""


def peak_bytes(estimate: Estimate) -> int:
    """Return the peak memory of a calibration, with Python and torch."""
    return BASELINE + estimate.features + estimate.batch + estimate.sums + estimate.weights


def fit_lines(estimate: Estimate) -> list[str]:
    """Return a sentence on memory, with the GPUs that have enough, and one on time."""
    peak, free = peak_bytes(estimate) / 1e9, (free_bytes(torch.device("cpu")) or 0) / 1e9
    sizes = {f"{card} GB": card for card in CARDS} | {f"this machine ({free:.0f} GB free)": free}
    fits = ", ".join(n for n in sizes if peak <= sizes[n]) or f"none of {', '.join(sizes)}"
    times = [f"{duration(rates.seconds(estimate))} on {rates.name}" for rates in (CPU, GPU)]
    return [
        f"memory: about {peak:.1f} GB at the peak, fits into {fits}",
        f"time: about {times[0]} (estimated from measured rates), {times[1]} (from assumed rates)",
    ]
