"""`method=diagnose`: a run of FeatCal that looks at every row's model beside the experts."""

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
from torch import nn

from fusion_bench_featcal.algorithm import FeatCalAlgorithm
from fusion_bench_featcal.diagnosis.collect import PROJECTIONS, Collector
from fusion_bench_featcal.diagnosis.items import LEAST, chosen_tasks, open_items
from fusion_bench_featcal.diagnosis.passes import POSITIONS
from fusion_bench_featcal.fusionbench.options import MERGED, Choices, names_of
from fusion_bench_featcal.fusionbench.pool_models import BASE_MODEL, load_pool_model
from fusion_bench_featcal.fusionbench.run_results import RunResults
from fusion_bench_featcal.methods.interface import MethodInputs
from fusion_bench_featcal.results import BASE, EXPERTS
from fusion_bench_featcal.results.diagnosis import Diagnosis
from fusion_bench_featcal.results.diagnosis_page import PAGE_FILE, help_sentences, write_diagnosis
from fusion_bench_featcal.setting_fields import Settings, is_text_list, setting
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings

_NAME = re.compile(r"[\w.:+-]+")


@dataclass(frozen=True, kw_only=True)
class DiagnosisSettings(Settings):
    """Settings of `method=diagnose` beside those of `method=featcal`."""

    rows: Any = setting(
        None,
        "Saved models to diagnose in place of the run's own calibrations, {name: folder or hub "
        "id}. Null: calibrate.",
        accepts="null or a mapping of names to folders",
        group="the diagnosis",
    )
    tasks: Sequence[str] | None = setting(
        None,
        "Tasks to diagnose. Null: all.",
        accepts="a list of tasks",
        check=is_text_list,
    )
    items: int = setting(256, "Most items of each task. One has no principal plane.", ge=LEAST)
    split: str = setting("test", "Split of the items.", choices=("train", "val", "test"))
    positions: str = setting(
        "all",
        "Positions that are compared at blocks' outputs: `all` that count, or those that the head "
        "reads (`read`: class token, or positions that predict a target).",
        choices=POSITIONS,
    )
    projections: Sequence[str] = setting(
        PROJECTIONS,
        "Planes to draw final features in.",
        accepts="[pca] or []",
        check=lambda value: is_text_list(value, PROJECTIONS),
    )


class DiagnosisAlgorithm(FeatCalAlgorithm):
    """Measures where along the depth, for which task and class calibration helps.

    Run by `fusion_bench method=diagnose modelpool=...`, with all settings of `method=featcal`.
    """

    setting_kinds = (*FeatCalAlgorithm.setting_kinds, DiagnosisSettings)
    _config_mapping = FeatCalAlgorithm._config_mapping | {n: n for n in names_of(setting_kinds)}

    rows: Any
    tasks: Any
    items: int
    split: str
    positions: str
    projections: Any

    def __init__(self, **keys: Any) -> None:
        """Check everything that can be checked before a model is loaded.

        Args:
            **keys: Settings of `method=featcal`, and fields of `DiagnosisSettings`.

        Raises:
            ValueError: If a key is unknown or a value is not accepted.
        """
        super().__init__(**keys)
        self.rows = _checked_rows(self.rows)

    def on_run_start(self) -> None:
        """Refuse several processes; prepare as `method=featcal` does."""
        if self.fabric.world_size > 1:
            raise CalibrationError("diagnose runs in one process: set fabric.devices=1")
        super().on_run_start()

    def _chosen(self) -> tuple[Choices, dict[str, FeatCalSettings]]:
        choices, rows = super()._chosen()
        if self.rows is None:
            return choices, rows
        return replace(choices, save=MERGED, presets={}), {}

    def _open_results(self, inputs: MethodInputs, upstream: str, choices: Choices) -> RunResults:
        if self.rows is not None and upstream in self.rows:
            raise ValueError(f"method.rows.{upstream}: that is the merged model's row")
        tasks = chosen_tasks(inputs, self.tasks)
        settings = self.settings.replace(samples_per_task=self.items, held_out=0)
        items = open_items(inputs, tasks, settings, self.split)
        self._check_rows(inputs)
        options = {"positions": self.positions, "projections": self.projections}
        results = DiagnosedResults(
            self,
            inputs.modelpool,
            inputs.processor,
            upstream=upstream,
            row=choices.save,
            linear_kernel=self.settings.linear_kernel,
        )
        results.collector = Collector(inputs, items, settings, **options)
        results.split = self.split
        results.saved_rows = self._saved_rows(inputs)
        return results

    def _check_rows(self, inputs: MethodInputs) -> None:
        """Refuse a folder that is not there, before anything is loaded."""
        for name, place in (self.rows or {}).items():
            looks_local = place.startswith((".", "/", "~"))
            if looks_local and not Path(place).expanduser().is_dir():
                raise CalibrationError(
                    f"method.rows.{name}: there is no folder {place}. Name a folder with a saved "
                    "model, or a hub id"
                )

    def _saved_rows(self, inputs: MethodInputs) -> Iterator[tuple[str, nn.Module]]:
        """Yield the models of `rows`, loaded as the pool loads its base."""
        for name, place in (self.rows or {}).items():
            pool: Any = inputs.modelpool
            like = pool._models[BASE_MODEL if pool.has_pretrained else pool.model_names[0]]
            other: Any = copy.copy(pool)
            other._models = {**pool._models, name: _at_place(like, str(Path(place).expanduser()))}
            try:
                yield name, load_pool_model(other, name)
            except CalibrationError as error:
                text = str(error).replace(f"modelpool.models.{name}", f"method.rows.{name}")
                raise CalibrationError(f"method.rows.{name}: {text}") from error


class DiagnosedResults(RunResults):
    """A run's rows, each of which is looked at before it is evaluated."""

    collector: Collector
    diagnosis: Diagnosis
    split: str
    saved_rows: Iterable[tuple[str, nn.Module]]

    def add_reference(self, name: str, model: nn.Module, settings: Any = None) -> None:
        """Look at a model that was not calibrated in this run, and evaluate it."""
        self.collector.look(name, model)
        super().add_reference(name, model, settings)

    def add_made(self, name: str, model: nn.Module, **made: Any) -> None:
        """Look at a model that was calibrated, and evaluate it."""
        self.collector.look(name, model)
        super().add_made(name, model, **made)

    def add_base_and_experts(self, references: Sequence[str]) -> None:
        """Add the models of `method.rows`; then as `method=featcal`."""
        for name, model in self.saved_rows:
            self.add_reference(name, model)
        if self._taskpool is None and BASE in references and self._modelpool.has_pretrained:
            self.add_reference(BASE, load_pool_model(self._modelpool, BASE_MODEL))
        super().add_base_and_experts(references)

    def finish(self) -> nn.Module:
        """Write the diagnosis beside the run's report."""
        classes = getattr(self._taskpool, "item_classes", None)
        self.diagnosis = self.collector.diagnosis(self.report, self.split, classes)
        if self._log_dir is not None:
            write_diagnosis(self.diagnosis, self._log_dir)
        return super().finish()

    def _show(self) -> None:
        """Print the run's table, and where calibration helps."""
        super()._show()
        for line in help_sentences(self.diagnosis):
            print(line)
        if self._log_dir is not None:
            print(f"diagnosis: {self._log_dir / PAGE_FILE}")


def _checked_rows(rows: Any) -> dict[str, str] | None:
    if rows is None:
        return None
    if not isinstance(rows, Mapping) or not rows:
        raise ValueError(f"method.rows must map names to folders of saved models, got {rows!r}")
    for name, place in rows.items():
        if (
            name in (BASE, EXPERTS, MERGED)
            or not _NAME.fullmatch(str(name))
            or not isinstance(place, str)
        ):
            raise ValueError(
                f"method.rows: a row is a name of letters, digits and .:+-, none of {BASE}, "
                f"{EXPERTS} and {MERGED}, with a folder; got {name!r}: {place!r}"
            )
    return {str(name): place for name, place in rows.items()}


def _at_place(entry: Any, place: str) -> Any:
    """A pool's entry of a model, for another folder."""
    if isinstance(entry, str):
        return place
    if isinstance(entry, nn.Module):
        kind: Any = type(entry)
        return kind.from_pretrained(place, trust_remote_code=False)
    made = copy.deepcopy(entry)
    made["pretrained_model_name_or_path"] = place
    return made
