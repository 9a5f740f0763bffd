"""Notes on experts that may not belong together, from a sample of their weights."""

import itertools
import statistics
from collections.abc import Mapping

import torch
from torch import Tensor

from fusion_bench_featcal.experts.expert import ExpertModel

UNRELATED = 1.0
"""Distance from the base, relative to its norm, of models without a common origin. Two separately
trained models are about 1.4 apart, a model and its fine-tuned version below 0.5."""

ALIKE = 0.3
"""Smallest cosine of two task vectors that is reported. Task vectors of the bundled suites have
at most 0.21, 0.02 to 0.06 on average. With an expert in place of the base they have 0.5 to 0.6."""

MERGED = "the merged model"

_MATRICES = 8
_ROWS = 64


def notes_on_experts(
    experts: Mapping[str, ExpertModel], base: ExpertModel, merged: ExpertModel | None = None
) -> list[str]:
    """Return a sentence for each model unrelated or equal to the base, and one on similar experts.

    The first rows of a few matrices of each model are read, spread evenly over the model.

    Args:
        experts: Task -> expert.
        base: The base model.
        merged: The merged model, which is compared with the base.
    """
    models = {f"expert {task}": expert for task, expert in experts.items()}
    if merged is not None:
        models[MERGED] = merged
    if not (sample := _sampled(base)):
        return []
    rows = torch.cat([base.rows(name, 0, _ROWS).float().flatten() for name in sample])
    vectors = {
        label: torch.cat([model.rows(name, 0, _ROWS).float().flatten() for name in sample]) - rows
        for label, model in models.items()
    }
    notes = []
    for label, vector in vectors.items():
        distance = float(vector.norm() / rows.norm().clamp_min(1e-30))
        if distance == 0:
            notes.append(
                f"{label} equals the base on a sample of its weights: check that it is the "
                "fine-tuned model"
            )
        if distance > UNRELATED:
            notes.append(
                f"{label} may not be tuned from this base: on a sample of weights it lies "
                f"{distance:.2f} times the base's norm away (tuned models: below 0.5)"
            )
    vectors.pop(MERGED, None)
    return notes + _alike(vectors)


def _alike(vectors: Mapping[str, Tensor]) -> list[str]:
    """Return a sentence on the most similar pair of task vectors, if their cosine is high.

    With a fine-tuned model in place of the base, all task vectors contain its reversed task vector.
    """
    units = {label: v / v.norm() for label, v in vectors.items() if 0 < v.norm() < torch.inf}
    pairs = [(float(units[a] @ units[b]), a, b) for a, b in itertools.combinations(units, 2)]
    cosine, one, other = max(pairs, default=(0.0, "", ""))
    if cosine <= ALIKE:
        return []
    if torch.equal(vectors[one], vectors[other]):
        return [f"{one} and {other} are the same on a sample of weights: check their paths"]
    return [
        f"the changes from the base to {one} and {other} have a cosine of {cosine:.2f} (separate "
        "trainings: below 0.2): the base may have been tuned itself from the model that they "
        "started from, or one of them from the other. Check that all were tuned from this base"
    ]


def _sampled(model: ExpertModel) -> list[str]:
    """Return names of matrices spread over a model, without the largest half (embeddings)."""
    tensors = model.module.state_dict()
    sizes = {n: t.numel() for n, t in tensors.items() if t.ndim == 2 and t.is_floating_point()}
    if not sizes:
        return []
    median = statistics.median_high(sizes.values())
    names = [name for name, size in sizes.items() if size <= median and name in model.keys]
    return names[:: max(1, len(names) // _MATRICES)][:_MATRICES]
