"""Lines of a diagnosis: measurements of every row, and its accuracy."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from torch import nn

from fusion_bench_featcal.diagnosis.drift import COLUMNS, drift_metrics, explained_shares
from fusion_bench_featcal.diagnosis.items import TaskItems, are_shared
from fusion_bench_featcal.diagnosis.measure import Measures, Projection, measure
from fusion_bench_featcal.families import Family, resolve_family
from fusion_bench_featcal.methods.interface import MethodInputs
from fusion_bench_featcal.methods.projection import load_projection
from fusion_bench_featcal.modules.models import head_of
from fusion_bench_featcal.results import EXPERTS, Report
from fusion_bench_featcal.results.lines import Line
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings
from fusion_bench_featcal.streams.family_check import checked_family
from fusion_bench_featcal.streams.samples import take_samples

log = logging.getLogger(__name__)

_DIGITS = 6


class Collector:
    """Measure each row's model in turn, and keep the numbers.

    Attributes:
        lines: Lines of the rows so far, without suite and merger.
        features: The final features in words.
    """

    def __init__(
        self,
        inputs: MethodInputs,
        items: Mapping[str, TaskItems],
        settings: FeatCalSettings,
        positions: str,
    ) -> None:
        """Refer to items and experts; nothing is loaded yet.

        Args:
            inputs: The pools.
            items: Items by task.
            settings: `family`, `stream_experts` and `decoder_rows` are used.
            positions: Positions whose features are compared at blocks' outputs.
        """
        self._inputs, self._items, self._settings = inputs, items, settings
        self._positions = positions
        self._family: Family | None = None
        self.lines: list[Line] = []
        self.features = ""

    def look(self, row: str, model: nn.Module) -> None:
        """Measure a row's model beside every expert, one expert in memory at a time."""
        log.info("diagnosing %s", row)
        fabric, settings, is_first = self._inputs.fabric, self._settings, not self.lines
        family, projection = self._family_of(model), self._projection_for(model)
        for task, items in self._items.items():
            try:
                found = measure(
                    model,
                    self._inputs.base(settings),
                    self._inputs.experts(settings),
                    task,
                    items.batches,
                    settings,
                    family,
                    positions=self._positions,
                    projection=projection,
                    device=fabric.device,
                    autocast=fabric.autocast,
                )
            except CalibrationError as error:
                raise CalibrationError(f"row {row}: {error}") from error
            self.lines += _lines(row, task, found, items.classes)
            if is_first:
                self.lines += _lines_of_expert(task, found, items.classes)

    def _family_of(self, model: nn.Module) -> Family:
        if self._family is None:
            setting = self._settings.family
            self._family = resolve_family(setting, model)
            if self._positions == "read":
                task, items = next(iter(self._items.items()))
                first = next(take_samples(task, items.batches, self._settings, model))
                self._family = checked_family(
                    self._family, setting, model, {task: [first]}, needs_closing=True
                )
        return self._family

    def _projection_for(self, model: nn.Module) -> Projection | None:
        """Return CLIP's projection, if the pool has it."""
        if head_of(model) is not None:
            self.features = "hidden states that the head reads, where they predict a target"
            return None
        self.features = "pooled output"
        kind = getattr(getattr(model, "config", None), "model_type", None)
        if kind != "clip_vision_model" or self._clip_projection is None:
            return None
        self.features = "projected image features"
        projection = self._clip_projection
        return lambda features: projection(features.to(projection.weight.dtype))

    @cached_property
    def _clip_projection(self) -> nn.Linear | None:
        try:
            projection = load_projection(self._inputs.models, None)
        except CalibrationError as error:
            log.warning("final features are not projected: %s", error)
            return None
        return projection.to(self._inputs.fabric.device)


def _line(row: str, task: str, metric: str, value: float, **dimensions: str) -> Line:
    names = {column.rstrip("_"): name for column, name in dimensions.items()}
    value = float(f"{value:.{_DIGITS}g}")
    return {"row": row, "task": task, **names, "metric": metric, "value": value}


def _lines(row: str, task: str, found: Measures, classes: Sequence[str] | None) -> Iterator[Line]:
    for block, values in found.drift.items():
        means = dict(zip(COLUMNS, values.mean(0).tolist(), strict=True))
        for metric, value in drift_metrics(means).items():
            yield _line(row, task, metric, value, block=block)
    yield _line(row, task, "final_cosine", found.cosines.mean().item())
    for name, chosen in _by_class(classes).items():
        yield _line(row, task, "final_cosine", found.cosines[chosen].mean().item(), class_=name)
    if found.vectors is not None:
        norm, expert_norm, product = found.vectors
        yield _line(row, task, "task_vector_norm", norm)
        if norm * expert_norm > 0:
            yield _line(row, task, "task_vector_cosine", product / norm / expert_norm)
    for number, share in enumerate(explained_shares(found.features), start=1):
        yield _line(row, task, f"pca_share_{number}", share)


def _lines_of_expert(task: str, found: Measures, classes: Sequence[str] | None) -> Iterator[Line]:
    """Yield the experts' row, and numbers of items."""
    if found.vectors is not None:
        yield _line(EXPERTS, task, "task_vector_norm", found.vectors[1])
    for number, share in enumerate(explained_shares(found.expert_features), start=1):
        yield _line(EXPERTS, task, f"pca_share_{number}", share)
    yield _line("", task, "items", len(found.cosines))
    for name, chosen in _by_class(classes).items():
        yield _line("", task, "items", chosen.sum(), class_=name)


def accuracy_lines(
    report: Report, tasks: Sequence[str], classes: Mapping[str, Sequence[str]]
) -> Iterator[Line]:
    """Yield accuracies of a report by task and, from its flags per test item, by class.

    Args:
        report: The report.
        tasks: The tasks of the diagnosis.
        classes: Task -> class of each test item of the task pool, in the order of the flags.
    """
    for row, values in report.rows.items():
        for task, value in values.items():
            yield _line(row, task, "accuracy", value)
    for task in tasks:
        names = classes.get(task, ())
        flags = {row: np.asarray(by_task[task]) for row, by_task in report.items.items()}
        if not names or not are_shared(names) or any(len(f) != len(names) for f in flags.values()):
            continue
        for name, chosen in _by_class(names).items():
            yield _line("", task, "test_items", chosen.sum(), class_=name)
            for row, correct in flags.items():
                yield _line(row, task, "accuracy", correct[chosen].mean(), class_=name)


def _by_class(classes: Sequence[str] | None) -> dict[str, Any]:
    """Return a mask of the items of each class."""
    array = np.array(classes or ())
    return {name: array == name for name in sorted(set(classes or ()))}
