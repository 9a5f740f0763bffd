"""How generated answers are scored: exact match, or rank correlation for numbers."""

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

Metric = Literal["exact_match", "spearman"]
METRICS: tuple[Metric, ...] = get_args(Metric)


def exact_matches(answers: Sequence[str], targets: Sequence[str]) -> list[bool]:
    """Return which answers equal their target, up to blanks at either end."""
    return [
        answer.strip() == target.strip() for answer, target in zip(answers, targets, strict=True)
    ]


def spearman(answers: Sequence[str], targets: Sequence[str]) -> float:
    """Return Spearman's rank correlation of two lists of written numbers.

    Args:
        answers: Generated texts; one that is no finite number counts as 0, as in FusionBench.
        targets: Their targets, read alike.

    Returns:
        The correlation in -1..1, ties sharing their mean rank; 0 where either list is constant
        (FusionBench has NaN there).
    """
    ranks = [_ranks(np.array([_number(text) for text in texts])) for texts in (answers, targets)]
    first, second = (rank - rank.mean() for rank in ranks)
    spread = np.sqrt((first**2).sum() * (second**2).sum())
    return float((first * second).sum() / spread) if spread > 0 else 0.0


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if np.isfinite(value) else 0.0


def _ranks(values: np.ndarray) -> np.ndarray:
    """Mean rank of each value, float64."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[group]
