"""Experts that answer their own rows no better than a guess, or worse than the base."""

import math
from collections.abc import Mapping

from scipy.stats import t as student_t
from torch import Tensor

from fusion_bench_featcal.folders.tasks import Score

_ROWS = 4
"""Rows from which losses are compared."""
_ERRORS, _CHANCE = 3.0, 0.01
"""Standard errors by which a mean loss must differ: more where rows are so few that it would
differ as much by this chance."""
_WORSE = 0.1
"""Loss by which an expert is worse than the base at least: it may answer in other words."""


def weak_experts(experts: Mapping[str, Score], base: Mapping[str, Score]) -> list[str]:
    """Describe each expert that is no better than guessing, or worse than the base, by task.

    A guess gives all classes or tokens the same probability. Experts count as better if their
    accuracy is: that of guessed classes by more than chance, that of the base at all. Whole texts
    are not compared with the base, which may well write them as it was trained to.
    """
    return [
        f"{task} (loss {score.loss:.2f} on {len(score.losses)} rows, {other})"
        for task, score in experts.items()
        if (other := _better(score, base.get(task))) is not None
    ]


def _better(expert: Score, base: Score | None) -> str | None:
    """Name and loss of what does better than an expert, if anything does."""
    guess = math.log(expert.choices)
    is_guess = guess > 0 and _is_above(expert.losses - guess, -1e-4)
    if is_guess and not _beats_chance(expert):
        return f"guessing {guess:.2f}"
    if base is None or expert.kind == "text" or expert.accuracy > base.accuracy:
        return None
    return f"the base {base.loss:.2f}" if _is_above(expert.losses - base.losses, _WORSE) else None


def _is_above(excess: Tensor, least: float) -> bool:
    """Return whether the mean is above `least` by more than its error; NaN is."""
    error = float(excess.std()) / math.sqrt(len(excess)) if len(excess) > 1 else 0.0
    if len(excess) < _ROWS:
        return False
    errors = max(_ERRORS, float(student_t.ppf(1 - _CHANCE, len(excess) - 1)))
    return not float(excess.mean()) <= least + errors * error


def _beats_chance(score: Score) -> bool:
    """Return whether more classes are right than by chance, at 95 %."""
    chance = 1 / score.choices
    error = math.sqrt(chance * (1 - chance) / len(score.losses))
    return score.kind == "class" and score.accuracy > chance + 1.645 * error
