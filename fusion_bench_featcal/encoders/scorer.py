"""Scores of encoders with one value per example, whose mean is the metric.

If the metric is a mean over examples, the value of an example is its term in the mean. For other
metrics (rank correlation, average precision) it is the example's jackknife pseudo-value.
"""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from fusion_bench_featcal.data.scoring import Score
from fusion_bench_featcal.encoders.evaluators import evaluation_copy
from fusion_bench_featcal.encoders.library import Encoder, average_precision_score
from fusion_bench_featcal.encoders.targets import Targets, too_few
from fusion_bench_featcal.results.names import ACCURACY, CORRELATION, PRECISION

RANKS = 10


@dataclass(frozen=True)
class EncoderScorer:
    """Scores models on test examples.

    Attributes:
        measure: Description of the metric.
        evaluate: Returns the score of a model.
    """

    measure: str
    evaluate: Callable[[Any], Score]

    def score(self, model: nn.Module) -> Score:
        """Score a model, which is unchanged."""
        with evaluation_copy(model) as twin, warnings.catch_warnings():
            # A warning of PyTorch about products of sparse embeddings.
            warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
            return self.evaluate(twin)


def read_once(method: Any, inputs: Iterable[Any], **options: object) -> dict[Any, Any]:
    """Return input -> output of a model's method, which is called with each input once."""
    different = sorted({*inputs})  # in an order that no process changes
    results = method(different, show_progress_bar=False, **options)
    return dict(zip(different, results, strict=True))


def mean_score(values: Tensor, metric: str = ACCURACY) -> Score:
    """Return the score of one value per example: 1 if it is right, else 0 or an inverse rank."""
    correct, terms = values == 1, values.double()
    return Score(correct.double().mean().item(), 1 - terms, correct, metric=metric, terms=terms)


def jackknife_scorer(
    outputs: Callable[[Any], Any], targets: Targets, measure: str
) -> EncoderScorer | str:
    """Return the scorer of a metric that is no mean over examples, or why there is none.

    Args:
        outputs: Returns a model's outputs for the examples, `[examples]`.
        targets: Labels of 0 and 1, or scores, with which outputs are compared.
        measure: Description of the comparison.
    """
    if reason := too_few(targets):
        return reason
    name, metric = PRECISION, average_precision_score
    if targets.kind != "binary":
        name, metric = CORRELATION, _correlation
    values, rows = np.array(targets.values), np.arange(len(targets.values))

    def evaluate(model: Encoder) -> Score:
        predicted = outputs(model)
        whole = float(metric(values, predicted))
        without = [metric(values[rows != row], predicted[rows != row]) for row in rows]
        shares = -(len(rows) - 1) * torch.tensor(without, dtype=torch.float64)
        shares += whole - shares.mean()  # without the jackknife's correction of the metric
        return Score(max(whole, 0.0), 1 - shares, None, metric=name, terms=shares)

    return EncoderScorer(f"{measure} ({name})", evaluate)


def _correlation(values: object, outputs: Any) -> float:
    """Return Spearman's correlation, 0 where it is undefined."""
    if (outputs == outputs[0]).all():
        return 0.0
    return float(np.nan_to_num(spearmanr(values, outputs).statistic))  # type: ignore[attr-defined]
