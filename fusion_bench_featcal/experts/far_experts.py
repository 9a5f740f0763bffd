"""Distances of experts from the base and angles between them, from a sample of their weights."""

import itertools
import math
import statistics
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fusion_bench_featcal.experts import ExpertModel

FAR = 5.0
"""Ratio to the others' median distance from the base above which an expert is reported as far."""

ALIKE = 0.3
"""Smallest cosine of two task vectors that is reported. Task vectors of the bundled suites have
at most 0.21, 0.02 to 0.06 on average. With an expert in place of the base they have 0.5 to 0.6."""

_MATRICES = 8
_ROWS = 64


def far_experts(experts: Mapping[str, ExpertModel], base: nn.Module) -> list[str]:
    """Return a sentence for each expert far from the base, and one on very similar experts.

    The first rows of a few matrices of each expert are read, spread evenly over the model.

    Args:
        experts: Task -> expert.
        base: The base model.
    """
    vectors = task_vectors(experts, base_sample(base))
    distances = {task: float(vector.norm()) for task, vector in vectors.items()}
    notes = []
    for task, distance in distances.items():
        of_others = [value for other, value in distances.items() if other != task]
        median = statistics.median(of_others) if of_others else 0.0
        if distance == 0:
            notes.append(
                f"expert {task} equals the base on a sample of its weights: check that it is the "
                "fine-tuned model"
            )
        if distance > FAR * median > 0:
            notes.append(
                f"expert {task} lies {distance / median:.1f} times as far from the base as the "
                "others (median, on a sample of weights): its task may be given up for theirs"
            )
    return notes + experts_alike(vectors, "the base")


def experts_alike(vectors: Mapping[str, Tensor], base: str) -> list[str]:
    """Return a sentence on the most similar pair of experts, if their cosine is above `ALIKE`.

    With a fine-tuned model in place of the base, all task vectors contain its reversed task vector.

    Args:
        vectors: Task -> task vector, as `task_vectors` gives them.
        base: Name of the base in messages.
    """
    units = {task: v / v.norm() for task, v in vectors.items() if 0 < v.norm() < math.inf}
    pairs = [(float(units[a] @ units[b]), a, b) for a, b in itertools.combinations(units, 2)]
    cosine, one, other = max(pairs, default=(0.0, "", ""))
    if cosine <= ALIKE:
        return []
    if torch.equal(vectors[one], vectors[other]):
        return [f"experts {one} and {other} are the same on a sample of weights: check their paths"]
    return [
        f"the changes from {base} to experts {one} and {other} have a cosine of {cosine:.2f} "
        "(separate trainings: below 0.2): the base may have been tuned itself from the model that "
        "they started from, or one of them from the other. Check that all were tuned from this base"
    ]


def task_vectors(
    models: Mapping[str, ExpertModel], base: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return each model's difference from the base on a sample of weights, one float32 vector."""
    return {
        name: torch.cat(
            [torch.zeros(0)]
            + [(model.rows(key, 0, _ROWS).float() - rows).flatten() for key, rows in base.items()]
        )
        for name, model in models.items()
    }


def base_sample(base: nn.Module | ExpertModel) -> dict[str, Tensor]:
    """Return the first rows of a few of the base's matrices, float32 on the CPU."""
    if isinstance(base, ExpertModel):
        names = _sampled(base.module.state_dict())
        return {name: base.rows(name, 0, _ROWS).float() for name in names}
    tensors = base.state_dict()
    return {name: tensors[name][:_ROWS].to("cpu").float() for name in _sampled(tensors)}


def _sampled(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return names of matrices spread over the model, without the largest half (embeddings)."""
    sizes = {n: t.numel() for n, t in tensors.items() if t.ndim == 2 and t.is_floating_point()}
    if not sizes:
        return []
    median = statistics.median_high(sizes.values())
    names = [name for name, size in sizes.items() if size <= median]
    step = max(1, len(names) // _MATRICES)
    return names[::step][:_MATRICES]
