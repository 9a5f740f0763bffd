"""Correct answers by class, counted from the flags per test item that a run keeps."""

from collections.abc import Mapping, Sequence

import numpy as np

from fusion_bench_featcal.diagnosis.items import are_shared
from fusion_bench_featcal.results import EXPERTS, Report
from fusion_bench_featcal.results.diagnosis import Diagnosis

NOT_EVALUATED = "no accuracy by class: no task pool evaluated the rows"
NO_ITEMS = (
    "no accuracy by class: the task pool does not tell which test items a row gets right "
    "(FusionBench's own pools do not, and no pool does where a task is scored by a correlation)"
)
NO_CLASSES = "no accuracy by class: the task pool does not name its test items' classes"


def count_classes(
    made: Diagnosis, report: Report, classes: Mapping[str, Sequence[str]] | None
) -> list[str]:
    """Fill `class_accuracy` and `class_flips` of a diagnosis.

    Args:
        made: The diagnosis; its rows and tasks are counted, and the experts.
        report: The run's report, with flags per test item of the rows that were evaluated.
        classes: Task -> class of each test item, in the order of the flags; None: not known.

    Returns:
        Sentences on what is not known.
    """
    if not report.rows:
        return [NOT_EVALUATED]
    if not report.items:
        return [NO_ITEMS]
    if not classes:
        return [NO_CLASSES]
    rows = [row for row in (*made.rows, EXPERTS) if row in report.items]
    usable, notes = _usable(made, report, classes)
    for task, names in usable.items():
        right = {row: np.asarray(report.items[row][task]) for row in rows}
        for row, mine in right.items():
            of_row = made.class_accuracy.setdefault(row, {})
            of_row[task] = _sums(names, mine, np.ones_like(mine))
            if row in made.repairs and made.merged in right:
                other, of_row = right[made.merged], made.class_flips.setdefault(row, {})
                of_row[task] = _sums(names, mine & ~other, other & ~mine)
    missing = [row for row in made.rows if row not in rows]
    if missing:
        notes.append(f"no accuracy by class of {', '.join(missing)}: not evaluated item by item")
    return notes


def _sums(names: Sequence[str], *flags: np.ndarray) -> dict[str, list[int]]:
    """Class -> number of its items that have each flag."""
    array = np.array(names)
    return {name: [int(one[array == name].sum()) for one in flags] for name in sorted(set(names))}


def _usable(
    made: Diagnosis, report: Report, classes: Mapping[str, Sequence[str]]
) -> tuple[dict[str, Sequence[str]], list[str]]:
    """Return the tasks' classes that fit the flags, and sentences on the others."""
    usable: dict[str, Sequence[str]] = {}
    notes = []
    for task in made.tasks:
        flags = next(iter(report.items.values())).get(task)
        names = classes.get(task)
        if flags is None or names is None:
            notes.append(f"no accuracy by class of {task}: the task pool has no classes of it")
        elif len(names) != len(flags):
            notes.append(
                f"no accuracy by class of {task}: the task pool names classes of {len(names)} "
                f"test items and evaluated {len(flags)}"
            )
        elif not are_shared(names):
            notes.append(f"no accuracy by class of {task}: hardly any two test items share a class")
        else:
            usable[task] = names
            diagnosed = {name for tasks in made.classes.values() for name in tasks.get(task, {})}
            if diagnosed and diagnosed.isdisjoint(names):
                notes.append(
                    f"gains of {task}'s classes in cosine and accuracy are not compared: the model "
                    f"pool's data name other classes ({min(diagnosed)!r}) than the task pool "
                    f"({min(names)!r})"
                )
    return usable, notes
