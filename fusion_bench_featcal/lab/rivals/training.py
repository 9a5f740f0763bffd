"""What trainings share: random numbers, shuffled batches, loss curves."""

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from fusion_bench_featcal.errors import CalibrationError

CURVE_WINDOW = 20
"""Number of updates whose mean loss is one point of a curve."""


def task_generator(seed: int, task: str, purpose: str) -> torch.Generator:
    """Return a random generator for one task and purpose (such as `batches`), on the CPU.

    The random numbers of a task depend neither on other tasks nor on the device.
    """
    digest = hashlib.sha256(f"{seed}:{task}:{purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def shuffled_batches(samples: int, batch_size: int, seed: int, task: str) -> Iterator[Tensor]:
    """Yield positions of samples, int64 `[batch]`, without end, shuffled again in every pass.

    The last batch of a pass may have fewer samples.
    """
    generator = task_generator(seed, task, "batches")
    while True:
        yield from torch.randperm(samples, generator=generator).split(batch_size)


def check_trained(parameters: Iterable[Tensor], what: str, learning_rate: float) -> None:
    """Refuse trained parameters that are not finite.

    Raises:
        CalibrationError: If a parameter is not finite. The message names `what` and the setting.
    """
    if not all(bool(torch.isfinite(parameter).all()) for parameter in parameters):
        raise CalibrationError(
            f"{what} diverged: its weights are not finite. Lower method.learning_rate (now "
            f"{learning_rate})"
        )


def curve_of(losses: Sequence[Tensor]) -> list[tuple[int, float]]:
    """Return the losses of every update, 0-dim, as a curve, `(steps done, loss)`.

    The point at step 0 is the loss of the first update's batch, computed before any weight changes.
    Every further point is the mean over `CURVE_WINDOW` updates (the last may have fewer), at the
    number of the last of them.
    """
    values = torch.stack([*losses]).tolist()  # at once, as each transfer waits for the device
    points = [(0, values[0])]
    for start in range(0, len(values), CURVE_WINDOW):
        window = values[start : start + CURVE_WINDOW]
        points.append((start + len(window), math.fsum(window) / len(window)))
    # Six digits are precise enough, and keep the files small.
    return [(step, float(f"{value:.6g}")) for step, value in points]
