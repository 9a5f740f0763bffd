"""Representation Surgery (arXiv 2402.02705): a small trained module per task corrects features."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from fusion_bench_featcal.baselines.settings import SurgerySettings
from fusion_bench_featcal.baselines.training import (
    OnStep,
    check_features,
    task_generator,
    train,
)


class SurgeryModule(nn.Module):
    """One task's correction: `f - U relu(D f)`, without biases.

    Attributes:
        down: D, `[rank, d]`.
        up: U, `[d, rank]`.
    """

    def __init__(self, down: Tensor, up: Tensor) -> None:
        """Take over the two matrices."""
        super().__init__()
        self.down = nn.Parameter(down)
        self.up = nn.Parameter(up)

    def drift(self, features: Tensor) -> Tensor:
        """Correction to subtract from features `[..., d]`."""
        return functional.linear(torch.relu(functional.linear(features, self.down)), self.up)

    def forward(self, features: Tensor) -> Tensor:
        """Correct features `[..., d]`."""
        return features - self.drift(features)


def initial_weight(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Float32 `[rows, columns]`, uniform within 1/sqrt(columns) of zero.

    That is Kaiming's uniform initialisation with a = sqrt(5), which both papers' codes use.
    """
    bound = 1 / math.sqrt(columns)
    return torch.empty(rows, columns).uniform_(-bound, bound, generator=generator)


def initial_surgery(width: int, settings: SurgerySettings, task: str = "") -> SurgeryModule:
    """A module before training, which corrects nothing: U is zero.

    Args:
        width: Width of the features.
        settings: `rank` and `seed` are used.
        task: The task's name; with the seed it seeds D.

    Returns:
        The module, float32, on the CPU.
    """
    generator = task_generator(settings.seed, task, "weights")
    down = initial_weight(settings.rank, width, generator)
    return SurgeryModule(down, torch.zeros(width, settings.rank))


@torch.inference_mode(False)  # tensors made in inference mode cannot be trained
def train_surgery(
    merged_features: Tensor,
    expert_features: Tensor,
    settings: SurgerySettings,
    *,
    task: str = "",
    initial: SurgeryModule | None = None,
    batches: Iterable[Tensor] | None = None,
    on_step: OnStep | None = None,
) -> SurgeryModule:
    """Train one task's module: mean absolute difference of corrected and expert features.

    Args:
        merged_features: Of the merged model, `[n, d]` float32.
        expert_features: Of the task's expert on the same samples, `[n, d]`.
        settings: Rank, learning rate, steps, batch size and seed are used.
        task: The task's name, for seeds and messages.
        initial: Module to start from, trained in place; None: `initial_surgery`.
        batches: Positions of the samples of each update; None: shuffled, `settings.steps` of them.
        on_step: Called after every update with its number and loss.

    Returns:
        The trained module, frozen, on the features' device.

    Raises:
        CalibrationError: If the features do not fit each other, or the training diverges.
    """
    check_features(merged_features, expert_features, task)
    width = merged_features.shape[1]
    module = initial_surgery(width, settings, task) if initial is None else initial
    module = module.to(merged_features.device)

    def loss(merged: Tensor, expert: Tensor) -> Tensor:
        return functional.l1_loss(module(merged), expert)

    train(
        module,
        loss,
        merged_features,
        expert_features,
        settings,
        task=task,
        batches=batches,
        on_step=on_step,
    )
    return module
