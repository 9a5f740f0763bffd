"""ProbSurgery (ICML 2025): Surgery with a correction that is normally distributed in training."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fusion_bench_featcal.lab.rivals.corrected_model import SurgeryModule
from fusion_bench_featcal.lab.rivals.registry import method
from fusion_bench_featcal.lab.rivals.surgery import Surgery
from fusion_bench_featcal.lab.rivals.training import TaskFeatures, initial_weight, task_generator
from fusion_bench_featcal.setting_fields import setting


@method("prob_surgery", source="ICML 2025", without=("rank",))
class ProbSurgery(Surgery):
    """ProbSurgery: Surgery with a wider module and a correction that is random in training.

    It is sampled from a normal distribution. The method needs the task's name at inference. The
    defaults come from the authors' code.
    """

    hidden: int = setting(128, "Width of each task's module.", ge=1, group="module and fit")
    kl_weight: float = setting(1e-4, "Weight of the divergence from a standard normal.", ge=0)

    def fit_all(self, features: Mapping[str, TaskFeatures]) -> dict[str, nn.Module]:
        """Train all tasks' modules. The results subtract the mean of the distribution."""
        trained: dict[str, Any] = super().fit_all(features)
        return {task: module.deployed() for task, module in trained.items()}

    def module(self, features: TaskFeatures, name: str) -> "ProbSurgeryModule":
        """Return a module before training, with mean 0 everywhere, seeded by `name`."""
        generator = task_generator(self.seed, name, "weights")
        return ProbSurgeryModule(initial_weight(self.hidden, features.expert.shape[1], generator))

    def _loss(
        self, module: Any, features: TaskFeatures, positions: Tensor, noise: torch.Generator
    ) -> Tensor:
        """Return the mean absolute difference under one draw of noise, plus the KL term, 0-dim."""
        before, target = features.at(positions)
        mean, log_variance = module.distribution(before)
        draw = torch.randn(mean.shape, generator=noise).to(mean)
        corrected = before - (mean + (0.5 * log_variance).exp() * draw)
        divergence = standard_normal_kl(mean, log_variance)
        return functional.l1_loss(corrected, target) + self.kl_weight * divergence


class ProbSurgeryModule(nn.Module):
    """A task's distribution of the correction: N(M relu(P f), exp(V relu(P f))).

    Attributes:
        down: P, `[hidden, d]`.
        mean: M, `[d, hidden]`.
        log_variance: V, `[d, hidden]`.
    """

    def __init__(self, down: Tensor) -> None:
        super().__init__()
        self.down = nn.Parameter(down)
        self.mean = nn.Parameter(torch.zeros(down.T.shape))
        self.log_variance = nn.Parameter(torch.zeros(down.T.shape))

    def distribution(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log variance of the correction, `[..., d]` each, of `[..., d]`."""
        hidden = torch.relu(functional.linear(features, self.down))
        return functional.linear(hidden, self.mean), functional.linear(hidden, self.log_variance)

    def deployed(self) -> SurgeryModule:
        """Return the module for inference, which subtracts the mean."""
        return SurgeryModule(self.down.detach(), self.mean.detach()).requires_grad_(False).eval()


def standard_normal_kl(mean: Tensor, log_variance: Tensor) -> Tensor:
    """Return KL(N(mean, exp(log_variance)) || N(0, 1)), summed over d, averaged over samples."""
    per_coordinate = 0.5 * (log_variance.exp() + mean.square() - 1 - log_variance)
    return per_coordinate.sum(dim=-1).mean()
