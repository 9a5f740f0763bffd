"""ReACT (arXiv 2511.10943): final features turned to the experts' by one matrix, in closed form."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from fusion_bench_featcal.errors.nearest_names import refuse_unknown
from fusion_bench_featcal.lab.rivals.corrected_model import ALL_TASKS
from fusion_bench_featcal.lab.rivals.correction_modules import AffineModule
from fusion_bench_featcal.lab.rivals.corrections import (
    ClosedFormCorrection,
    CorrectionData,
    FittedCorrections,
)
from fusion_bench_featcal.lab.rivals.matrices import nearest_orthogonal
from fusion_bench_featcal.settings.fields import is_mapping_to, setting
from fusion_bench_featcal.settings.rules import is_factor


class ReACT(ClosedFormCorrection, option="react", source="AAAI 2026, arXiv 2511.10943"):
    """ReACT: one matrix after the model, which maps its features to all experts' features.

    It is a ridge regression with a rotation as anchor, in closed form. With `task_id` there is one
    matrix per task, which needs the task's name at inference.
    """

    ridge: float = setting(
        0.1,
        "Strength of the pull towards each task's rotation, added to sums over samples. The "
        "paper's value.",
        gt=0,
    )
    task_id: bool = setting(
        False, "Use one matrix per task (one-hot weights) instead of one for all tasks."
    )
    task_weights: Mapping[str, float] | None = setting(
        None,
        "Weights of the tasks in the one matrix for all tasks, {task: weight}. Other tasks have 1.",
        accepts="a mapping of tasks to numbers above 0",
        check=lambda value: is_mapping_to(is_factor, value),
    )

    def fit_all(self, training_data: Mapping[str, CorrectionData]) -> FittedCorrections:
        """Fit the matrices, in float64.

        With features Z of the merged model and Y of a task's expert as rows, R the rotation with
        the least `|Z R' - Y|` and C = Z'Z + ridge I, the task's matrix is `(Y'Z + ridge R) C^-1`.
        That of all tasks is `(sum w (Y'Z + ridge R)) (sum w C)^-1`.
        """
        systems, weights = {}, self.task_weights or {}
        refuse_unknown(weights, training_data, "task_weights.")
        for task, data in training_data.items():
            merged, expert = data.inputs.double(), data.targets[0].double()
            cross, eye = expert.mT @ merged, torch.eye(merged.shape[1]).to(merged)
            sums = cross + self.ridge * rotation_of(cross), merged.mT @ merged + self.ridge * eye
            systems[task] = weights.get(task, 1.0) * torch.stack(sums)
        if not self.task_id:
            systems = {ALL_TASKS: torch.stack([*systems.values()]).sum(0)}
        dtype = next(iter(training_data.values())).inputs.dtype
        return {
            t: [solve_correction(target, gram, dtype)] for t, (target, gram) in systems.items()
        }, {}


def rotation_of(cross: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    """Return the orthogonal R of largest `tr(R' Y'Z)`, given `Y'Z`.

    In directions that no sample determines, R is the rotation nearest to the identity.
    """
    u, values, vt = torch.linalg.svd(cross)
    decides = values > len(values) * torch.finfo(values.dtype).eps * values[0]
    rotation, eye = (u * decides) @ vt, torch.eye(len(values)).to(values)
    others = (eye - rotation @ rotation.mT) @ (eye - rotation.mT @ rotation)
    return nearest_orthogonal(rotation + others)


def solve_correction(
    target: Float[Tensor, "d d"], gram: Float[Tensor, "d d"], dtype: torch.dtype
) -> AffineModule:
    """Return the correction that multiplies features by the matrix `target gram^-1`."""
    matrix = torch.eye(len(gram)).to(gram) - torch.linalg.solve(gram, target, left=False)
    shift = matrix.new_zeros(len(gram))
    return AffineModule(matrix.to(dtype), shift.to(dtype)).requires_grad_(False)
