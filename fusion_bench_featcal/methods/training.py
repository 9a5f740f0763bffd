"""Training of a task's correction module, on features that were computed once."""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.settings import CalibrationError

# Called after every update with its number, from 1, and its loss (0-dim, detached).
OnStep = Callable[[int, Tensor], None]
Loss = Callable[[Tensor, Tensor], Tensor]
Curve = list[tuple[int, float]]
"""Steps done and loss, in order; the first pair, of step 0, is from before training."""

CURVE_WINDOW = 20
"""Updates whose mean loss is one point of a curve."""


class Losses:
    """The losses of one training, an `OnStep`.

    They stay where they are computed until training is over: reading each would wait for the
    device.
    """

    def __init__(self) -> None:
        self._values: list[Tensor] = []

    def __call__(self, step: int, loss: Tensor) -> None:
        """Keep the loss of an update."""
        self._values.append(loss)

    def every(self) -> list[float]:
        """The loss of every update; empty for what has no updates."""
        return torch.stack(self._values).tolist() if self._values else []

    def curve(self) -> Curve:
        """The losses, thinned; empty for what has no updates.

        The point of step 0 is the loss of the first update's batch, which is computed before any
        weight changes. Every further point is the mean over `CURVE_WINDOW` updates (the last may
        have fewer), at the number of the last of them.
        """
        values = self.every()
        points = [(0, value) for value in values[:1]]
        for start in range(0, len(values), CURVE_WINDOW):
            window = values[start : start + CURVE_WINDOW]
            points.append((start + len(window), math.fsum(window) / len(window)))
        # Six digits show everything, and keep the files small.
        return [(step, float(f"{value:.6g}")) for step, value in points]


def task_generator(seed: int, task: str, purpose: str) -> torch.Generator:
    """A random generator for one task and purpose (such as `batches`), on the CPU.

    The random numbers of a task then depend neither on the other tasks nor on the device.
    """
    digest = hashlib.sha256(f"{seed}:{task}:{purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def initial_weight(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Float32 `[rows, columns]`, uniform within 1/sqrt(columns) of zero.

    That is Kaiming's uniform initialisation with a = sqrt(5), which both papers' codes use.
    """
    bound = 1 / math.sqrt(columns)
    return torch.empty(rows, columns).uniform_(-bound, bound, generator=generator)


def shuffled_batches(
    samples: int, batch_size: int, steps: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """Positions of the samples in each update, shuffled anew in every pass.

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


def train(
    module: nn.Module,
    loss: Loss,
    merged_features: Tensor,
    expert_features: Tensor,
    settings: Any,
    *,
    task: str,
    batches: Iterable[Tensor] | None = None,
    on_step: OnStep | None = None,
) -> None:
    """Train a module in place by Adam (no weight decay, no schedule), then freeze it.

    Args:
        module: The module.
        loss: Takes a batch of merged and of expert features `[batch, d]`; gives a 0-dim tensor.
        merged_features: `[n, d]`, floating point.
        expert_features: `[n, d]`, of the same samples.
        settings: `learning_rate`, `steps`, `batch_size` and `seed` are used.
        task: The task's name, for seeds and messages.
        batches: Positions of the samples of each update; None: shuffled, `settings.steps` of them.
        on_step: Called after every update.

    Raises:
        CalibrationError: If the training diverges.
    """
    if batches is None:
        generator = task_generator(settings.seed, task, "batches")
        batches = shuffled_batches(
            len(merged_features), settings.batch_size, settings.steps, generator
        )
    # A caller may have switched gradients off, or hand over features made in inference mode.
    with torch.inference_mode(False), torch.enable_grad():
        merged, expert = merged_features.detach().clone(), expert_features.detach().clone()
        module.train().requires_grad_(True)
        optimizer = torch.optim.Adam(module.parameters(), lr=settings.learning_rate)
        for step, positions in enumerate(batches, start=1):
            rows = positions.to(merged.device)
            value = loss(merged[rows], expert[rows])
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            if on_step is not None:
                on_step(step, value.detach())
        module.eval().requires_grad_(False)
    if not all(bool(torch.isfinite(parameter).all()) for parameter in module.parameters()):
        raise CalibrationError(
            f"task {task!r}: training diverged, its weights are not finite. Lower "
            f"method.learning_rate (now {settings.learning_rate})"
        )


def check_features(merged_features: Tensor, expert_features: Tensor, task: str) -> None:
    """Check the two sides of a task's correction, `[n, d]` each.

    Raises:
        CalibrationError: If they differ in shape, are no matrices, are empty or not finite.
    """
    shapes = tuple(merged_features.shape), tuple(expert_features.shape)
    if shapes[0] != shapes[1] or len(shapes[0]) != 2 or 0 in shapes[0]:
        raise CalibrationError(
            f"task {task!r}: merged and expert features must be [samples, width] of the same "
            f"samples, got {shapes[0]} and {shapes[1]}"
        )
    for owner, features in (("merged model", merged_features), ("expert", expert_features)):
        if not bool(torch.isfinite(features).all()):
            raise CalibrationError(
                f"task {task!r}: the {owner}'s features are not finite. Look for NaN or infinite "
                "values in its weights"
            )
