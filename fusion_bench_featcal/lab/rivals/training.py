"""Training of tasks' corrections by Adam, on features that are computed once or in every update."""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.fusionbench.processors import text_kind
from fusion_bench_featcal.lab.rivals.corrected_model import SurgeryModule
from fusion_bench_featcal.lab.rivals.feature_correction import FeatureCorrection, check_features
from fusion_bench_featcal.method_inputs import MethodInputs
from fusion_bench_featcal.setting_fields import setting
from fusion_bench_featcal.settings import CalibrationError

PUBLISHED_FEATURES = 512
"""Width of the features for which the authors chose their modules' widths."""

Loss = Callable[[Tensor, Tensor], Tensor]
"""From a batch of merged and of expert features, `[batch, d]` each, to a 0-dim loss."""


@dataclass(frozen=True, eq=False)
class Training:
    """The training of one task's module.

    Attributes:
        module: The module; several tasks may share one.
        loss: Its loss.
        merged: What the loss takes of the merged model, `[n, ...]`: its features or its inputs.
        expert: The expert's features on the same samples, `[n, d]`.
    """

    module: nn.Module
    loss: Loss
    merged: Tensor
    expert: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedCorrection(FeatureCorrection):
    """A correction whose modules are trained; a subclass makes them in `training`."""

    learning_rate: float = setting(1e-3, "Adam's step size.", gt=0, group="module and fit")
    steps: int = setting(1000, "Updates of each task's module.", ge=1)
    optimizer: str = setting(
        "joint",
        "`joint`: one Adam for all tasks' modules, as the authors have it, so that a step of one "
        "task moves the others on by their momentum; `per_task`: one for each.",
        choices=("joint", "per_task"),
    )
    width: str = setting(
        "absolute",
        "`relative`: the width of a module is set for features of 512 (CLIP ViT-B), and scaled "
        "with theirs.",
        choices=("absolute", "relative"),
    )
    recompute: bool = setting(
        False,
        "Run merged model and experts in every update, as the authors' codes do. Changes costs and "
        "rounding alone; images only.",
    )

    # For `recompute`, by task: the expert, and features of both models at some positions.
    _experts: dict[str, nn.Module] = field(default_factory=dict, init=False, repr=False)
    _again: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = field(
        default_factory=dict, init=False, repr=False
    )

    def check(self, inputs: MethodInputs) -> None:
        """Find the feature that is corrected and open the data."""
        if self.recompute and text_kind(inputs.modelpool) is not None:
            raise CalibrationError(
                "method.recompute=true is for images: texts are padded to the length of their "
                "batch. Set method.recompute=false"
            )
        super().check(inputs)

    def training(self, merged: Tensor, expert: Tensor, task: str) -> Training:
        """The training of one task's module, which has its initial weights; arguments as `fit`."""
        raise NotImplementedError

    def trainings(self, features: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Training]:
        """By task; `features` as `fit_all` takes them."""
        return {task: self.training(*pair, task) for task, pair in features.items()}

    def together(self, tasks: Sequence[str]) -> list[Sequence[str]]:
        """Groups of tasks whose modules have one optimiser."""
        return [tasks] if self.optimizer == "joint" else [[task] for task in tasks]

    def scaled(self, width: int, features: int) -> int:
        """A module's width for so many features, at least 1."""
        if self.width == "absolute":
            return width
        return max(1, round(width * features / PUBLISHED_FEATURES))

    def fit(
        self, merged: Tensor, expert: Tensor, task: str = "", losses: list[Tensor] | None = None
    ) -> Any:
        """Train one task's module alone."""
        found: dict[str, list[Tensor]] = {}
        module = self.fit_all({task: (merged, expert)}, found)[task]
        if losses is not None:
            losses += found[task]
        return module

    @torch.inference_mode(False)  # tensors made in inference mode cannot be trained
    def fit_all(
        self,
        features: Mapping[str, tuple[Tensor, Tensor]],
        losses: dict[str, list[Tensor]] | None = None,
    ) -> dict[str, nn.Module]:
        """Train all tasks' modules."""
        for task, pair in features.items():
            check_features(*pair, task)
        return self.train(self.trainings(features), losses)

    def train(
        self, trainings: Mapping[str, Training], losses: dict[str, list[Tensor]] | None = None
    ) -> dict[str, nn.Module]:
        """Train modules in place by Adam (no weight decay, no schedule), then freeze them.

        Args:
            trainings: By task.
            losses: Filled, by task, with the loss of every update, 0-dim.

        Returns:
            The modules by task.

        Raises:
            CalibrationError: If the training diverges.
        """
        found: dict[str, list[Tensor]] = {task: [] for task in trainings}
        # A caller may have switched gradients off, or hand over features made in inference mode.
        with torch.inference_mode(False), torch.enable_grad():
            for tasks in self.together(list(trainings)):
                self._train({task: trainings[task] for task in tasks}, found)
        for task, training in trainings.items():
            parameters = training.module.eval().requires_grad_(False).parameters()
            if not all(bool(torch.isfinite(parameter).all()) for parameter in parameters):
                raise CalibrationError(
                    f"task {task!r}: training diverged, its weights are not finite. Lower "
                    f"method.learning_rate (now {self.learning_rate})"
                )
        if losses is not None:
            losses.update(found)
        return {task: training.module for task, training in trainings.items()}

    def _corrections(
        self,
        merged: nn.Module,
        site: Any,
        batches: Mapping[str, Any],
        inputs: MethodInputs,
        losses: dict[str, list[Tensor]],
    ) -> dict[str, nn.Module]:
        """Fit all corrections, of features that are computed once or in every update."""
        if not self.recompute:
            return super()._corrections(merged, site, batches, inputs, losses)
        self._experts.update({t: self._expert(t, inputs) for t in inputs.modelpool.model_names})
        for task, expert in self._experts.items():
            pixels = torch.cat([batch["pixel_values"] for batch in batches[task]])
            self._again[task] = partial(self._recomputed, (merged, expert), site, pixels)
        try:
            return super()._corrections(merged, site, batches, inputs, losses)
        finally:
            self._experts.clear()
            self._again.clear()

    def _expert(self, task: str, inputs: MethodInputs) -> nn.Module:
        return self._experts.get(task) or super()._expert(task, inputs)

    def _recomputed(
        self, models: Sequence[nn.Module], site: Any, pixels: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Features of some images by merged model and expert."""
        before, target = (self.features(m, site, {"pixel_values": pixels[rows]}) for m in models)
        return before, target

    def _train(self, trainings: Mapping[str, Training], found: dict[str, list[Tensor]]) -> None:
        """Train with one optimiser: in every step one update for each task, in turn."""
        modules = nn.ModuleList(training.module for training in trainings.values())
        parameters = list(modules.train().requires_grad_(True).parameters())  # each once
        optimizer = torch.optim.Adam(parameters, lr=self.learning_rate)
        values = {task: self._losses(task, training) for task, training in trainings.items()}
        for _ in range(self.steps):
            for task, following in values.items():
                value = next(following)
                # Zeros in place of None: Adam then moves the other tasks' modules, too.
                optimizer.zero_grad(set_to_none=False)
                value.backward()
                optimizer.step()
                found[task].append(value.detach())

    def _losses(self, task: str, training: Training) -> Iterator[Tensor]:
        """The loss of each update, computed when it is asked for."""
        merged, expert = training.merged.detach().clone(), training.expert.detach().clone()
        again = self._again.get(task)
        generator = task_generator(self.seed, task, "batches")
        for positions in shuffled_batches(len(merged), self.batch_size, self.steps, generator):
            rows = positions.to(merged.device)
            yield training.loss(*(again(positions) if again else (merged[rows], expert[rows])))


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
