"""ProbSurgery (ICML 2025): Surgery with a correction that is normally distributed in training.

On features of norm 1 the authors' constants are harmful: the noise starts at 1 in every coordinate,
but coordinates are about 0.04, and the KL weight keeps it above the signal. The setting `kl_weight:
scaled` adapts both to the size of the features.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fusion_bench_featcal.lab.rivals.corrected_model import SurgeryModule
from fusion_bench_featcal.lab.rivals.registry import method
from fusion_bench_featcal.lab.rivals.surgery import Surgery
from fusion_bench_featcal.lab.rivals.training import TaskFeatures, initial_weight, task_generator
from fusion_bench_featcal.setting_fields import setting

# Standard deviation to which the authors' weight drives the noise on features of ViT-B/32 (0.44 at
# width 512), in units of the features' root mean square.
_RELATIVE_NOISE = 0.145
# If residuals are small relative to the noise, the objective is smallest at sigma = 1.25 w d:
# sqrt(pi / 2) is 1.25.
_NOISE_PER_WEIGHT = 1.25


class KlTerm(NamedTuple):
    """The regulariser's weight in the objective, and the noise's log variance before training."""

    weight: float
    log_variance: float


@method("prob_surgery", source="ICML 2025", without=("rank",))
class ProbSurgery(Surgery):
    """ProbSurgery: Surgery with a wider module and a correction that is random in training.

    It is sampled from a normal distribution. The method needs the task's name at inference. The
    defaults come from the authors' code.
    """

    hidden: int = setting(128, "Width of each task's module.", ge=1, group="module and fit")
    kl_weight: float | str = setting(
        1e-4,
        "Weight of the divergence from a standard normal. `scaled`: weight and initial variance "
        "follow the size of the expert's features; use it with normalize=pre.",
        ge=0,
        choices=("scaled",),
    )
    shared: bool = setting(
        False,
        "One module for all tasks, trained by their batches in turn (--one of the authors' code).",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shared and self.optimizer != "joint":
            raise ValueError(
                f"method.optimizer={self.optimizer} trains one task after the other, and with "
                "method.shared=true they have one module: set method.optimizer=joint"
            )

    def fit_all(self, features: Mapping[str, TaskFeatures]) -> dict[str, nn.Module]:
        """Train all tasks' modules. The results subtract the mean of the distribution."""
        trained: dict[str, Any] = super().fit_all(features)
        deployed = {module: module.deployed() for module in set(trained.values())}
        return {task: deployed[module] for task, module in trained.items()}

    def _modules(self, features: Mapping[str, TaskFeatures]) -> dict[str, Any]:
        """Return each task's module before training, or a common one for all tasks."""
        if not self.shared:
            return super()._modules(features)
        merged, expert = zip(*((f.merged, f.expert) for f in features.values()), strict=True)
        all_features = TaskFeatures(torch.cat(merged), torch.cat(expert))
        return dict.fromkeys(features, self.module(all_features, "shared"))

    def module(self, features: TaskFeatures, name: str) -> "ProbSurgeryModule":
        """Return a module before training, with mean 0 everywhere, seeded by `name`."""
        width = features.expert.shape[1]
        hidden = self.scaled(self.hidden, width)
        down = initial_weight(hidden, width, task_generator(self.seed, name, "weights"))
        return ProbSurgeryModule(down, kl_term(features.expert, self.kl_weight))

    def _loss(
        self, module: Any, features: TaskFeatures, positions: Tensor, noise: torch.Generator
    ) -> Tensor:
        """Return the mean absolute difference under one draw of noise, plus the KL term, 0-dim."""
        before, target = features.at(positions)
        mean, log_variance = module.distribution(before)
        draw = torch.randn(mean.shape, generator=noise).to(mean)
        corrected = before - (mean + (0.5 * log_variance).exp() * draw)
        divergence = standard_normal_kl(mean, log_variance)
        return functional.l1_loss(corrected, target) + module.term.weight * divergence


class ProbSurgeryModule(nn.Module):
    """A task's distribution of the correction: N(M relu(P f), exp(V relu(P f) + v)).

    Attributes:
        down: P, `[hidden, d]`.
        mean: M, `[d, hidden]`.
        log_variance: V, `[d, hidden]`.
        term: The regulariser's constants. v is its log variance, 0 for the authors' module.
    """

    def __init__(self, down: Tensor, term: KlTerm) -> None:
        super().__init__()
        self.down, self.term = nn.Parameter(down), term
        self.mean = nn.Parameter(torch.zeros(down.T.shape))
        self.log_variance = nn.Parameter(torch.zeros(down.T.shape))

    def distribution(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log variance of the correction, `[..., d]` each, of `[..., d]`."""
        hidden = torch.relu(functional.linear(features, self.down))
        log_variance = functional.linear(hidden, self.log_variance) + self.term.log_variance
        return functional.linear(hidden, self.mean), log_variance

    def deployed(self) -> SurgeryModule:
        """Return the module for inference, which subtracts the mean."""
        return SurgeryModule(self.down.detach(), self.mean.detach()).requires_grad_(False).eval()


def standard_normal_kl(mean: Tensor, log_variance: Tensor) -> Tensor:
    """Return KL(N(mean, exp(log_variance)) || N(0, 1)), summed over d, averaged over samples."""
    per_coordinate = 0.5 * (log_variance.exp() + mean.square() - 1 - log_variance)
    return per_coordinate.sum(dim=-1).mean()


def kl_term(expert_features: Tensor, kl_weight: float | str) -> KlTerm:
    """Return the regulariser's constants for features `[n, d]`.

    A number is used with the authors' module. With `scaled` the weight is chosen so that the noise
    converges to 0.145 of the features' root mean square, and it starts at that value.
    """
    if not isinstance(kl_weight, str):
        return KlTerm(float(kl_weight), 0.0)
    noise = _RELATIVE_NOISE * expert_features.double().square().mean().sqrt().item()
    width = expert_features.shape[-1]
    return KlTerm(noise / (_NOISE_PER_WEIGHT * width), 2 * math.log(max(noise, 1e-12)))
