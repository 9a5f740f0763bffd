"""ProbSurgery (ICML 2025): Surgery whose correction is a normal distribution while it is trained.

On features of norm 1 the authors' constants do harm: the noise starts at 1 in every coordinate,
where a coordinate is about 0.04, and their KL weight holds it above the signal. The setting
`kl_weight: scaled` fits both to the size of the features.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fusion_bench_featcal.lab.rivals.corrected_model import SurgeryModule
from fusion_bench_featcal.lab.rivals.registry import method
from fusion_bench_featcal.lab.rivals.training import (
    Loss,
    TrainedCorrection,
    Training,
    initial_weight,
    task_generator,
)
from fusion_bench_featcal.setting_fields import setting

# Standard deviation of the noise in units of the features' root mean square, where the authors'
# weight leaves it on features of ViT-B/32 (0.44 at width 512).
_RELATIVE_NOISE = 0.145
# Where residuals are small beside the noise, the objective is least at sigma = 1.25 w d:
# sqrt(pi / 2) is 1.25.
_NOISE_PER_WEIGHT = 1.25


@method("prob_surgery", source="ICML 2025")
class ProbSurgery(TrainedCorrection):
    """ProbSurgery: Surgery with a wider module, whose correction is random in training.

    It is sampled from a normal distribution. The method needs the task's name at inference. The
    defaults are those of the authors' code.
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

    def fit_all(
        self,
        features: Mapping[str, tuple[Tensor, Tensor]],
        losses: dict[str, list[Tensor]] | None = None,
    ) -> dict[str, nn.Module]:
        """Train all tasks' modules; the results have no variance, as the mean is subtracted."""
        trained = super().fit_all(features, losses)
        modules: set[Any] = set(trained.values())
        deployed = {module: module.deployed() for module in modules}
        return {task: deployed[module] for task, module in trained.items()}

    def trainings(self, features: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Training]:
        """By task, of one module where it is shared."""
        if not self.shared:
            return super().trainings(features)
        every = torch.cat([expert for _, expert in features.values()])
        return self._of_one_module(features, kl_term(every, self.kl_weight), "shared")

    def training(self, merged: Tensor, expert: Tensor, task: str) -> Training:
        """The training of a task's own module."""
        term = kl_term(expert, self.kl_weight)
        return self._of_one_module({task: (merged, expert)}, term, task)[task]

    def _of_one_module(
        self, features: Mapping[str, tuple[Tensor, Tensor]], term: "KlTerm", owner: str
    ) -> dict[str, Training]:
        first = next(merged for merged, _ in features.values())
        module = self.initial_module(first.shape[1], owner, term.log_variance).to(first.device)
        return {
            task: Training(module, self._loss(module, term, task), *pair)
            for task, pair in features.items()
        }

    def _loss(self, module: "ProbSurgeryModule", term: "KlTerm", task: str) -> Loss:
        """Mean absolute difference under one draw of noise, plus the KL term."""
        noise = task_generator(self.seed, task, "noise")

        def loss(before: Tensor, target: Tensor) -> Tensor:
            mean, log_variance = module.distribution(before)
            draw = torch.randn(mean.shape, generator=noise).to(mean)
            corrected = before - (mean + (0.5 * log_variance).exp() * draw)
            divergence = standard_normal_kl(mean, log_variance)
            return functional.l1_loss(corrected, target) + term.weight * divergence

        return loss

    def initial_module(
        self, width: int, task: str = "", log_variance: float = 0.0
    ) -> "ProbSurgeryModule":
        """A module before training: its mean is 0 everywhere, its log variance the given one."""
        generator = task_generator(self.seed, task, "weights")
        hidden = self.scaled(self.hidden, width)
        down = initial_weight(hidden, width, generator)
        zeros = torch.zeros(width, hidden)
        return ProbSurgeryModule(down, zeros, zeros.clone(), log_variance)


class KlTerm(NamedTuple):
    """The regulariser's weight in the objective, and the noise's log variance before training."""

    weight: float
    log_variance: float


class ProbSurgeryModule(nn.Module):
    """One task's distribution of the correction: N(M a, exp(V a + offset)) with a = relu(P f).

    Attributes:
        down: P, `[hidden, d]`.
        mean: M, `[d, hidden]`.
        log_variance: V, `[d, hidden]`.
        offset: Added to the log variance; 0 for the authors' module.
    """

    def __init__(self, down: Tensor, mean: Tensor, log_variance: Tensor, offset: float) -> None:
        super().__init__()
        self.down = nn.Parameter(down)
        self.mean = nn.Parameter(mean)
        self.log_variance = nn.Parameter(log_variance)
        self.offset = offset

    def distribution(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log variance of what is subtracted, `[..., d]` each, from `[..., d]`."""
        hidden = torch.relu(functional.linear(features, self.down))
        log_variance = functional.linear(hidden, self.log_variance) + self.offset
        return functional.linear(hidden, self.mean), log_variance

    def deployed(self) -> SurgeryModule:
        """The module without its variance: at inference the mean is subtracted."""
        return SurgeryModule(self.down.detach(), self.mean.detach()).requires_grad_(False).eval()


def standard_normal_kl(mean: Tensor, log_variance: Tensor) -> Tensor:
    """KL(N(mean, exp(log_variance)) || N(0, 1)) in nats, summed over d, averaged over samples."""
    per_coordinate = 0.5 * (log_variance.exp() + mean.square() - 1 - log_variance)
    return per_coordinate.sum(dim=-1).mean()


def kl_term(expert_features: Tensor, kl_weight: float | str) -> KlTerm:
    """The regulariser's constants for features `[n, d]`.

    A number is the weight of the authors' module; `scaled` takes the weight at which the noise
    settles at 0.145 of the features' root mean square, and starts it there.
    """
    if not isinstance(kl_weight, str):
        return KlTerm(float(kl_weight), 0.0)
    noise = _RELATIVE_NOISE * expert_features.double().square().mean().sqrt().item()
    width = expert_features.shape[-1]
    return KlTerm(noise / (_NOISE_PER_WEIGHT * width), 2 * math.log(max(noise, 1e-12)))
