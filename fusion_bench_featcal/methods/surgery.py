"""Representation Surgery (arXiv 2402.02705): a small trained module per task corrects features."""

from typing import ClassVar

from torch import Tensor
from torch.nn import functional

from fusion_bench_featcal.methods.training import (
    TrainedCorrection,
    Training,
    initial_surgery,
    task_generator,
)
from fusion_bench_featcal.setting_checks import integer


class Surgery(TrainedCorrection):
    """Surgery over any merged CLIP vision model or language model; the defaults are its authors'.

    Attributes:
        rank: Width of each task's module, >= 1.
    """

    name = "surgery"
    rank: int = 16
    checks: ClassVar = {"rank": integer(1)} | TrainedCorrection.checks

    def training(self, merged: Tensor, expert: Tensor, task: str) -> Training:
        """Train for the mean absolute difference of corrected and expert features."""
        weights = task_generator(self.seed, task, "weights")
        features = merged.shape[1]
        module = initial_surgery(features, self.scaled(self.rank, features), weights)
        module = module.to(merged.device)

        def loss(before: Tensor, target: Tensor) -> Tensor:
            return functional.l1_loss(module(before), target)

        return Training(module, loss, merged, expert)
