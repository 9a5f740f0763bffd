"""Gains by class over the merged model, in final cosine and in accuracy, with their counts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .diagnosis import Diagnosis
from .differences import holm
from .items import LEVEL, Interval
from .tables import ABSENT, Grid, short_names

LEAST_ITEMS = 4
"""Fewest items of a class that sentences name, and fewest of both kinds in a correlation."""
LEAST_CLASSES = 10
"""Fewest classes that a correlation is computed from."""


@dataclass(frozen=True)
class ClassGain:
    """Gain of a row over the merged model on one class.

    Attributes:
        task: The task.
        name: The class.
        diagnosed: Items whose features were compared.
        cosine: Gain of their mean final cosine; None where there are none.
        tested: Test items of the task pool.
        accuracy: Gain of their accuracy, -1 to 1; None where it is not known.
        p: That it is chance, by McNemar's exact test, with Holm's correction over the row's
            classes.
    """

    task: str
    name: str
    diagnosed: int
    cosine: float | None
    tested: int
    accuracy: float | None
    p: float

    @property
    def is_clear(self) -> bool:
        """Tell whether the gain of accuracy is beyond chance."""
        return self.p < 1 - LEVEL


def class_gains(diagnosis: Diagnosis, row: str) -> list[ClassGain]:
    """Every class of every task, in order; none without a merged model.

    Args:
        diagnosis: The diagnosis.
        row: A calibrated row.
    """
    if diagnosis.merged is None:
        return []
    cosines = diagnosis.classes[row], diagnosis.classes[diagnosis.merged]
    right, flips = diagnosis.class_accuracy.get(row, {}), diagnosis.class_flips.get(row, {})
    keys = [
        (task, name)
        for task in diagnosis.tasks
        for name in sorted({*cosines[0].get(task, {}), *flips.get(task, {})})
    ]
    tested = [key for key in keys if key[1] in flips.get(key[0], {})]
    adjusted = dict(zip(tested, holm([_p(*flips[t][n]) for t, n in tested]), strict=True))
    gains = []
    for task, name in keys:
        near = [side.get(task, {}).get(name) for side in cosines]
        mine, other = (values or {"items": 0, "cosine": math.nan} for values in near)
        items = right[task][name][1] if (task, name) in adjusted else 0
        won, lost = flips[task][name] if items else (0, 0)
        gains.append(
            ClassGain(
                task=task,
                name=name,
                diagnosed=mine["items"],
                cosine=mine["cosine"] - other["cosine"] if all(near) else None,
                tested=items,
                accuracy=(won - lost) / items if items else None,
                p=adjusted.get((task, name), 1.0),
            )
        )
    return gains


def _p(won: int, lost: int) -> float:
    from scipy import stats  # slow to import

    return float(stats.binomtest(won, won + lost).pvalue) if won + lost else 1.0


def by_cosine(gains: Sequence[ClassGain]) -> list[ClassGain]:
    """Classes whose features were compared, the largest gain of cosine first."""
    known = [gain for gain in gains if gain.cosine is not None]
    return sorted(known, key=lambda gain: -(gain.cosine or 0.0))


def by_accuracy(gains: Sequence[ClassGain]) -> list[ClassGain]:
    """Classes with test items, the largest gain of accuracy first."""
    known = [gain for gain in gains if gain.accuracy is not None]
    return sorted(known, key=lambda gain: -(gain.accuracy or 0.0))


def correlated(gains: Sequence[ClassGain]) -> list[ClassGain]:
    """Classes with both gains, from `LEAST_ITEMS` items each or more."""
    return [
        gain
        for gain in gains
        if gain.cosine is not None
        and gain.accuracy is not None
        and min(gain.diagnosed, gain.tested) >= LEAST_ITEMS
    ]


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> Interval | None:
    """Spearman's correlation, with Bonett and Wright's interval (2000).

    Returns:
        None of fewer than `LEAST_CLASSES` pairs, or where either side is constant.
    """
    from scipy import stats  # slow to import

    if len(first) < LEAST_CLASSES or len(set(first)) < 2 or len(set(second)) < 2:
        return None
    found: Any = stats.spearmanr(first, second)
    rank = float(found.statistic)
    if abs(rank) > 1 - 1e-12:  # without spread of its own
        return Interval(rank, rank, rank)
    reach = float(stats.norm.ppf((1 + LEVEL) / 2)) * np.sqrt((1 + rank**2 / 2) / (len(first) - 3))
    low, high = np.tanh([np.arctanh(rank) - reach, np.arctanh(rank) + reach])
    return Interval(rank, float(low), float(high))


def class_sentence(diagnosis: Diagnosis, row: str) -> str:
    """Say how many classes gain and lose accuracy beyond chance, and whether cosines tell which."""
    gains = class_gains(diagnosis, row)
    ordered = by_accuracy(gains)
    if not ordered:
        return ""
    names = short_names(diagnosis.tasks)
    clear = [gain for gain in ordered if gain.is_clear]
    better = [gain for gain in clear if (gain.accuracy or 0.0) > 0]
    worse = [gain for gain in clear if (gain.accuracy or 0.0) < 0]
    most = [f", most {names[g.task]}: {_points(g)}" for g in (*better[:1], *worse[-1:])]
    up, down = (most.pop(0) if chosen else "" for chosen in (better, worse))
    sentence = (
        f"{row}: of {len(ordered)} classes {len(better)} gain accuracy beyond chance{up}; "
        f"{len(worse)} lose it{down}"
    )
    pairs = correlated(gains)
    rank = rank_correlation(
        [gain.cosine or 0.0 for gain in pairs], [gain.accuracy or 0.0 for gain in pairs]
    )
    if rank is None:
        return sentence
    return (
        f"{sentence}; over the {len(pairs)} classes with {LEAST_ITEMS} items or more, gains of "
        f"cosine and accuracy have a rank correlation of {rank.estimate:.2f} "
        f"[{rank.low:.2f}, {rank.high:.2f}]"
    )


def cosine_grids(diagnosis: Diagnosis) -> list[Grid]:
    """For each calibrated row the classes whose final features it helps most and least, by task."""

    def cells(own: Sequence[ClassGain]) -> list[str]:
        ends = [f"{g.name} ({g.cosine:+.3f}, n = {g.diagnosed})" for g in (own[0], own[-1])]
        return [*ends, str(sum((gain.cosine or 0.0) < 0 for gain in own))]

    heads = ["helped most", "helped least", "classes that lose"]
    return _grids(diagnosis, "gain in cosine", heads, by_cosine, cells)


def accuracy_grids(diagnosis: Diagnosis) -> list[Grid]:
    """For each calibrated row the classes that gain and lose most accuracy, by task."""

    def cells(own: Sequence[ClassGain]) -> list[str]:
        clear = [gain.accuracy or 0.0 for gain in own if gain.is_clear]
        most = _points(own[0]) if (own[0].accuracy or 0) > 0 else ABSENT
        least = _points(own[-1]) if (own[-1].accuracy or 0) < 0 else ABSENT
        return [most, least, str(sum(g > 0 for g in clear)), str(sum(g < 0 for g in clear))]

    heads = ["gains most", "loses most", "gain beyond chance", "lose beyond chance"]
    return _grids(diagnosis, "gain in accuracy", heads, by_accuracy, cells)


def _grids(
    diagnosis: Diagnosis,
    kind: str,
    heads: Sequence[str],
    order: Callable[[Sequence[ClassGain]], list[ClassGain]],
    cells: Callable[[Sequence[ClassGain]], list[str]],
) -> list[Grid]:
    """A table for each calibrated row, a line for each task: number of its classes, and `cells`."""
    names, grids = short_names(diagnosis.tasks), []
    for row in diagnosis.repairs:
        ordered, lines = order(class_gains(diagnosis, row)), []
        for task in diagnosis.tasks:
            own = [gain for gain in ordered if gain.task == task]
            if own:
                lines.append((names[task], [str(len(own)), *cells(own)]))
        grids += [Grid(f"{row}: {kind}", ["classes", *heads], lines)] if lines else []
    return grids


def _points(gain: ClassGain) -> str:
    return f"{gain.name} ({100 * (gain.accuracy or 0.0):+z.1f} points, n = {gain.tested})"
