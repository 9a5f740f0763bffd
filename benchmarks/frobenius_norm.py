"""How far off is the float32 Frobenius norm of a large matrix: torch's own, and ours.

    python benchmarks/frobenius_norm.py

The task weight of FeatCal is the inverse of this norm (Eq. 14), so its error goes straight into
every task's weight. The reference is the float64 norm of the same numbers.
"""

import platform
import time

import torch

from fusion_bench_featcal.core.solve import frobenius_norm

SIZES = (768, 1024, 3072, 4096, 8192)


def timed(norm, matrix: torch.Tensor) -> tuple[float, float]:
    """A norm's value and the seconds it took, the fastest of three."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        value = float(norm(matrix))
        seconds.append(time.perf_counter() - start)
    return value, min(seconds)


def main() -> None:
    """Print a Markdown table of relative errors and of the time ratio."""
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}\n")
    print("| d | torch.linalg.norm, relative error | frobenius_norm, relative error | time ratio |")
    print("|--:|--:|--:|--:|")
    for size in SIZES:
        generator = torch.Generator().manual_seed(size)
        matrix = torch.randn(size, size, generator=generator)
        exact = float(torch.linalg.norm(matrix.double()))
        theirs, their_time = timed(torch.linalg.norm, matrix)
        ours, our_time = timed(frobenius_norm, matrix)
        print(
            f"| {size} | {theirs / exact - 1:.1e} | {ours / exact - 1:.1e} "
            f"| {our_time / their_time:.2f} |"
        )


if __name__ == "__main__":
    main()
