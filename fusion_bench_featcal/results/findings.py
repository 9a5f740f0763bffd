"""Observations of the paper beside a diagnosis: do they hold here?"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from fusion_bench_featcal.plurals import counted

from .diagnosis import Diagnosis
from .items import LEVEL, Interval, paired_difference, student_interval
from .tables import Grid
from .verdicts import ABOVE, BELOW, FAILS, HOLDS, OPEN, verdict


@dataclass(frozen=True)
class Finding:
    """An observation of the paper, and the same measurement of one row."""

    observation: str
    paper: str  # its number there
    row: str
    ours: str
    verdict: str  # one of `results.verdicts`


def findings(diagnosis: Diagnosis) -> list[Finding]:
    """Compare every calibrated row with the merged model, as the paper's Figures 1 and 2 do."""
    if diagnosis.merged is None:
        return []
    checks: tuple[Callable[[Diagnosis, str], Iterator[Finding]], ...] = (
        _last_drift, _cosine, _task_vectors, _gains,
    )  # fmt: skip
    return [
        found for check in checks for row in diagnosis.repairs for found in check(diagnosis, row)
    ]


def findings_grid(diagnosis: Diagnosis) -> Grid:
    """A line for each observation and row."""
    lines = [
        (found.observation, [found.paper, found.row, found.ours, found.verdict])
        for found in findings(diagnosis)
    ]
    return Grid("observation of the paper", ["paper", "row", "here", "verdict"], lines)


def _last_drift(diagnosis: Diagnosis, row: str) -> Iterator[Finding]:
    merged = diagnosis.last_drift[diagnosis.merged or ""]
    sizes = {task: max(float(np.mean(values)), 1e-30) for task, values in merged.items()}

    def relative(name: str) -> dict[str, np.ndarray]:
        values = diagnosis.last_drift[name]
        return {task: np.array(values[task]) / sizes[task] for task in sizes}

    change = paired_difference(relative(row), relative(diagnosis.merged or ""))
    yield Finding(
        "drift is smaller at the last block (Fig. 1b)",
        "-46 % (Cars)",
        row,
        f"{100 * change.estimate:+.0f} % [{100 * change.low:+.0f}, {100 * change.high:+.0f}]",
        verdict(change, BELOW),
    )


def _cosine(diagnosis: Diagnosis, row: str) -> Iterator[Finding]:
    merged = diagnosis.merged or ""
    gain = paired_difference(diagnosis.cosines[row], diagnosis.cosines[merged])
    yield Finding(
        "final features are nearer to the expert's (Fig. 2a, b)",
        ".60 to .84 (Cars)",
        row,
        f"{diagnosis.cosine(merged):.3f} to {diagnosis.cosine(row):.3f}, {_signed(gain)}",
        verdict(gain, ABOVE),
    )


def _task_vectors(diagnosis: Diagnosis, row: str) -> Iterator[Finding]:
    mine = diagnosis.task_vectors.get(row, {})
    merged = diagnosis.task_vectors.get(diagnosis.merged or "", {})
    tasks = [task for task in mine if task in merged]
    if not tasks:
        return
    changes = np.array([mine[task] - merged[task] for task in tasks])
    lower, change = int((changes < 0).sum()), student_interval(changes)
    yield Finding(
        "task vectors are farther from the expert's (Fig. 2d)",
        "lower on 8 of 8 tasks",
        row,
        f"lower on {lower} of {counted(len(tasks), 'task')}, {_signed(change)}",
        verdict(change, BELOW),
    )


def _gains(diagnosis: Diagnosis, row: str) -> Iterator[Finding]:
    """Signs and ranks of the gains in cosine and accuracy, over the tasks."""
    from scipy import stats  # slow to import

    accuracy, merged = diagnosis.accuracy, diagnosis.merged or ""
    if row not in accuracy or merged not in accuracy:
        return
    pairs = [(row, merged), *((row, other) for other in diagnosis.repairs if other != row)]
    opposite = compared = 0
    for first, second in pairs:
        for task, (cosine, points) in gains_of(diagnosis, first, second).items():
            if is_clear(diagnosis.flips.get(first, {}).get(second, {}).get(task)):
                opposite += cosine * points < 0
                compared += 1
    cosines, points = zip(*gains_of(diagnosis, row, merged).values(), strict=True)
    varies = len(set(cosines)) > 2 and len(set(points)) > 1
    rank = f", rank correlation {stats.spearmanr(cosines, points)[0]:.2f}" if varies else ""
    yield Finding(
        "cosine and accuracy do not always gain together (Fig. 2c)",
        "opposite signs on 3 of 8 tasks",
        row,
        f"opposite signs in {opposite} of {compared} clear differences of accuracy{rank}",
        HOLDS if opposite else FAILS if compared else OPEN,
    )


def is_clear(flips: list[int] | None) -> bool:
    """Tell whether a difference of accuracy is beyond chance, by McNemar's exact test.

    Args:
        flips: Items that only one, and only the other, of two rows gets right; None: not known,
            and every difference counts.
    """
    from scipy import stats  # slow to import

    if flips is None:
        return True
    return sum(flips) > 0 and float(stats.binomtest(flips[0], sum(flips)).pvalue) < 1 - LEVEL


def gains_of(diagnosis: Diagnosis, row: str, other: str) -> dict[str, tuple[float, float]]:
    """Task -> gain of a row over another in final cosine and in accuracy."""
    accuracy = diagnosis.accuracy
    return {
        task: (
            diagnosis.cosine(row, task) - diagnosis.cosine(other, task),
            accuracy[row][task] - accuracy[other][task],
        )
        for task in diagnosis.tasks
        if task in accuracy.get(row, {}) and task in accuracy.get(other, {})
    }


def _signed(interval: Interval) -> str:
    return f"{interval.estimate:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"
