"""Training of a task's correction by Adam, on features that were computed once."""

import hashlib
import math
from collections.abc import Callable, Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn

from fusion_bench_featcal.methods.corrected_model import SurgeryModule
from fusion_bench_featcal.methods.feature_correction import FeatureCorrection
from fusion_bench_featcal.setting_checks import integer, is_number
from fusion_bench_featcal.settings import CalibrationError

Loss = Callable[[Tensor, Tensor], Tensor]
"""From a batch of merged and of expert features, `[batch, d]` each, to a 0-dim loss."""


class TrainedCorrection(FeatureCorrection):
    """A correction whose modules are trained; a subclass trains them by `train`.

    Attributes:
        learning_rate: Adam's step size, > 0.
        steps: Updates of each task's module, >= 1.
    """

    learning_rate: float = 1e-3
    steps: int = 1000

    older_names: ClassVar = {"training_steps": "steps"}
    checks: ClassVar = FeatureCorrection.checks | {
        "learning_rate": ("a finite number > 0", lambda value: is_number(value) and value > 0),
        "steps": integer(1),
    }

    def train(
        self,
        module: nn.Module,
        loss: Loss,
        merged: Tensor,
        expert: Tensor,
        task: str,
        losses: list[Tensor] | None,
    ) -> None:
        """Train a module in place by Adam (no weight decay, no schedule), then freeze it.

        The other arguments are those of `fit`.

        Raises:
            CalibrationError: If the training diverges.
        """
        generator = task_generator(self.seed, task, "batches")
        batches = shuffled_batches(len(merged), self.batch_size, self.steps, generator)
        # A caller may have switched gradients off, or hand over features made in inference mode.
        with torch.inference_mode(False), torch.enable_grad():
            merged, expert = merged.detach().clone(), expert.detach().clone()
            module.train().requires_grad_(True)
            optimizer = torch.optim.Adam(module.parameters(), lr=self.learning_rate)
            for positions in batches:
                rows = positions.to(merged.device)
                value = loss(merged[rows], expert[rows])
                optimizer.zero_grad()
                value.backward()
                optimizer.step()
                if losses is not None:
                    losses.append(value.detach())
            module.eval().requires_grad_(False)
        if not all(bool(torch.isfinite(parameter).all()) for parameter in module.parameters()):
            raise CalibrationError(
                f"task {task!r}: training diverged, its weights are not finite. Lower "
                f"method.learning_rate (now {self.learning_rate})"
            )


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


def initial_surgery(width: int, rank: int, generator: torch.Generator) -> SurgeryModule:
    """A module before training, float32 on the CPU, which corrects nothing: U is zero."""
    return SurgeryModule(initial_weight(rank, width, generator), torch.zeros(width, rank))


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
