"""Figures of sentence-transformers' evaluators, without a trace in the model."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fusion_bench_featcal.modules.models import Modes


def primary_figure(evaluator: Any, model: Any) -> tuple[str, float]:
    """Return the name and value of a library evaluator's main figure, and leave the model as is."""
    with unchanged(model) as twin:
        figures = evaluator(twin)
    if not isinstance(figures, dict):
        return "score", float(figures)
    name, own = evaluator.primary_metric, f"{getattr(evaluator, 'name', '')}_"
    return name.removeprefix(own), float(figures[name])


class _NoCard:
    """A model card that takes no figures."""

    def set_evaluation_metrics(self, *_: Any, **__: Any) -> None:
        """Leave the card as it is."""


@contextmanager
def unchanged(model: Any) -> Iterator[Any]:
    """Yield a shallow copy of a model, whose evaluation leaves no trace in the model."""
    modes, twin = Modes.of(model), copy.copy(model)
    twin.model_card_data = _NoCard()
    try:
        yield twin
    finally:
        modes.restore(model)
