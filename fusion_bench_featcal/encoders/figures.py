"""Figures of sentence-transformers' evaluators, with a value of each row."""

import copy
import logging
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

from fusion_bench_featcal.data.scoring import Score
from fusion_bench_featcal.encoders.library import average_precision_score, st
from fusion_bench_featcal.encoders.targets import RowTargets, too_few
from fusion_bench_featcal.modules.models import Modes

QUIET: dict[str, Any] = {"write_csv": False, "show_progress_bar": False}
RANKS = 10


@dataclass(frozen=True)
class EncoderTests:
    """Test rows of an encoder.

    Attributes:
        measure: What is measured on them.
        columns: Title of the columns with accuracy and loss.
        evaluate: Returns the score of a model.
        method: The method that reads all texts, if queries and documents are read alike.
    """

    measure: str
    columns: str
    evaluate: Callable[[Any], Score]
    method: str | None = None

    def score(self, model: Any) -> Score:
        """Score a model. Each text is embedded once."""
        with unchanged(model) as twin, _quiet():
            name = "predict" if isinstance(model, st.CrossEncoder) else "encode"
            setattr(twin, name, _Memory(getattr(model, name)))
            if self.method:
                twin.encode_query = twin.encode_document = getattr(twin, self.method)
            return self.evaluate(twin)


def primary_figure(evaluator: Any, model: Any) -> tuple[str, float]:
    """Return the name and value of a library evaluator's main figure, and leave the model as is."""
    with unchanged(model) as twin:
        figures = evaluator(twin)
    if not isinstance(figures, dict):
        return "score", float(figures)
    name, own = evaluator.primary_metric, f"{getattr(evaluator, 'name', '')}_"
    return name.removeprefix(own), float(figures[name])


def primary(evaluator: Any, model: Any) -> float:
    """Return an evaluator's figure, 0 where it is undefined because all similarities are equal."""
    figures = evaluator(model)
    return float(np.nan_to_num(figures[evaluator.primary_metric]))


def mean_score(values: Sequence[tuple[float, float]], *, has_flags: bool = True) -> Score:
    """Return the score of rows, each with a share of right answers and a second figure."""
    right, second = torch.tensor(values, dtype=torch.float64).T
    return Score(right.mean().item(), 1 - second, right == 1 if has_flags else None)


def jackknifed(
    of_all: Callable[[], Any], outputs: Callable[[Any], Any], targets: RowTargets, measure: str
) -> EncoderTests | str:
    """Return tests by a figure that is no mean over rows.

    Args:
        of_all: Returns the library's evaluator of all rows, which keeps a model's similarity.
        outputs: Returns what the figure compares with the targets.
        targets: Labels of 0 and 1, or scores.
        measure: What is compared.
    """
    if reason := too_few(targets):
        return reason
    name, title, figure = "average precision", "AP", average_precision_score
    if targets.kind != "binary":
        name, title, figure = "Spearman's correlation", "Spearman", _correlation
    values = np.array(targets.values)

    def evaluate(model: Any) -> Score:
        whole, found, rows = primary(of_all(), model), outputs(model), np.arange(len(values))
        without = [figure(values[rows != row], found[rows != row]) for row in rows]
        shares = -(len(rows) - 1) * torch.tensor(without, dtype=torch.float64).nan_to_num()
        shares += whole - shares.mean()  # without the jackknife's correction of the figure
        return Score(max(whole, 0.0), 1 - shares, None)

    return EncoderTests(f"{measure} ({name})", f"{title} % (1 - {title})", evaluate)


def _correlation(values: Any, found: Any) -> float:
    return float(spearmanr(values, found).statistic)  # type: ignore[attr-defined]


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


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the log of evaluators, which would be as long for each row, and their warnings."""
    logger = logging.getLogger("sentence_transformers")
    level = logger.level
    logger.setLevel(max(logging.WARNING, logger.getEffectiveLevel()))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of figures that are undefined for some rows
            yield
    finally:
        logger.setLevel(level)


class _Memory:
    """Results of a method of a model, by the arguments that have an effect and by input."""

    def __init__(self, read: Callable[..., Any]) -> None:
        self._read = read
        self._results = defaultdict[str, dict[Any, Any]](dict)

    def __call__(self, inputs: Sequence[Any], **arguments: Any) -> Any:
        used = [
            (name, value)
            for name, value in sorted(arguments.items())
            if name != "batch_size" and value is not None and value is not False
        ]
        results = self._results[repr(used)]
        keys = [text if isinstance(text, str) else tuple(text) for text in inputs]
        if new := sorted({*keys} - results.keys()):  # in an order that no process changes
            values = self._read(new, **{"show_progress_bar": False} | arguments)
            results.update(zip(new, values, strict=True))
        values = [results[key] for key in keys]
        if values[0].ndim > 1:  # a vector for each token
            return values
        return (torch if isinstance(values[0], torch.Tensor) else np).stack(values)
