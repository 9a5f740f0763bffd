"""Training of corrections: data, initial modules, random numbers, and loss curves."""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fusion_bench_featcal.lab.rivals.corrected_model import SurgeryModule
from fusion_bench_featcal.settings import CalibrationError

CURVE_WINDOW = 20
"""Number of updates whose mean loss is one point of a curve."""


@dataclass(frozen=True, eq=False)
class TaskFeatures:
    """One task's data for its correction.

    Attributes:
        merged: Features of the merged model, `[n, d]`.
        expert: Features of the task's expert on the same samples, `[n, d]`.
    """

    merged: Tensor
    expert: Tensor

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return both at positions of samples."""
        positions = positions.to(self.merged.device)
        return self.merged[positions], self.expert[positions]

    def corrected(self, rows: Tensor, module: nn.Module) -> list[Tensor]:
        """Return corrected features of rows of `merged`, a tensor for each site."""
        return [module(rows)]


def check_features(merged: Tensor, expert: Tensor, task: str) -> None:
    """Check the features of both models for a task's correction, `[n, d]` each.

    Raises:
        CalibrationError: If they differ in shape, are not matrices, are empty or not finite.
    """
    shapes = tuple(merged.shape), tuple(expert.shape)
    if shapes[0] != shapes[1] or len(shapes[0]) != 2 or 0 in shapes[0]:
        raise CalibrationError(
            f"task {task!r}: merged and expert features must be [samples, width] of the same "
            f"samples, got {shapes[0]} and {shapes[1]}"
        )
    for owner, features in (("merged model", merged), ("expert", expert)):
        if not bool(torch.isfinite(features).all()):
            raise CalibrationError(
                f"task {task!r}: the {owner}'s features are not finite. Look for NaN or infinite "
                "values in its weights"
            )


def thinned(losses: Sequence[float]) -> list[tuple[int, float]]:
    """Return the losses of every update as a curve, `(steps done, loss)`.

    The point at step 0 is the loss of the first update's batch, computed before any weight changes.
    Every further point is the mean over `CURVE_WINDOW` updates (the last may have fewer), at the
    number of the last of them.
    """
    points = [(0, value) for value in losses[:1]]
    for start in range(0, len(losses), CURVE_WINDOW):
        window = losses[start : start + CURVE_WINDOW]
        points.append((start + len(window), math.fsum(window) / len(window)))
    # Six digits are precise enough, and keep the files small.
    return [(step, float(f"{value:.6g}")) for step, value in points]


def task_generator(seed: int, task: str, purpose: str) -> torch.Generator:
    """Return a random generator for one task and purpose (such as `batches`), on the CPU.

    The random numbers of a task depend neither on other tasks nor on the device.
    """
    digest = hashlib.sha256(f"{seed}:{task}:{purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def initial_weight(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Return float32 `[rows, columns]`, uniform within 1/sqrt(columns) of zero.

    That is Kaiming's uniform initialisation with a = sqrt(5), which both papers' codes use.
    """
    bound = 1 / math.sqrt(columns)
    return torch.empty(rows, columns).uniform_(-bound, bound, generator=generator)


def initial_surgery(width: int, rank: int, generator: torch.Generator) -> SurgeryModule:
    """Return a module before training, on the CPU. It corrects nothing, because U is zero."""
    return SurgeryModule(initial_weight(rank, width, generator), torch.zeros(width, rank))


def shuffled_batches(
    samples: int, batch_size: int, steps: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """Yield positions of the samples in each update, shuffled again in every pass.

    The last batch of a pass may have fewer samples.

    Yields:
        int64 positions `[batch]`, `steps` times.
    """
    done = 0
    while True:
        for positions in torch.randperm(samples, generator=generator).split(batch_size):
            if done == steps:
                return
            done += 1
            yield positions
