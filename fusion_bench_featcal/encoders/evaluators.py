"""Metrics of sentence-transformers' evaluators, without a trace in the model."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from fusion_bench_featcal.encoders.library import Encoder
from fusion_bench_featcal.modules.models import Modes


def primary_metric(evaluator: Any, model: Encoder) -> tuple[str, float]:
    """Return name and value of a library evaluator's primary metric. The model is unchanged."""
    with evaluation_copy(model) as twin:
        metrics = evaluator(twin)
    if not isinstance(metrics, dict):
        return "score", float(metrics)
    name, prefix = evaluator.primary_metric, f"{getattr(evaluator, 'name', '')}_"
    return name.removeprefix(prefix), float(metrics[name])


@contextmanager
def evaluation_copy(model: Any) -> Iterator[Any]:
    """Context with a shallow copy of a model. Its evaluation leaves no trace in the model."""
    modes, twin = Modes.of(model), copy.copy(model)
    # A model card that takes no metrics.
    twin.model_card_data = SimpleNamespace(set_evaluation_metrics=lambda *_, **__: None)
    try:
        yield twin
    finally:
        modes.restore(model)
