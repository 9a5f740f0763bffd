"""`method=diagnose`: rows of `method=featcal`, whose models are also compared with the experts."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusion_bench import BaseModelPool
from torch import Tensor, nn

from fusion_bench_featcal.calibration import calibrate
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.nearest_names import refuse_unknown
from fusion_bench_featcal.errors.plurals import counted
from fusion_bench_featcal.experts.copies import copied_module
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.fusionbench.data import samples_used
from fusion_bench_featcal.fusionbench.inputs import MethodInputs
from fusion_bench_featcal.fusionbench.method import CalibratingMethod
from fusion_bench_featcal.fusionbench.options import MERGED, RunSettings, plain
from fusion_bench_featcal.fusionbench.pool_checks import check_experts
from fusion_bench_featcal.fusionbench.pool_models import BASE_MODEL, load_pool_model
from fusion_bench_featcal.fusionbench.run_results import RunResults
from fusion_bench_featcal.lab.diagnosis.lines import expert_lines, row_lines
from fusion_bench_featcal.lab.diagnosis.measure import measure
from fusion_bench_featcal.lab.diagnosis.views import show_diagnosis
from fusion_bench_featcal.lab.rivals.features import load_projection
from fusion_bench_featcal.models.saving import CardFacts
from fusion_bench_featcal.modules.models import head_of
from fusion_bench_featcal.results import BASE
from fusion_bench_featcal.results import measure as measure_cost
from fusion_bench_featcal.results.notes import DIAGNOSIS, Note
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
        group="the diagnosis",
    )
    items: int = setting(256, "Largest number of items per task.", ge=_LEAST)
    split: str = setting("test", "Split of the items.", choices=("train", "val", "test"))


class DiagnosisAlgorithm(CalibratingMethod):
    """Measures at which blocks, and for which tasks, calibration helps.

    Run by `fusion_bench method=diagnose modelpool=...`, with all settings of `method=featcal`.
    """

    setting_kinds = (FeatCalSettings, RunSettings, DiagnosisSettings)

    def __init__(self, **keys: Any) -> None:
        """Check all settings before a model is loaded.

        Raises:
            ValueError: If a key is unknown or a value is not accepted.
        """
        super().__init__(**keys)
        self.diagnosis: DiagnosisSettings = self.declared[2]

    def check(self, inputs: MethodInputs) -> None:
        """Refuse also tasks without an expert."""
        experts = list(inputs.modelpool.model_names)
        refuse_unknown(self.diagnosis.tasks or (), experts, "method.tasks: expert ")
        super().check(inputs)

    def run(self, modelpool: BaseModelPool) -> nn.Module:  # type: ignore[override]
        """Merge and calibrate, and measure and evaluate each model.

        Returns:
            The model of the row `save`, by default the one calibrated with the method's settings.

        Raises:
            CalibrationError: If the run cannot go on. Most reasons are detected before merging.
        """
        chosen, choices, rows = self.run_settings, self.choices, self.rows
        inputs = self.inputs(modelpool)
        self.check(inputs)
        batches, upstream = self.open(inputs), self.upstream(inputs)
        names = {"upstream": upstream.name, "row": choices.save}
        results = RunResults(self, modelpool, inputs.processor, **names)
        results.add_notes(check_experts(inputs.models, self.settings))
        add_measures = self._comparison(inputs, results)
        merged = upstream.merged_model(self._program)
        results.saver.offer(merged, CardFacts(MERGED, chosen.base_method))
        options: Any = {"device": self.fabric.device, "autocast": self.fabric.autocast}
        for name, settings in rows.items():
            sources = inputs.base(), inputs.experts(), batches[name]
            with measure_cost() as cost:
                result = calibrate(merged, *sources, settings, **options)
            result.reads["upstream"] = upstream.reads() if settings is self.settings else None
            add_measures(name, result.model)
            results.add_calibrated(name, settings, chosen.base_method, result, cost)
            del result  # frees a model before the next one
        if MERGED in (*choices.compare_with, choices.save):
            add_measures(upstream.name, merged)
            results.add_row(upstream.name, merged, settings=plain(chosen.base_method))
        del merged
        if BASE in choices.compare_with and modelpool.has_pretrained:
            add_measures(BASE, load_pool_model(modelpool, BASE_MODEL))
        results.add_base_and_experts(choices.compare_with)
        model = results.finish()
        show_diagnosis(results.report)
        return model

    def _comparison(
        self, inputs: MethodInputs, results: RunResults
    ) -> Callable[[str, nn.Module], None]:
        """Draw the items, and return a function that adds a row's measures to the report."""
        chosen, pool, report = self.diagnosis, inputs.modelpool, results.report
        settings = self.settings.replace(samples_per_task=chosen.items)
        items = open_items(inputs, chosen.tasks, settings, chosen.split)
        text = f"diagnosis: at most {chosen.items} items per task of the {chosen.split} split"
        report.note(Note(DIAGNOSIS, text))
        projections: list[nn.Linear | None] = []  # loaded with the first row

        def projected(features: Tensor) -> Tensor:
            if not projections:
                projections.append(_projection(inputs, results))
            projection = projections[0]
            return features if projection is None else projection(features.to(projection.weight))

        def add(row: str, model: nn.Module) -> None:
            log.info("diagnosing %s", row)
            is_first, kind = not report.lines, getattr(model, "config", None)
            is_tower = getattr(kind, "model_type", None) == "clip_vision_model"
            options: Any = {"device": self.fabric.device, "autocast": self.fabric.autocast}
            options["pooling"] = inputs.pooling
            if is_tower and inputs.pooling is None and head_of(model) is None:
                options["projection"] = projected
            family = resolve_family(settings.family, model)
            for task, batches in items.items():
                expert, dtype = load_pool_model(pool, task), next(model.parameters()).dtype
                if next(expert.parameters()).dtype != dtype:
                    expert = copied_module(expert).to(dtype)
                of_task = inputs.base(), expert, task, batches
                measures = measure(model, *of_task, settings, family, **options)
                report.lines += row_lines(row, task, measures)
                if is_first:
                    report.lines += expert_lines(task, measures)

        return add


def _projection(inputs: MethodInputs, results: RunResults) -> nn.Linear | None:
    """Return CLIP's projection of final features, if the base's checkpoint has it."""
    try:
        return load_projection(inputs.models, None).to(inputs.fabric.device)
    except CalibrationError as error:
        results.add_notes([f"final features are not projected: {error}"])
        return None


def open_items(
    inputs: MethodInputs, tasks: Sequence[str] | None, settings: FeatCalSettings, split: str
) -> Mapping[str, Any]:
    """Draw batches of items of each task, in the same way as calibration samples.

    Args:
        inputs: The pools.
        tasks: The tasks, by default all with an expert.
        settings: At most `samples_per_task` items, `seed`, `batch_size` and `max_length`.
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
                f"task {task!r} has {counted(samples, 'item')} of the {split} split, a diagnosis "
                f"needs {_LEAST}: set modelpool.{split}_datasets.{task} (the task pool's data are "
                "only evaluated), method.split, or method.tasks without it"
            )
    draw = {"calibration_split": split, "calibration_data": None, "calibration_targets": "labels"}
    batches = inputs.batches(settings.replace(**draw))
    return {task: batches[task] for task in tasks}
