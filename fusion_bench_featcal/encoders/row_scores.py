"""Scores with a value of each row, from what a model returns for the rows.

Where a figure is a mean over rows, the value of a row is the mean's term, else (rank correlation,
average precision) the row's jackknife pseudo-value. The mean of the values is the figure.
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
from fusion_bench_featcal.encoders.figures import unchanged
from fusion_bench_featcal.encoders.library import Encoder, average_precision_score
from fusion_bench_featcal.encoders.targets import RowTargets, too_few

RANKS = 10
ACCURACY = "accuracy % (1 - accuracy)"


@dataclass(frozen=True)
class EncoderTests:
    """Test rows of an encoder.

    Attributes:
        measure: What is measured on them.
        columns: Title of the columns with accuracy and loss.
        evaluate: Returns the score of a model.
    """

    measure: str
    columns: str
    evaluate: Callable[[Any], Score]

    def score(self, model: nn.Module) -> Score:
        """Score a model, which stays as it is."""
        with unchanged(model) as twin, warnings.catch_warnings():
            # PyTorch's, about products of sparse embeddings.
            warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
            return self.evaluate(twin)


def read_once(method: Any, inputs: Iterable[Any], **options: object) -> dict[Any, Any]:
    """Return input -> what a model's method returns, which reads each input once."""
    different = sorted({*inputs})  # in an order that no process changes
    results = method(different, show_progress_bar=False, **options)
    return dict(zip(different, results, strict=True))


def mean_of(values: Tensor) -> Score:
    """Return the score of values of rows, of which 1 is right: 0 and 1, or inverse ranks."""
    correct = values == 1
    return Score(correct.double().mean().item(), 1 - values.double(), correct)


def jackknifed(
    outputs: Callable[[Any], Any], targets: RowTargets, measure: str
) -> EncoderTests | str:
    """Return tests by a figure that is no mean over rows.

    Args:
        outputs: Returns what a model returns for the rows, `[rows]`.
        targets: Labels of 0 and 1, or scores, with which it is compared.
        measure: What is compared.
    """
    if reason := too_few(targets):
        return reason
    name, title, figure = "average precision", "AP", average_precision_score
    if targets.kind != "binary":
        name, title, figure = "Spearman's correlation", "Spearman", _correlation
    values, rows = np.array(targets.values), np.arange(len(targets.values))

    def evaluate(model: Encoder) -> Score:
        predicted = outputs(model)
        whole = float(figure(values, predicted))
        without = [figure(values[rows != row], predicted[rows != row]) for row in rows]
        shares = -(len(rows) - 1) * torch.tensor(without, dtype=torch.float64)
        shares += whole - shares.mean()  # without the jackknife's correction of the figure
        return Score(max(whole, 0.0), 1 - shares, None)

    return EncoderTests(f"{measure} ({name})", f"{title} % (1 - {title})", evaluate)


def _correlation(values: object, outputs: Any) -> float:
    """Return Spearman's correlation, 0 where it is undefined."""
    if (outputs == outputs[0]).all():
        return 0.0
    return float(np.nan_to_num(spearmanr(values, outputs).statistic))  # type: ignore[attr-defined]
