"""Representation Surgery (arXiv 2402.02705): a small trained module per task corrects features."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fusion_bench_featcal.methods.corrected_model import SurgeryModule
from fusion_bench_featcal.methods.feature_correction import (
    CHECKS,
    CorrectionSettings,
    FeatureCorrection,
    TaskFeatures,
)
from fusion_bench_featcal.methods.training import (
    OnStep,
    check_features,
    initial_weight,
    task_generator,
    train,
)
from fusion_bench_featcal.settings import integer, is_number

TRAINING_CHECKS = {
    "learning_rate": ("a finite number > 0", lambda value: is_number(value) and value > 0),
    "steps": integer(1),
}


@dataclass(frozen=True, kw_only=True)
class SurgerySettings(CorrectionSettings):
    """Settings of Surgery; the defaults are its authors', on 256 samples a task.

    Attributes:
        rank: Width of each task's module, >= 1.
        learning_rate: Adam's step size, > 0.
        steps: Updates of each task's module, >= 1.
    """

    rank: int = 16
    learning_rate: float = 1e-3
    steps: int = 1000

    checks: ClassVar = {"rank": integer(1), **TRAINING_CHECKS, **CHECKS}

    def fit(
        self, features: TaskFeatures, task: str, on_step: OnStep | None = None
    ) -> SurgeryModule:
        """Train one task's correction."""
        return train_surgery(*features, self, task=task, on_step=on_step)


class Surgery(FeatureCorrection):
    """Surgery over any merged CLIP vision model or language model."""

    name = "surgery"
    kind = SurgerySettings


def initial_surgery(width: int, settings: SurgerySettings, task: str = "") -> SurgeryModule:
    """A module before training, float32 on the CPU, which corrects nothing: U is zero.

    `rank` and `seed` of the settings are used; seed and task seed D.
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
        batches: Positions of the samples of each update; None: shuffled.
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

    sides = merged_features, expert_features
    train(module, loss, *sides, settings, task=task, batches=batches, on_step=on_step)
    return module
