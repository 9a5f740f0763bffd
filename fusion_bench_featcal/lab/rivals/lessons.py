"""Experts' features on samples, for comparison with other models."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.fusionbench.pool_models import load_pool_model
from fusion_bench_featcal.lab.rivals.final_features import final_features, final_rows
from fusion_bench_featcal.lab.rivals.training import check_features
from fusion_bench_featcal.method_inputs import MethodInputs
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings
from fusion_bench_featcal.streams.inputs import to_device
from fusion_bench_featcal.streams.rows import CountedRows, rows_of


@dataclass(frozen=True)
class Lesson:
    """One batch of a task, and the features of its expert.

    Attributes:
        inputs: Inputs of the model or of a block.
        rows: The counted positions, or None for all.
        target: The expert's features at these positions, `[n, d]`.
    """

    inputs: Any
    rows: CountedRows | None
    target: Tensor

    def features(self, model: nn.Module) -> Tensor:
        """Return a model's final features at these positions, `[n, d]`."""
        return rows_of(final_features(model, self.inputs), self.rows)


@torch.no_grad()
def expert_lessons(
    task: str,
    batches: Iterable[Any],
    inputs: MethodInputs,
    settings: FeatCalSettings,
    student: nn.Module | None = None,
) -> list[Lesson]:
    """Load one task's expert and run it once over its batches.

    Args:
        task: The task.
        batches: Batches of the models' inputs.
        inputs: The pool and the device.
        settings: `family` is used.
        student: Model to compare with the expert, which gets its dtype. By default the expert.

    Returns:
        A lesson for each batch.

    Raises:
        CalibrationError: If the final features of expert and model do not fit each other, are not
            finite, or the expert's are zero.
    """
    expert = load_pool_model(inputs.modelpool, task).to(device := inputs.fabric.device).eval()
    model = expert if student is None else student
    expert = expert.to(next(model.parameters()).dtype)
    family, lessons = resolve_family(settings.family, model), []
    for batch in batches:
        batch = to_device(batch, device)
        features, rows = final_features(expert, batch), final_rows(model, family, batch)
        if rows is not None and features.shape[:-1] != rows.shape:
            rows = None  # the features are pooled
        lessons.append(Lesson(batch, rows, rows_of(features, rows)))
    check_features(lessons[0].features(model), lessons[0].target, "")
    norm = mean_square(lessons)
    if not bool(torch.isfinite(norm)) or not bool(norm > 0):
        raise CalibrationError(
            f"the expert's final features have a mean square of {float(norm):g}. Look for zeros, "
            "NaN or infinite values in its weights"
        )
    return lessons


def mean_square(lessons: Sequence[Lesson]) -> Tensor:
    """Return the mean square of the expert's features, 0-dim."""
    return torch.cat([lesson.target for lesson in lessons]).square().mean()
