"""Check for experts that predict their task's rows no better than a guess or than the base."""

import math
from collections.abc import Mapping

from scipy.stats import t as student_t
from torch import Tensor

from fusion_bench_featcal.folders.tasks import Score

_ROWS = 4
"""Smallest number of rows for comparing losses."""
_ERRORS, _CHANCE = 3.0, 0.01
"""Standard errors by which a mean loss must differ. With few rows the factor is larger, for an
equal probability of error."""
_WORSE = 0.1
"""Smallest excess loss of an expert over the base. An expert may use other words."""


def weak_experts(experts: Mapping[str, Score], base: Mapping[str, Score]) -> list[str]:
    """Describe each expert that is no better than guessing, or worse than the base, by task.

    A guess gives all classes or tokens equal probability. An expert is not weak if its accuracy
    exceeds that of guessed classes by more than chance, or exceeds the base's. Whole texts are not
    compared with the base, which may predict them well from its training.
    """
    return [
        f"{task} (loss {score.loss:.2f} on {len(score.losses)} rows, {other})"
        for task, score in experts.items()
        if (other := _better(score, base.get(task))) is not None
    ]


def _better(expert: Score, base: Score | None) -> str | None:
    """Return name and loss of a guess or base that is better than an expert, or None."""
    guess = math.log(expert.choices)
    is_guess = guess > 0 and _is_above(expert.losses - guess, -1e-4)
    if is_guess and not _beats_chance(expert):
        return f"guessing {guess:.2f}"
    if base is None or expert.kind == "text" or expert.accuracy > base.accuracy:
        return None
    return f"the base {base.loss:.2f}" if _is_above(expert.losses - base.losses, _WORSE) else None


def _is_above(excess: Tensor, least: float) -> bool:
    """Return whether the mean is above `least` by more than its error. NaN counts as above."""
    error = float(excess.std()) / math.sqrt(len(excess)) if len(excess) > 1 else 0.0
    if len(excess) < _ROWS:
        return False
    errors = max(_ERRORS, float(student_t.ppf(1 - _CHANCE, len(excess) - 1)))
    return not float(excess.mean()) <= least + errors * error


def _beats_chance(score: Score) -> bool:
    """Return whether more classes are right than by chance, at a level of 95 %."""
    chance = 1 / score.choices
    error = math.sqrt(chance * (1 - chance) / len(score.losses))
    return score.kind == "class" and score.accuracy > chance + 1.645 * error
