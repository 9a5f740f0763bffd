"""Notes on experts that may not belong together, from a sample of their weights."""

import logging
import statistics
from collections.abc import Mapping

import torch
from torch import Tensor

from fusion_bench_featcal.experts.expert import LazyModel
from fusion_bench_featcal.experts.source import InMemoryExpert

logger = logging.getLogger(__name__)

UNRELATED = 1.0
"""Distance from the base, relative to its norm, of models without a common origin. Two separately
trained models are about 1.4 apart, a model and its fine-tuned version below 0.5."""

_WEIGHTS = 8
_ROWS = 64


def warn_about_unrelated_models(models: Mapping[str, LazyModel], base: LazyModel) -> None:
    """Log the sentences of `notes_on_experts` on models in memory.

    Entry points that read models from files show the sentences in their reports.
    """
    loaded = {n: model for n, model in models.items() if isinstance(model.source, InMemoryExpert)}
    for note in notes_on_experts(loaded, base):
        logger.warning(note)


def notes_on_experts(models: Mapping[str, LazyModel], base: LazyModel) -> list[str]:
    """Return a sentence for each model that is unrelated or equal to the base.

    The first rows of a few weights of each model are read, spread evenly over the model.

    Args:
        models: Label of a model in sentences -> the model, an expert or the merged one.
        base: The base model.
    """
    tensors, notes = base.structure.state_dict(), list[str]()
    sizes = {n: t.numel() for n, t in tensors.items() if t.ndim > 1 and t.is_floating_point()}
    median = statistics.median_high(sizes.values() or [0])  # the largest half has the embeddings
    all_models = base, *models.values()  # a model with another head lacks tensors
    names = [n for n in sizes if sizes[n] <= median and all(n in m.keys for m in all_models)]
    sample = names[:: max(1, len(names) // _WEIGHTS)][:_WEIGHTS]
    rows = _rows(base, sample)
    for label, model in models.items() if sample else ():
        distance = float((_rows(model, sample) - rows).norm() / rows.norm().clamp_min(1e-30))
        if distance == 0:
            notes.append(
                f"{label} equals the base on a sample of its weights: check that it is the "
                "fine-tuned model"
            )
        if distance > UNRELATED:
            notes.append(
                f"{label} may not be fine-tuned from this base: on a sample of weights, its "
                f"distance from the base is {distance:.2f} times the base's norm (fine-tuned "
                "models: below 0.5)"
            )
    return notes


def _rows(model: LazyModel, names: list[str]) -> Tensor:
    """Return the first rows of some weights as one vector."""
    rows = [model.rows(name, 0, _ROWS).float().flatten() for name in names]
    return torch.cat([torch.empty(0, dtype=torch.float32), *rows])
