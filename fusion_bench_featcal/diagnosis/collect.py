"""Measurements of all rows of a run, gathered into one diagnosis."""

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from fusion_bench_featcal.diagnosis.class_counts import count_classes
from fusion_bench_featcal.diagnosis.drift import DriftParts, principal_plane
from fusion_bench_featcal.diagnosis.items import TaskItems
from fusion_bench_featcal.diagnosis.measure import Measures, Projection, measure
from fusion_bench_featcal.families import Family, resolve_family
from fusion_bench_featcal.methods.interface import MethodInputs
from fusion_bench_featcal.methods.projection import load_projection
from fusion_bench_featcal.modules.models import head_of
from fusion_bench_featcal.results import EXPERTS, Report
from fusion_bench_featcal.results.diagnosis import Diagnosis, row_order
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings
from fusion_bench_featcal.streams.family_check import checked_family
from fusion_bench_featcal.streams.samples import take_samples

log = logging.getLogger(__name__)

PROJECTIONS = ("pca",)
_DRAWN = 64  # most items of a task that are projected


class Collector:
    """Looks at rows' models one after another; keeps numbers, and final features for projections.

    Attributes:
        notes: Sentences for the page.
    """

    def __init__(
        self,
        inputs: MethodInputs,
        items: Mapping[str, TaskItems],
        settings: FeatCalSettings,
        *,
        positions: str,
        projections: Sequence[str],
    ) -> None:
        """Refer to items and experts; nothing is loaded yet.

        Args:
            inputs: The pools.
            items: Items by task.
            settings: `family`, `stream_experts`, `decoder_rows`, `seed` and `linear_kernel` are
                used.
            positions: Positions whose features are compared at blocks' outputs.
            projections: Of `PROJECTIONS`.
        """
        self._inputs, self._items, self._settings = inputs, items, settings
        self._positions, self._projections = positions, projections
        self._measured: dict[str, dict[str, Measures]] = {}
        self._family: Family | None = None
        self._shapes: tuple[str, dict[str, torch.Size]] | None = None
        self._described = ""  # final features, in words
        self.notes: list[str] = []

    def look(self, row: str, model: nn.Module) -> None:
        """Measure a row's model beside every expert, one expert in memory at a time.

        Raises:
            CalibrationError: If the model does not match the others, naming row and tensor.
        """
        self._check_match(row, model)
        log.info("diagnosing %s", row)
        fabric, family = self._inputs.fabric, self._family_of(model)
        base = self._inputs.base(self._settings)
        self._measured[row] = {}
        for task, items in self._items.items():
            try:
                self._measured[row][task] = measure(
                    model,
                    base,
                    self._inputs.experts(self._settings),
                    task,
                    items.batches,
                    self._settings,
                    family,
                    positions=self._positions,
                    projection=self._projection_for(model),
                    device=fabric.device,
                    autocast=fabric.autocast,
                )
            except CalibrationError as error:
                raise CalibrationError(f"row {row}: {error}") from error

    def diagnosis(
        self, report: Report, split: str, classes: Mapping[str, Sequence[str]] | None = None
    ) -> Diagnosis:
        """Gather everything.

        Args:
            report: The run's report: names, accuracies and flags per test item.
            split: Split of the items.
            classes: Task -> class of each test item of the task pool; None: not known.
        """
        first = next(iter(next(iter(self._measured.values())).values()))
        made = Diagnosis(
            suite=report.suite,
            upstream=report.upstream,
            split=split,
            items={},
            seed=self._settings.seed,
            positions=self._positions,
            features=self._described,
            blocks=first.blocks,
            accuracy={row: dict(values) for row, values in report.rows.items()},
            versions=dict(report.versions),
            device=dict(report.device),
        )
        for row in row_order(list(self._measured), report.upstream):
            for task, found in self._measured[row].items():
                drift = found.drift.permute(2, 0, 1).numpy()
                parts = dict(zip(DriftParts._fields, drift, strict=True))
                cosines, own = found.cosines.numpy(), self._items[task].classes
                made.add(row, task, parts, cosines, own, found.task_vector)
        self.notes += count_classes(made, report, classes)
        for kind in self._projections:
            if planes := self._planes(made):
                made.projections[kind] = planes
        made.notes = self.notes
        return made

    def _planes(self, made: Diagnosis) -> dict[str, dict[str, list[list[float]]]]:
        """Project features of expert, merged model and calibrated rows into one plane a task."""
        rows = [*([made.merged] if made.merged else []), *made.repairs]
        planes: dict[str, dict[str, list[list[float]]]] = {}
        for task in made.tasks if rows else ():
            sides = {EXPERTS: self._measured[rows[0]][task].expert_features}
            sides |= {row: self._measured[row][task].features for row in rows}
            drawn = [features[:_DRAWN] for features in sides.values()]
            plane = principal_plane(torch.cat(drawn))
            parts = zip(sides, plane.split(len(drawn[0])), strict=True)
            planes[task] = {row: _short(part) for row, part in parts}
        return planes

    def _check_match(self, row: str, model: nn.Module) -> None:
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        if self._shapes is None:
            self._shapes = row, shapes
        first, wanted = self._shapes
        for name in (*wanted, *shapes):
            if shapes.get(name) != wanted.get(name):
                mine, theirs = (
                    "no such tensor" if shape is None else f"shape {tuple(shape)}"
                    for shape in (shapes.get(name), wanted.get(name))
                )
                raise CalibrationError(
                    f"row {row} does not match row {first}: of tensor {name!r} it has {mine}, "
                    f"{first} has {theirs}. Check method.rows.{row}"
                )

    def _family_of(self, model: nn.Module) -> Family:
        if self._family is None:
            asked = self._settings.family
            task, items = next(iter(self._items.items()))
            first = next(take_samples(task, items.batches, self._settings, model))
            reads = self._positions == "read"
            self._family = checked_family(
                resolve_family(asked, model), asked, model, {task: [first]}, needs_closing=reads
            )
        return self._family

    def _projection_for(self, model: nn.Module) -> Projection | None:
        kind = getattr(getattr(model, "config", None), "model_type", None)
        self._described = "hidden states that the head reads, where they predict a target"
        if head_of(model) is not None:
            return None
        self._described = "pooled output"
        if kind != "clip_vision_model" or self._clip_projection is None:
            return None
        self._described = "projected image features"
        projection = self._clip_projection
        return lambda features: projection(features.to(projection.weight.dtype))

    @cached_property
    def _clip_projection(self) -> nn.Linear | None:
        try:
            projection = load_projection(self._inputs.models, None)
        except CalibrationError as error:
            note = f"final features are not projected: {error}"
            log.warning(note)
            self.notes.append(note)
            return None
        return projection.to(self._inputs.fabric.device)


def _short(points: Tensor) -> list[list[float]]:
    return [[float(f"{value:.4g}") for value in point] for point in points.tolist()]
