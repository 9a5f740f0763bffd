"""`method=diagnose`: a run of FeatCal that measures every row's model beside the experts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
from torch import nn

from fusion_bench_featcal.algorithm import FeatCalAlgorithm
from fusion_bench_featcal.diagnosis.collect import Collector, accuracy_lines
from fusion_bench_featcal.diagnosis.items import LEAST, chosen_tasks, open_items
from fusion_bench_featcal.diagnosis.measure import POSITIONS
from fusion_bench_featcal.fusionbench.options import Choices, names_of
from fusion_bench_featcal.fusionbench.pool_models import BASE_MODEL, load_pool_model
from fusion_bench_featcal.fusionbench.run_results import RunResults
from fusion_bench_featcal.methods.interface import MethodInputs
from fusion_bench_featcal.results import BASE
from fusion_bench_featcal.results.diagnosis import diagnosis_sentences
from fusion_bench_featcal.results.lines import LINES_FILE, Line, write_lines
from fusion_bench_featcal.setting_fields import Settings, is_text_list, setting
from fusion_bench_featcal.settings import CalibrationError


@dataclass(frozen=True, kw_only=True)
class DiagnosisSettings(Settings):
    """Settings of `method=diagnose` beside those of `method=featcal`."""

    tasks: Sequence[str] | None = setting(
        None,
        "Tasks to diagnose. Null: all.",
        accepts="a list of tasks",
        check=is_text_list,
        group="the diagnosis",
    )
    items: int = setting(256, "Largest number of items per task.", ge=LEAST)
    split: str = setting("test", "Split of the items.", choices=("train", "val", "test"))
    positions: str = setting(
        "all",
        "Positions that are compared at blocks' outputs: `all` that count, or those that the head "
        "reads (`read`: class token, or positions that predict a target).",
        choices=POSITIONS,
    )


class DiagnosisAlgorithm(FeatCalAlgorithm):
    """Measures at which blocks, and for which tasks and classes, calibration helps.

    Run by `fusion_bench method=diagnose modelpool=...`, with all settings of `method=featcal`.
    """

    setting_kinds = (*FeatCalAlgorithm.setting_kinds, DiagnosisSettings)
    _config_mapping = FeatCalAlgorithm._config_mapping | {n: n for n in names_of(setting_kinds)}

    tasks: Any
    items: int
    split: str
    positions: str

    def on_run_start(self) -> None:
        """Refuse several processes; prepare as `method=featcal` does."""
        if self.fabric.world_size > 1:
            raise CalibrationError("diagnose runs in one process: set fabric.devices=1")
        super().on_run_start()

    def _open_results(self, inputs: MethodInputs, upstream: str, choices: Choices) -> RunResults:
        tasks = chosen_tasks(inputs, self.tasks)
        settings = self.settings.replace(samples_per_task=self.items, held_out=0)
        items = open_items(inputs, tasks, settings, self.split)
        results = DiagnosedResults(
            self,
            inputs.modelpool,
            inputs.processor,
            upstream=upstream,
            row=choices.save,
            linear_kernel=self.settings.linear_kernel,
        )
        results.collector = Collector(inputs, items, settings, self.positions)
        results.tasks = tasks
        results.conditions = (
            f"at most {self.items} items per task of the {self.split} split, {self.positions} "
            "positions of blocks' outputs"
        )
        return results


class DiagnosedResults(RunResults):
    """A run's rows, each of which is measured before it is evaluated.

    Attributes:
        lines: Lines of the diagnosis.
    """

    collector: Collector
    tasks: list[str]
    conditions: str
    lines: list[Line]

    def add_reference(self, name: str, model: nn.Module, settings: Any = None) -> None:
        """Measure a model that was not calibrated in this run, and evaluate it."""
        self.collector.look(name, model)
        super().add_reference(name, model, settings)

    def add_made(self, name: str, model: nn.Module, **made: Any) -> None:
        """Measure a model that was calibrated, and evaluate it."""
        self.collector.look(name, model)
        super().add_made(name, model, **made)

    def add_base_and_experts(self, references: Sequence[str]) -> None:
        """Add base and experts; the base is measured without a task pool too."""
        if self._taskpool is None and BASE in references and self._modelpool.has_pretrained:
            self.add_reference(BASE, load_pool_model(self._modelpool, BASE_MODEL))
        super().add_base_and_experts(references)

    def finish(self) -> nn.Module:
        """Write the lines beside the run's report."""
        report = self.report
        classes = getattr(self._taskpool, "item_classes", None) or {}
        lines = [*self.collector.lines, *accuracy_lines(report, self.tasks, classes)]
        of_run = {"suite": report.suite, "merger": report.upstream}
        self.lines = [of_run | line for line in lines]
        note = f"diagnosis: {self.conditions}; final features: {self.collector.features}"
        report.notes.append(note)
        if self._log_dir is not None:
            write_lines(self._log_dir / LINES_FILE, self.lines)
        return super().finish()

    def _show(self) -> None:
        """Print the run's table, and sentences on the diagnosis."""
        super()._show()
        for sentence in diagnosis_sentences(self.lines):
            print(sentence)
