"""Representation Surgery (arXiv 2402.02705): a small trained module per task corrects features."""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fusion_bench_featcal.methods.corrected_model import SurgeryModule
from fusion_bench_featcal.methods.feature_correction import check_features
from fusion_bench_featcal.methods.training import TrainedCorrection, initial_surgery, task_generator
from fusion_bench_featcal.setting_checks import integer


class Surgery(TrainedCorrection):
    """Surgery over any merged CLIP vision model or language model; the defaults are its authors'.

    Attributes:
        rank: Width of each task's module, >= 1.
    """

    name = "surgery"
    rank: int = 16
    checks: ClassVar = {"rank": integer(1)} | TrainedCorrection.checks

    @torch.inference_mode(False)  # tensors made in inference mode cannot be trained
    def fit(
        self, merged: Tensor, expert: Tensor, task: str = "", losses: list[Tensor] | None = None
    ) -> SurgeryModule:
        """Train one task's module: mean absolute difference of corrected and expert features."""
        check_features(merged, expert, task)
        weights = task_generator(self.seed, task, "weights")
        module = initial_surgery(merged.shape[1], self.rank, weights).to(merged.device)

        def loss(before: Tensor, target: Tensor) -> Tensor:
            return functional.l1_loss(module(before), target)

        self.train(module, loss, merged, expert, task, losses)
        return module
