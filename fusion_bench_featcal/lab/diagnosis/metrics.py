"""Lines of a diagnosis, made from measurements of rows and from the run's report."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from fusion_bench_featcal.lab.diagnosis.drift import COLUMNS, drift_metrics, explained_shares
from fusion_bench_featcal.lab.diagnosis.items import are_shared
from fusion_bench_featcal.lab.diagnosis.measure import Measures
from fusion_bench_featcal.results import EXPERTS, Report
from fusion_bench_featcal.results.long_table import Line

_DIGITS = 6


def row_lines(
    row: str, task: str, measures: Measures, classes: Sequence[str] | None
) -> Iterator[Line]:
    """Yield the metrics of a row on one task, given the class of each item, if known."""
    for block, values in measures.drift.items():
        means = dict(zip(COLUMNS, values.mean(0).tolist(), strict=True))
        for metric, value in drift_metrics(means).items():
            yield _line(row, task, metric, value, block=block)
    yield _line(row, task, "final_cosine", measures.cosines.mean().item())
    for name, chosen in _by_class(classes).items():
        yield _line(row, task, "final_cosine", measures.cosines[chosen].mean().item(), class_=name)
    if measures.vectors is not None:
        norm, expert_norm, product = measures.vectors
        yield _line(row, task, "task_vector_norm", norm)
        if norm * expert_norm > 0:
            yield _line(row, task, "task_vector_cosine", product / norm / expert_norm)
    yield from _share_lines(row, task, measures.features)


def expert_lines(task: str, measures: Measures, classes: Sequence[str] | None) -> Iterator[Line]:
    """Yield the metrics of an expert alone, and numbers of items."""
    if measures.vectors is not None:
        yield _line(EXPERTS, task, "task_vector_norm", measures.vectors[1])
    yield from _share_lines(EXPERTS, task, measures.expert_features)
    yield _line("", task, "items", len(measures.cosines))
    for name, chosen in _by_class(classes).items():
        yield _line("", task, "items", chosen.sum(), class_=name)


def _share_lines(row: str, task: str, features: Tensor) -> Iterator[Line]:
    for number, share in enumerate(explained_shares(features), start=1):
        yield _line(row, task, f"pca_share_{number}", share)


def accuracy_lines(
    report: Report, tasks: Sequence[str], classes: Mapping[str, Sequence[str]]
) -> Iterator[Line]:
    """Yield accuracies of a report by class, from its flags per test item.

    Args:
        report: The report.
        tasks: The tasks of the diagnosis.
        classes: Task -> class of each test item of the task pool, in the order of the flags.
    """
    for task in tasks:
        names = classes.get(task, ())
        flags = {row: np.asarray(by_task[task]) for row, by_task in report.items.items()}
        if not names or not are_shared(names) or any(len(f) != len(names) for f in flags.values()):
            continue
        for name, chosen in _by_class(names).items():
            yield _line("", task, "test_items", chosen.sum(), class_=name)
            for row, correct in flags.items():
                yield _line(row, task, "accuracy", correct[chosen].mean(), class_=name)


def _line(row: str, task: str, metric: str, value: float, **dimensions: str) -> Line:
    names = {column.rstrip("_"): name for column, name in dimensions.items()}
    value = float(f"{value:.{_DIGITS}g}")
    return {"row": row, "task": task, **names, "metric": metric, "value": value}


def _by_class(classes: Sequence[str] | None) -> dict[str, Any]:
    """Return a mask of the items of each class."""
    array = np.array(classes or ())
    return {name: array == name for name in sorted(set(classes or ()))}
