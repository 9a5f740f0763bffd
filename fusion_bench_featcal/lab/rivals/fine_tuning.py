"""Gradient fine-tuning after FeatCal+: a few steps, which are undone if they do not help."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.words import option
from fusion_bench_featcal.lab.rivals import training
from fusion_bench_featcal.lab.rivals.distillation import Distillation, DistillationBatch
from fusion_bench_featcal.settings.fields import setting
from fusion_bench_featcal.streams.batch import Batch
from fusion_bench_featcal.streams.inputs import part_of
from fusion_bench_featcal.streams.samples import HELD, drawn_quarter

WARM_UP_STEPS = 10
MEASURING_INTERVAL = 10
"""Updates between two measurements of the held-out distance."""


class Polish(Distillation, option="featcal_baselines/polish", source="ours", without=("modules",)):
    """Polish: gradient fine-tuning after FeatCal+, in a hundred small steps of distillation.

    The loss is that of distillation. A quarter of each task's samples is held out. Of the states at
    the start and after every ten steps, the method keeps the one with the least mean distance on
    the held-out samples. The start has an advantage if FeatCal+ has used these samples, so that
    helpful steps may be undone, but harmful ones are not kept. It needs several times the model's
    memory.
    """

    learning_rate: float = setting(
        1e-4,
        "Adam's largest step size, reached after ten updates; it falls linearly to 0.",
        gt=0,
    )
    steps: int = setting(100, "Number of updates, each on one batch of every task.", ge=1)

    def rate_at(self, step: int) -> float:
        """Return the step size of an update, counted from 0, relative to `learning_rate`."""
        return min(1.0, (step + 1) / WARM_UP_STEPS) * super().rate_at(step)

    def train(
        self,
        model: nn.Module,
        trained: Sequence[str],
        training_data: Mapping[str, Sequence[DistillationBatch]],
        on_update: Callable[[int], None] = lambda _: None,
    ) -> dict[str, list[tuple[int, float]]]:
        """Train parameters of a model in place, and restore their best state.

        Arguments as for `GradientTraining.train`.

        Returns:
            The training curves, and the held-out distance as the curve of a task `held out`.

        Raises:
            CalibrationError: If a task has too few samples, or the training diverges.
        """
        parameters = [model.get_parameter(name) for name in trained]
        held_out = [[b for b in batches if b.is_held_out] for batches in training_data.values()]
        fitted = {t: [b for b in training_data[t] if not b.is_held_out] for t in training_data}
        curve, best = list[tuple[int, float]](), [parameter.clone() for parameter in parameters]

        def keep_best(step: int) -> None:
            on_update(step)
            if step % MEASURING_INTERVAL and step != self.steps:
                return
            distance = mean_distance(model, held_out)
            if distance < min((value for _, value in curve), default=math.inf):
                for best_value, parameter in zip(best, parameters, strict=True):
                    best_value.copy_(parameter.detach())
            curve.append((step, distance))

        keep_best(0)
        curves = super().train(model, trained, fitted, keep_best)
        for best_value, parameter in zip(best, parameters, strict=True):
            parameter.data.copy_(best_value)
        return curves | {"held out": curve}

    def split_held_out(self, task: str, batches: list[Batch]) -> list[Batch]:
        """Split each batch into one with fitted samples and one with held-out samples.

        Raises:
            CalibrationError: If there are too few samples.
        """
        samples = sum(batch.samples for batch in batches)
        if samples < HELD:
            raise CalibrationError(
                f"polish holds out one of {HELD} samples, but there are only {samples}. Raise "
                f"{option('samples_per_task')}"
            )
        mask = drawn_quarter(samples, training.task_generator(self.seed, task, "polish"))
        split_batches = list[Batch]()
        for batch in batches:
            batch_mask = mask[batch.start : batch.start + batch.samples]
            for chosen, held_out in ((~batch_mask, None), (batch_mask, batch_mask)):
                if count := int(chosen.sum()):
                    indices = chosen.nonzero().flatten()
                    inputs = part_of(batch.inputs, batch.samples, indices)
                    split_batches.append(Batch(inputs, count, batch.start, held_out=held_out))
        return split_batches


@torch.no_grad()
def mean_distance(model: nn.Module, tasks: Sequence[Sequence[DistillationBatch]]) -> float:
    """Return the mean over tasks of a model's relative squared distance from the experts."""
    distances = list[Tensor]()
    for batches in tasks:
        total = torch.stack([batch.loss(model) * len(batch.target) for batch in batches]).sum()
        distances.append(total / sum(len(batch.target) for batch in batches))
    return float(torch.stack(distances).mean())
