"""Figures of sentence-transformers' evaluators, without a trace in the model."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from fusion_bench_featcal.encoders.library import Encoder
from fusion_bench_featcal.modules.models import Modes


def primary_figure(evaluator: Any, model: Encoder) -> tuple[str, float]:
    """Return the name and value of a library evaluator's main figure, and leave the model as is."""
    with unchanged(model) as twin:
        figures = evaluator(twin)
    if not isinstance(figures, dict):
        return "score", float(figures)
    name, prefix = evaluator.primary_metric, f"{getattr(evaluator, 'name', '')}_"
    return name.removeprefix(prefix), float(figures[name])


@contextmanager
def unchanged(model: Any) -> Iterator[Any]:
    """Yield a shallow copy of a model, whose evaluation leaves no trace in the model."""
    modes, twin = Modes.of(model), copy.copy(model)
    # A card that takes no figures.
    twin.model_card_data = SimpleNamespace(set_evaluation_metrics=lambda *_, **__: None)
    try:
        yield twin
    finally:
        modes.restore(model)
