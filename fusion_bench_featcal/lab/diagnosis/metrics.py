"""Lines of a diagnosis, made from measurements of rows."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from fusion_bench_featcal.lab.diagnosis.drift import (
    COLUMNS,
    drift_metrics,
    explained_shares,
    principal_plane,
)
from fusion_bench_featcal.lab.diagnosis.measure import Measures
from fusion_bench_featcal.results import EXPERTS, Line

_DIGITS = 6
_POINTS = 50  # items of a task that have coordinates


def row_lines(row: str, task: str, measures: Measures) -> Iterator[Line]:
    """Yield the metrics of a row on one task."""
    for block, values in measures.drift.items():
        means = dict(zip(COLUMNS, values.mean(0).tolist(), strict=True))
        for metric, value in drift_metrics(means).items():
            yield _line(row, task, metric, value, block=block)
    yield _line(row, task, "final_cosine", measures.cosines.mean().item())
    if measures.vectors is not None:
        norm, expert_norm, product = measures.vectors
        yield _line(row, task, "task_vector_norm", norm)
        if norm * expert_norm > 0:
            yield _line(row, task, "task_vector_cosine", product / norm / expert_norm)
    yield from _feature_lines(row, task, measures.features, measures)


def expert_lines(task: str, measures: Measures) -> Iterator[Line]:
    """Yield the metrics of an expert alone, and the number of items."""
    if measures.vectors is not None:
        yield _line(EXPERTS, task, "task_vector_norm", measures.vectors[1])
    yield from _feature_lines(EXPERTS, task, measures.expert_features, measures)
    yield _line("", task, "items", len(measures.cosines))


def _feature_lines(row: str, task: str, features: Tensor, measures: Measures) -> Iterator[Line]:
    """Yield shares of variance, and coordinates in the plane of the expert's features (PCA)."""
    center, directions = principal_plane(measures.expert_features)
    points = (features[:_POINTS].double() - center) @ directions
    for number, (one, two) in enumerate(points.tolist()):
        yield _line(row, task, "pca_1", one, block=f"item {number}")
        yield _line(row, task, "pca_2", two, block=f"item {number}")
    for number, share in enumerate(explained_shares(features), start=1):
        yield _line(row, task, f"pca_share_{number}", share)


def _line(row: str, task: str, metric: str, value: float, **dimensions: Any) -> Line:
    value = float(f"{value:.{_DIGITS}g}")
    return {"row": row, "task": task, **dimensions, "metric": metric, "value": value}
