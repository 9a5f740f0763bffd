"""Representation Surgery (arXiv 2402.02705): a small trained module per task corrects features."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fusion_bench_featcal.lab.rivals.feature_correction import FeatureCorrection
from fusion_bench_featcal.lab.rivals.registry import method
from fusion_bench_featcal.lab.rivals.training import (
    TaskFeatures,
    initial_surgery,
    shuffled_batches,
    task_generator,
)
from fusion_bench_featcal.setting_fields import setting
from fusion_bench_featcal.settings import CalibrationError


@method("surgery", source="Yang et al., ICML 2024, arXiv 2402.02705")
class Surgery(FeatureCorrection):
    """Representation Surgery: a small trained module per task corrects the final feature.

    It needs the task's name at inference. The defaults are the authors'. FusionBench's version,
    which always merges by AdaMerging first, is method=surgery/adamerging_surgery.
    """

    rank: int = setting(16, "Width of each task's module.", ge=1, group="module and fit")
    learning_rate: float = setting(1e-3, "Adam's step size.", gt=0, group="module and fit")
    steps: int = setting(1000, "Updates of each task's module.", ge=1)
    optimizer: str = setting(
        "joint",
        "`joint`: one Adam for all tasks' modules, as the authors have it, so that a step of one "
        "task moves the others on by their momentum; `per_task`: one for each.",
        choices=("joint", "per_task"),
    )

    def _modules(self, features: Mapping[str, TaskFeatures]) -> dict[str, Any]:
        """Return each task's module before training."""
        return {task: self.module(task_features, task) for task, task_features in features.items()}

    def module(self, features: TaskFeatures, name: str) -> nn.Module:
        """Return a module before training, which corrects nothing, seeded by `name`."""
        generator = task_generator(self.seed, name, "weights")
        return initial_surgery(features.expert.shape[1], self.rank, generator)

    def _loss(
        self, module: Any, features: TaskFeatures, positions: Tensor, noise: torch.Generator
    ) -> Tensor:
        """Return the mean absolute difference of corrected and expert features, 0-dim.

        Args:
            module: The task's module.
            features: The task's features. Each of several sites has a separate difference.
            positions: The batch, as positions of samples.
            noise: The task's generator for random numbers.
        """
        before, target = features.at(positions)
        corrected = features.corrected(before, module)
        targets = target.split([site.shape[1] for site in corrected], dim=1)
        return torch.stack([*map(functional.l1_loss, corrected, targets)]).sum()

    def fit_all(self, features: Mapping[str, TaskFeatures]) -> dict[str, nn.Module]:
        """Train all tasks' modules, with one Adam for all or one for each task.

        Raises:
            CalibrationError: If the training diverges.
        """
        self.losses.clear()
        if self.optimizer == "joint":
            return self._train(features)
        trained = [self._train({task: task_features}) for task, task_features in features.items()]
        return {task: module for modules in trained for task, module in modules.items()}

    @torch.inference_mode(False)  # tensors created in inference mode cannot be trained
    @torch.enable_grad()
    def _train(self, features: Mapping[str, TaskFeatures]) -> dict[str, nn.Module]:
        """Train by one Adam (no weight decay, no schedule), one update for each task in turn."""
        modules = self._modules(features)
        device = next(iter(features.values())).expert.device
        parameters = nn.ModuleList(modules.values()).to(device).train().parameters()  # each once
        optimizer = torch.optim.Adam(parameters, lr=self.learning_rate)
        updates = {task: self._updates(task, modules[task], f) for task, f in features.items()}
        losses: dict[str, list[Tensor]] = {task: [] for task in features}
        for _ in range(self.steps):
            for task, update in updates.items():
                loss = next(update)
                # Zeros instead of None, so that Adam also moves the other tasks' modules.
                optimizer.zero_grad(set_to_none=False)
                loss.backward()
                optimizer.step()
                losses[task].append(loss.detach())
        for task, module in modules.items():
            weights = module.eval().requires_grad_(False).parameters()
            if not all(bool(torch.isfinite(weight).all()) for weight in weights):
                raise CalibrationError(
                    f"task {task!r}: training diverged, its weights are not finite. Lower "
                    f"method.learning_rate (now {self.learning_rate})"
                )
            # Read at once, because reading each loss would wait for the device.
            self.losses[task] = torch.stack(losses[task]).tolist()
        return modules

    def _updates(self, task: str, module: nn.Module, features: TaskFeatures) -> Iterator[Tensor]:
        """Yield the loss of each update, computed on request."""
        batches, noise = (task_generator(self.seed, task, use) for use in ("batches", "noise"))
        samples = len(features.merged)
        for positions in shuffled_batches(samples, self.batch_size, self.steps, batches):
            yield self._loss(module, features, positions, noise)
