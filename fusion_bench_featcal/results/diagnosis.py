"""Content of a diagnosis: numbers of every row, task and block, as `diagnosis.json`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusion_bench_featcal.files import LOG_DIR_SETTING, ReportError, write_atomic
from fusion_bench_featcal.json_files import plain, read_json

from .long_table import BASE, EXPERTS, is_repair

DIAGNOSIS_FILE = "diagnosis.json"
MEASURES = {
    "drift": "mean L2 norm of the drift",
    "relative": "root mean square of the drift / of the expert's features",
    "cosine": "mean cosine to the expert's features",
    "mismatch": "mean L2 norm of the local mismatch",
    "propagation": "mean L2 norm of the upstream propagation",
    "between": "cosine of local mismatch and upstream propagation",
    "share": "share of upstream propagation in the squared drift, p . e / |e|^2",
}
POSITIONS = {"all": "all positions", "read": "only positions that the head reads"}
"""Positions at which drift was measured, for headings."""
_DIGITS = 6


@dataclass(kw_only=True)
class Diagnosis:
    """Numbers of one diagnosis.

    A row is a model; its drift is measured at the output of every block, over items of each task.
    """

    suite: str
    """Name of the model pool."""
    upstream: str | None
    """The row of the upstream merger."""
    split: str
    """Split of the items."""
    items: dict[str, int]
    """Task -> number of items."""
    seed: int
    """Seed of the draw."""
    positions: str
    """Positions whose features are compared at blocks' outputs: `all` or `read`."""
    features: str
    """Final features, in words."""
    blocks: list[str]
    """Names of the blocks, in forward order."""
    drift: dict[str, dict[str, dict[str, list[float]]]] = field(default_factory=dict)
    """Row -> task -> one of `MEASURES` -> value at each block."""
    cosines: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """Row -> task -> cosine of each item's final features to the expert's."""
    classes: dict[str, dict[str, dict[str, dict[str, Any]]]] = field(default_factory=dict)
    """Row -> task -> class -> `items`, `cosine` and `relative` drift at each block."""
    task_vectors: dict[str, dict[str, float]] = field(default_factory=dict)
    """Row -> task -> cosine to the expert's task vector; without what has none."""
    accuracy: dict[str, dict[str, float]] = field(default_factory=dict)
    """Row -> task -> accuracy of the task pool, over its whole test set, and the experts'."""
    class_accuracy: dict[str, dict[str, dict[str, list[int]]]] = field(default_factory=dict)
    """Row -> task -> class -> test items of the task pool that the row gets right, and all; and
    the experts'."""
    class_flips: dict[str, dict[str, dict[str, list[int]]]] = field(default_factory=dict)
    """Calibrated row -> task -> class -> test items that only the row, and only the merged model,
    gets right."""
    projections: dict[str, dict[str, dict[str, list[list[float]]]]] = field(default_factory=dict)
    """`pca` -> task -> row -> two coordinates of each item."""
    versions: dict[str, str] = field(default_factory=dict)
    device: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def rows(self) -> list[str]:
        """Rows in order, without the experts."""
        return list(self.drift)

    @property
    def tasks(self) -> list[str]:
        """Tasks in order."""
        return list(self.items)

    @property
    def repairs(self) -> list[str]:
        """Rows that were made from the merged model."""
        return [row for row in self.rows if is_repair(row, self.upstream)]

    @property
    def merged(self) -> str | None:
        """The merged model's row, if it was diagnosed."""
        return self.upstream if self.upstream in self.drift else None

    def mean(self, row: str, measure: str) -> NDArray[np.float64]:
        """A measure at each block, mean over tasks."""
        return np.mean([values[measure] for values in self.drift[row].values()], axis=0)

    def cosine(self, row: str, task: str | None = None) -> float:
        """Final features' cosine to the expert's: mean over a task's items, or over tasks."""
        tasks = self.tasks if task is None else [task]
        return float(np.mean([np.mean(self.cosines[row][name]) for name in tasks]))

    def add(
        self,
        row: str,
        task: str,
        drift: Mapping[str, NDArray[np.float64]],
        cosines: NDArray[np.float64],
        classes: Sequence[str] | None,
        task_vector: float | None,
    ) -> None:
        """Add a row's measurements on one task.

        Args:
            row: The row.
            task: The task.
            drift: Means over each item's positions by names of `DriftParts`, `[blocks, items]`.
            cosines: Cosines of final features, `[items]`.
            classes: Class of each item, if they are known.
            task_vector: Cosine of task vectors, if there is one.
        """
        self.items[task] = len(cosines)
        self.drift.setdefault(row, {})[task] = {
            name: _rounded(values) for name, values in measures(drift).items()
        }
        self.cosines.setdefault(row, {})[task] = _rounded(cosines)
        if task_vector is not None:
            self.task_vectors.setdefault(row, {})[task] = task_vector
        of_task = self.classes.setdefault(row, {}).setdefault(task, {})
        for name in sorted(set(classes or ())):
            chosen = np.array([label == name for label in classes or ()])
            part = measures({key: values[:, chosen] for key, values in drift.items()})
            of_task[name] = {
                "items": int(chosen.sum()),
                "cosine": float(cosines[chosen].mean()),
                "relative": _rounded(part["relative"]),
            }

    def write(self, directory: str | Path, setting: str = LOG_DIR_SETTING) -> Path:
        """Write `diagnosis.json`: a line for each attribute."""
        content = plain(asdict(self), DIAGNOSIS_FILE)
        text = ",\n".join(f"{json.dumps(key)}: {json.dumps(content[key])}" for key in content)
        return write_atomic(Path(directory) / DIAGNOSIS_FILE, f"{{\n{text}\n}}\n", setting)

    @classmethod
    def load(cls, directory: str | Path) -> "Diagnosis":
        """Read what `write` wrote.

        Raises:
            ReportError: The file is missing or damaged, or is no diagnosis.
        """
        path = Path(directory) / DIAGNOSIS_FILE
        content = read_json(path)
        names = {entry.name for entry in fields(cls)}
        if not isinstance(content, dict) or set(content) != names:
            raise ReportError(f"{path} is no diagnosis of this version: run method=diagnose again")
        return cls(**content)


def measures(drift: Mapping[str, NDArray[np.float64]]) -> dict[str, NDArray[np.float64]]:
    """Reduce means over positions to `MEASURES`, `[blocks]`, over items.

    Args:
        drift: By names of `DriftParts`, `[blocks, items]`.
    """
    mean = {name: values.mean(axis=1) for name, values in drift.items()}
    nothing = np.finfo(np.float64).tiny
    products = np.sqrt(mean["mismatch_sq"] * mean["propagation_sq"])
    return {
        "drift": mean["drift"],
        "relative": np.sqrt(mean["drift_sq"] / np.maximum(mean["expert_sq"], nothing)),
        "cosine": mean["cosine"],
        "mismatch": mean["mismatch"],
        "propagation": mean["propagation"],
        "between": mean["product"] / np.maximum(products, nothing),
        "share": (mean["propagation_sq"] + mean["product"]) / np.maximum(mean["drift_sq"], nothing),
    }


def row_order(names: Sequence[str], upstream: str | None) -> list[str]:
    """Order rows: base, merged, what was made of it, experts."""
    places = {BASE: 0, upstream: 1, EXPERTS: 3}
    return sorted(names, key=lambda name: places.get(name, 2))


def _rounded(values: NDArray[np.float64]) -> list[float]:
    return [float(f"{value:.{_DIGITS}g}") for value in values]


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
