"""`method=diagnose`: runs `method=featcal` and also compares its models with the experts."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.algorithm import FeatCalAlgorithm
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.nearest_names import refuse_unknown
from fusion_bench_featcal.errors.plurals import pluralize
from fusion_bench_featcal.experts.copies import copied_module
from fusion_bench_featcal.families import head_of, resolve_family
from fusion_bench_featcal.fusionbench.data import samples_used
from fusion_bench_featcal.fusionbench.featcal import FeatCal
from fusion_bench_featcal.fusionbench.method_inputs import MethodInputs
from fusion_bench_featcal.fusionbench.pool_models import load_pool_model
from fusion_bench_featcal.fusionbench.run_settings import RunSettings
from fusion_bench_featcal.fusionbench.saved_report import SavedReport
from fusion_bench_featcal.lab.diagnosis.lines import expert_lines, row_lines
from fusion_bench_featcal.lab.diagnosis.measure import measure_drift
from fusion_bench_featcal.lab.diagnosis.views import show_diagnosis
from fusion_bench_featcal.lab.rivals.features import load_projection
from fusion_bench_featcal.results.notes import NOTE, Note
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.settings.fields import Settings, is_text_list, setting

log = logging.getLogger(__name__)

_LEAST = 2  # items per task, as principal directions need


@dataclass(frozen=True, kw_only=True)
class DiagnosisSettings(Settings):
    """Settings of `method=diagnose` in addition to the settings of `method=featcal`."""

    tasks: Sequence[str] | None = setting(
        None,
        "Tasks to diagnose. Null: all.",
        accepts="a list of tasks",
        check=is_text_list,
    )
    items: int = setting(256, "Maximum number of examples per task.", ge=_LEAST)
    split: str = setting("test", "Split of the examples.", choices=("train", "val", "test"))


class DiagnosisAlgorithm(FeatCalAlgorithm):
    """Measures at which blocks, and for which tasks, calibration helps.

    Run by `fusion_bench method=diagnose modelpool=...`, with all settings of `method=featcal`.
    """

    settings_classes = (FeatCal, RunSettings, DiagnosisSettings)
    shares_processes = False

    @property
    def diagnosis(self) -> DiagnosisSettings:
        """The settings of the diagnosis."""
        return self.settings_objects[2]

    @property
    def _item_settings(self) -> FeatCalSettings:
        """The settings of the calibration, with the number of items as number of samples."""
        return self.settings.replace(samples_per_task=self.diagnosis.items)

    def check(self, inputs: MethodInputs) -> None:
        """Check the settings as `method=featcal` does, and that each task has an expert."""
        experts = list(inputs.modelpool.model_names)
        refuse_unknown(self.diagnosis.tasks or (), experts, "method.tasks: expert ")
        super().check(inputs)

    def open(self, inputs: MethodInputs) -> None:
        """Open models and data as `method=featcal` does, and draw the items."""
        super().open(inputs)
        diagnosis = self.diagnosis
        self._items = open_items(inputs, diagnosis.tasks, self._item_settings, diagnosis.split)

    def on_model_built(
        self, name: str, model: nn.Module, report: SavedReport, inputs: MethodInputs
    ) -> None:
        """Compare a model with the experts."""
        log.info("diagnosing %s", name)
        run, is_first = report.run, not report.run.lines
        kind = getattr(getattr(model, "config", None), "model_type", None)
        options: Any = {"device": self.fabric.device, "autocast": self.fabric.autocast}
        options["pooling"] = inputs.pooling
        if kind == "clip_vision_model" and inputs.pooling is None and head_of(model) is None:
            if not hasattr(self, "_projection"):  # loaded with the first row
                self._projection = _projection(inputs, report)
            options["projection"] = self._projection
        family = resolve_family(self.settings.family, model)
        for task, batches in self._items.items():
            expert, dtype = load_pool_model(inputs.modelpool, task), next(model.parameters()).dtype
            if next(expert.parameters()).dtype != dtype:
                expert = copied_module(expert).to(dtype)
            sources = inputs.base(), expert, task, batches
            measures = measure_drift(model, *sources, self._item_settings, family, **options)
            run.lines += row_lines(name, task, measures)
            if is_first:
                run.lines += expert_lines(task, measures)

    def finish(self, report: SavedReport) -> nn.Module:
        """Write and print the report, then print the tables of the diagnosis."""
        diagnosis = self.diagnosis
        text = (
            f"diagnosis: at most {diagnosis.items} examples of the {diagnosis.split} split per task"
        )
        report.run.note(Note(NOTE, text))
        model = super().finish(report)
        show_diagnosis(report.run)
        return model


def _projection(inputs: MethodInputs, report: SavedReport) -> Callable[[Tensor], Tensor]:
    """Return CLIP's projection of final features, or the identity if the base's files lack it."""
    try:
        projection = load_projection(inputs.models, None).to(inputs.fabric.device)
    except CalibrationError as error:
        report.warn([f"final features are not projected: {error}"])
        return lambda features: features
    return lambda features: projection(features.to(projection.weight))


def open_items(
    inputs: MethodInputs, tasks: Sequence[str] | None, settings: FeatCalSettings, split: str
) -> Mapping[str, Any]:
    """Draw batches of items of each task, in the same way as calibration samples.

    Args:
        inputs: The pools.
        tasks: The tasks, by default all tasks with an expert.
        settings: `samples_per_task` (the largest number of items), `seed`, `batch_size` and
            `max_length` are used.
        split: Split of the items.

    Raises:
        CalibrationError: If a task has fewer than two items, or its data cannot be loaded.
    """
    experts = list(inputs.modelpool.model_names)
    tasks = tasks or experts
    sizes = samples_used(inputs.modelpool, tasks, settings.samples_per_task, split)
    for task in tasks:
        samples = sizes[task]["samples"] if task in sizes else 0
        if samples < _LEAST:
            raise CalibrationError(
                f"task {task!r} has {pluralize(samples, 'example')} in the {split} split, but a "
                f"diagnosis needs {_LEAST}. Set modelpool.{split}_datasets.{task} (data in the "
                "task pool are only evaluated) or method.split, or leave the task out of "
                "method.tasks"
            )
    draw = {"calibration_split": split, "calibration_data": None, "calibration_targets": "labels"}
    batches = inputs.batches(settings.replace(**draw))
    return {task: batches[task] for task in tasks}
