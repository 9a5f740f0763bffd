"""Experts that lie far farther from the base than the others, told by a sample of their weights."""

import math
import statistics
from collections.abc import Mapping

from torch import Tensor, nn

from fusion_bench_featcal.experts import ExpertModel

FAR = 5.0
"""An expert is far whose distance from the base is over this many times the others' median."""

_MATRICES = 8
_ROWS = 64


def far_experts(experts: Mapping[str, ExpertModel], base: nn.Module) -> list[str]:
    """A sentence for each expert that lies far farther from the base than the others.

    Of each expert the first rows of a few matrices are read, spread evenly over the model.

    Args:
        experts: Task -> expert.
        base: The base model.
    """
    tensors = base.state_dict()
    names = _sampled(tensors)
    distances = {
        task: math.sqrt(sum(_squared_distance(expert, name, tensors[name]) for name in names))
        for task, expert in experts.items()
    }
    notes = []
    for task, distance in distances.items():
        others = [value for other, value in distances.items() if other != task]
        median = statistics.median(others) if others else 0.0
        if distance > FAR * median > 0:
            notes.append(
                f"expert {task} lies {distance / median:.1f} times as far from the base as the "
                "others (median, on a sample of weights): its task may be given up for theirs"
            )
    return notes


def distance_from(base: ExpertModel, model: ExpertModel, like: nn.Module) -> float:
    """Distance of a model from its base, in norms of the base, on a sample of their weights.

    Args:
        base: The base.
        model: The model.
        like: The structure of both; its weights are not read.
    """
    squared = norm = 0.0
    for name in _sampled(like.state_dict()):
        rows = base.first_rows(name, _ROWS).float()
        squared += _squared_distance(model, name, rows)
        norm += float(rows.square().sum())
    return math.sqrt(squared / norm) if norm else 0.0


def _sampled(tensors: Mapping[str, Tensor]) -> list[str]:
    """Matrices evenly spread over the model; the largest half (embeddings) is left out."""
    sizes = {n: t.numel() for n, t in tensors.items() if t.ndim == 2 and t.is_floating_point()}
    if not sizes:
        return []
    median = statistics.median_high(sizes.values())
    names = [name for name, size in sizes.items() if size <= median]
    step = max(1, len(names) // _MATRICES)
    return names[::step][:_MATRICES]


def _squared_distance(expert: ExpertModel, name: str, base: Tensor) -> float:
    rows = expert.first_rows(name, _ROWS)
    return float((rows.float() - base[:_ROWS].to("cpu").float()).square().sum())
