"""Polish: a few gradient steps behind a repair, which are undone where they do not help."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.words import option
from fusion_bench_featcal.lab.rivals import training
from fusion_bench_featcal.lab.rivals.distillation import Distillation, DistillationBatch
from fusion_bench_featcal.settings.fields import setting
from fusion_bench_featcal.streams.batch import Batch
from fusion_bench_featcal.streams.inputs import part_of
from fusion_bench_featcal.streams.samples import HELD, drawn_quarter

WARM_UP = 10
CHECKED = 10
"""Updates between two measurements of the held-out distance."""


class Polish(Distillation, option="featcal_baselines/polish", source="ours", without=("modules",)):
    """Polish: a hundred small steps of distillation, for models that FeatCal+ has repaired.

    The loss is that of distillation. A quarter of each task's samples is held out. Of the states
    after every ten steps and that at the start, the one with the least mean held-out distance is
    kept. The start has seen these samples if it was made from them, so that steps are rather undone
    than harmful. It needs several times the model's memory.
    """

    learning_rate: float = setting(
        1e-4,
        "Adam's largest step size, reached after ten updates; it falls linearly to 0.",
        gt=0,
    )
    steps: int = setting(100, "Updates, each on one batch of every task.", ge=1)

    def rate_at(self, step: int) -> float:
        """Return the step size of an update, counted from 0, relative to `learning_rate`."""
        return min(1.0, (step + 1) / WARM_UP) * super().rate_at(step)

    def train(
        self,
        model: nn.Module,
        trained: Sequence[str],
        training_data: Mapping[str, Sequence[DistillationBatch]],
    ) -> dict[str, list[tuple[int, float]]]:
        """Train parameters of a model in place, and leave them in the best state.

        Args:
            model: The model.
            trained: Names of the parameters.
            training_data: The batches of each task.

        Returns:
            The training curves, and the held-out distance as that of `held out`.

        Raises:
            CalibrationError: If a task has too few samples, or the training diverges.
        """
        parameters = [model.get_parameter(name) for name in trained]
        held_out = [
            [b for b in task_batches if b.is_held_out] for task_batches in training_data.values()
        ]
        fitted = {
            t: [b for b in task_batches if not b.is_held_out]
            for t, task_batches in training_data.items()
        }
        curve, best = list[tuple[int, float]](), [parameter.clone() for parameter in parameters]

        def keep_best(step: int) -> None:
            if step % CHECKED and step != self.steps:
                return
            distance = mean_distance(model, held_out)
            if distance < min((value for _, value in curve), default=math.inf):
                for kept, parameter in zip(best, parameters, strict=True):
                    kept.copy_(parameter.detach())
            curve.append((step, distance))

        keep_best(0)
        curves = self.descend(model, trained, fitted, keep_best)
        for kept, parameter in zip(best, parameters, strict=True):
            parameter.data.copy_(kept)
        return curves | {"held out": curve}

    def divided(self, task: str, batches: list[Batch]) -> list[Batch]:
        """Return a task's batches, each as one of fitted samples and one of held-out ones.

        Raises:
            CalibrationError: If there are too few samples.
        """
        samples = sum(batch.samples for batch in batches)
        if samples < HELD:
            raise CalibrationError(
                f"polish holds out one of {HELD} samples, and there are {samples}. Raise "
                f"{option('samples_per_task')}"
            )
        mask = drawn_quarter(samples, training.task_generator(self.seed, task, "polish"))
        divided = list[Batch]()
        for batch in batches:
            batch_mask = mask[batch.start : batch.start + batch.samples]
            for chosen, held_out in ((~batch_mask, None), (batch_mask, batch_mask)):
                if count := int(chosen.sum()):
                    numbers = chosen.nonzero().flatten()
                    inputs = part_of(batch.inputs, batch.samples, numbers)
                    divided.append(Batch(inputs, count, batch.start, held_out=held_out))
        return divided


@torch.no_grad()
def mean_distance(model: nn.Module, tasks: Sequence[Sequence[DistillationBatch]]) -> float:
    """Return the mean over tasks of a model's relative squared distance from the experts."""
    sums = [
        torch.stack([lesson.loss(model) * len(lesson.target) for lesson in task_batches]).sum()
        / sum(len(lesson.target) for lesson in task_batches)
        for task_batches in tasks
    ]
    return float(torch.stack(sums).mean())
