"""Representation Surgery (arXiv 2402.02705): a small trained module per task corrects features."""

from torch import Tensor
from torch.nn import functional

from fusion_bench_featcal.lab.rivals.registry import method
from fusion_bench_featcal.lab.rivals.training import (
    TrainedCorrection,
    Training,
    initial_surgery,
    task_generator,
)
from fusion_bench_featcal.setting_fields import setting


@method("surgery", source="Yang et al., ICML 2024, arXiv 2402.02705")
class Surgery(TrainedCorrection):
    """Representation Surgery: a small trained module per task corrects the final feature.

    It needs the task's name at inference. The defaults are the authors'. FusionBench's own, which
    always merges by AdaMerging first, is method=surgery/adamerging_surgery.
    """

    rank: int = setting(16, "Width of each task's module.", ge=1, group="module and fit")

    def training(self, merged: Tensor, expert: Tensor, task: str) -> Training:
        """Train for the mean absolute difference of corrected and expert features."""
        weights = task_generator(self.seed, task, "weights")
        features = merged.shape[1]
        module = initial_surgery(features, self.scaled(self.rank, features), weights)
        module = module.to(merged.device)

        def loss(before: Tensor, target: Tensor) -> Tensor:
            return functional.l1_loss(module(before), target)

        return Training(module, loss, merged, expert)
