"""`method=diagnose`: a run of FeatCal that also compares every row's model with the experts."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
from torch import Tensor, nn

from fusion_bench_featcal.algorithm import FeatCalAlgorithm
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.fusionbench.options import Choices, names_of
from fusion_bench_featcal.fusionbench.pool_models import BASE_MODEL, load_pool_model
from fusion_bench_featcal.fusionbench.run_results import RunResults
from fusion_bench_featcal.lab.diagnosis.items import LEAST, open_items
from fusion_bench_featcal.lab.diagnosis.measure import measure
from fusion_bench_featcal.lab.diagnosis.metrics import expert_lines, row_lines
from fusion_bench_featcal.lab.diagnosis.views import show_diagnosis
from fusion_bench_featcal.lab.rivals.features import load_projection
from fusion_bench_featcal.method_inputs import MethodInputs
from fusion_bench_featcal.modules.models import head_of
from fusion_bench_featcal.results import BASE
from fusion_bench_featcal.results.notes import DIAGNOSIS, Note
from fusion_bench_featcal.setting_fields import Settings, is_text_list, setting
from fusion_bench_featcal.settings import FeatCalSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DiagnosisSettings(Settings):
    """Settings of `method=diagnose` in addition to those of `method=featcal`."""

    tasks: Sequence[str] | None = setting(
        None,
        "Tasks to diagnose. Null: all.",
        accepts="a list of tasks",
        check=is_text_list,
        group="the diagnosis",
    )
    items: int = setting(256, "Largest number of items per task.", ge=LEAST)
    split: str = setting("test", "Split of the items.", choices=("train", "val", "test"))


class DiagnosedResults(RunResults):
    """A run's rows, each measured before its evaluation."""

    def start(
        self, inputs: MethodInputs, items: Mapping[str, Any], settings: FeatCalSettings
    ) -> None:
        """Store the pools, the items of each task, and the settings for drawing them."""
        self._inputs, self._items, self._settings = inputs, items, settings

    def add_reference(self, name: str, model: nn.Module, settings: Any = None) -> None:
        """Measure and evaluate a model that was not calibrated in this run."""
        self._measure(name, model)
        super().add_reference(name, model, settings)

    def add_made(self, name: str, model: nn.Module, **details: Any) -> None:
        """Measure and evaluate a calibrated model."""
        self._measure(name, model)
        super().add_made(name, model, **details)

    def add_base_and_experts(self, references: Sequence[str]) -> None:
        """Add base and experts. The base is measured without a task pool, too."""
        if self._taskpool is None and BASE in references and self._modelpool.has_pretrained:
            self.add_reference(BASE, load_pool_model(self._modelpool, BASE_MODEL))
        super().add_base_and_experts(references)

    def _show(self) -> None:
        """Print the run's table and the diagnosis."""
        super()._show()
        show_diagnosis(self.report)

    def _measure(self, row: str, model: nn.Module) -> None:
        """Compare a row's model with every expert, one expert in memory at a time."""
        log.info("diagnosing %s", row)
        inputs, settings, is_first = self._inputs, self._settings, not self.report.lines
        kind = getattr(getattr(model, "config", None), "model_type", None)
        projects = kind == "clip_vision_model" and head_of(model) is None
        options: dict[str, Any] = {"projection": self._projected} if projects else {}
        for task, batches in self._items.items():
            measures = measure(
                model,
                inputs.base(),
                inputs.experts()[task],
                task,
                batches,
                settings,
                resolve_family(settings.family, model),
                device=inputs.fabric.device,
                autocast=inputs.fabric.autocast,
                **options,
            )
            self.report.lines += row_lines(row, task, measures)
            if is_first:
                self.report.lines += expert_lines(task, measures)

    def _projected(self, features: Tensor) -> Tensor:
        projection = self._projection
        return features if projection is None else projection(features.to(projection.weight.dtype))

    @cached_property
    def _projection(self) -> nn.Linear | None:
        """CLIP's projection of final features, if the base's checkpoint has it."""
        try:
            projection = load_projection(self._inputs.models, None)
        except CalibrationError as error:
            self.add_notes([f"final features are not projected: {error}"])
            return None
        return projection.to(self._inputs.fabric.device)


class DiagnosisAlgorithm(FeatCalAlgorithm):
    """Measures at which blocks, and for which tasks, calibration helps.

    Run by `fusion_bench method=diagnose modelpool=...`, with all settings of `method=featcal`.
    """

    results_kind = DiagnosedResults
    setting_kinds = (*FeatCalAlgorithm.setting_kinds, DiagnosisSettings)
    _config_mapping = FeatCalAlgorithm._config_mapping | {n: n for n in names_of(setting_kinds)}

    tasks: Any
    items: int
    split: str

    def on_run_start(self) -> None:
        """Refuse several processes, and prepare like `method=featcal`."""
        if self.fabric.world_size > 1:
            raise CalibrationError("diagnose runs in one process: set fabric.devices=1")
        super().on_run_start()

    def _open_results(self, inputs: MethodInputs, upstream: str, choices: Choices) -> RunResults:
        settings = self.settings.replace(samples_per_task=self.items)
        items = open_items(inputs, self.tasks, settings, self.split)
        results: Any = super()._open_results(inputs, upstream, choices)
        text = f"diagnosis: at most {self.items} items per task of the {self.split} split"
        results.report.note(Note(DIAGNOSIS, text))
        results.start(inputs, items, settings)
        return results
