"""Metrics of a diagnosis in long format, computed from measurements."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fusion_bench_featcal.lab.diagnosis.measure import COLUMNS, Measures
from fusion_bench_featcal.results import EXPERTS, Line

_DIGITS = 6
_POINTS = 50  # items of a task that have coordinates


def row_lines(row: str, task: str, measures: Measures) -> Iterator[Line]:
    """Yield the metrics of the model `row` on one task."""
    for block, values in measures.drift.items():
        means: Any = dict(zip(COLUMNS, values.mean(0).tolist(), strict=True))
        for metric, value in drift_metrics(means).items():
            yield _line(row, task, metric, value, block=block)
    yield _line(row, task, "final_cosine", measures.cosines.mean().item())
    if measures.vector_cosine is not None:
        yield _line(row, task, "task_vector_cosine", measures.vector_cosine)
    yield from _point_lines(row, task, measures.features, measures)


def expert_lines(task: str, measures: Measures) -> Iterator[Line]:
    """Yield the coordinates of an expert's final features, and the number of items."""
    yield from _point_lines(EXPERTS, task, measures.expert_features, measures)
    yield _line("", task, "items", len(measures.cosines))


def _point_lines(row: str, task: str, features: Tensor, measures: Measures) -> Iterator[Line]:
    """Yield the coordinates of features in the plane of the expert's features (PCA)."""
    center, directions = principal_plane(measures.expert_features)
    points = (features[:_POINTS].double() - center) @ directions
    for index, (first, second) in enumerate(points.tolist()):
        yield _line(row, task, "pca_1", first, block=f"item {index}")
        yield _line(row, task, "pca_2", second, block=f"item {index}")


def _line(row: str, task: str, metric: str, value: float, **dimensions: object) -> Line:
    value = float(f"{value:.{_DIGITS}g}")
    return {"row": row, "task": task, **dimensions, "metric": metric, "value": value}


def drift_metrics(means: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a block from means of `COLUMNS` over items.

    `relative` is the root mean square of the drift divided by the root mean square of the expert's
    features. `share` is the share of upstream propagation in the drift, `p . e / |e|^2`.
    """
    tiny = torch.finfo(torch.float64).tiny
    return {
        "drift": means["drift"],
        "relative": (means["drift_sq"] / max(means["expert_sq"], tiny)) ** 0.5,
        "mismatch": means["mismatch"],
        "propagation": means["propagation"],
        "share": (means["propagation_sq"] + means["product"]) / max(means["drift_sq"], tiny),
    }


def principal_plane(features: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of features and their first two principal directions, `[d]` and `[d, 2]`.

    The largest entry of a direction is positive, so that equal features give equal directions.
    """
    features = features.double()
    center = features.mean(0)
    directions = torch.linalg.svd(features - center, full_matrices=False).Vh[:2].T
    largest = directions.gather(0, directions.abs().argmax(0, keepdim=True))
    return center, directions * largest.sign()
