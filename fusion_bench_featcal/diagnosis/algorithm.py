"""`method=diagnose`: a run of FeatCal that looks at every row's model beside the experts."""

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
from torch import nn

from fusion_bench_featcal.algorithm import FeatCalAlgorithm
from fusion_bench_featcal.diagnosis.collect import PROJECTIONS, Collector
from fusion_bench_featcal.diagnosis.items import LEAST, chosen_tasks, open_items
from fusion_bench_featcal.diagnosis.passes import POSITIONS
from fusion_bench_featcal.fusionbench.options import MERGED, Choices, plain
from fusion_bench_featcal.fusionbench.pool_models import BASE_MODEL, load_pool_model
from fusion_bench_featcal.fusionbench.run_results import RunResults
from fusion_bench_featcal.methods.interface import MethodInputs
from fusion_bench_featcal.results import BASE, EXPERTS
from fusion_bench_featcal.results.diagnosis import Diagnosis
from fusion_bench_featcal.results.diagnosis_page import PAGE_FILE, help_sentences, write_diagnosis
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings

_SPLITS = ("train", "val", "test")
_NAME = re.compile(r"[\w.:+-]+")


class DiagnosisAlgorithm(FeatCalAlgorithm):
    """Measures where along the depth, for which task and class calibration helps.

    Run by `fusion_bench method=diagnose modelpool=...`, with all settings of `method=featcal`.
    """

    _config_mapping = FeatCalAlgorithm._config_mapping | {
        name: name for name in ("rows", "tasks", "items", "split", "positions", "projections")
    }

    def __init__(
        self,
        *,
        rows: Mapping[str, str] | None = None,
        tasks: Sequence[str] | None = None,
        items: int = 256,
        split: str = "test",
        positions: str = "all",
        projections: Sequence[str] = PROJECTIONS,
        **others: Any,
    ) -> None:
        """Check everything that can be checked before a model is loaded.

        Args:
            rows: Name -> folder or hub id of a model to diagnose beside base and merged model;
                nothing is calibrated then. None: the run's own calibrations.
            tasks: Tasks to diagnose; None: all.
            items: Most items of each task, at least 2.
            split: Their split: train, val or test.
            positions: Positions whose features are compared at blocks' outputs: all that count,
                or those whose final features are read.
            projections: `[pca]`, or none.
            **others: Settings of `method=featcal`.

        Raises:
            ValueError: If a key is unknown or a value out of range.
        """
        if isinstance(items, bool) or not isinstance(items, int) or items < LEAST:
            raise ValueError(
                f"method.items must be an integer >= {LEAST} (one item has no principal plane and "
                f"no interval), got {items!r}"
            )
        for key, value, accepted in (
            ("split", [split], _SPLITS),
            ("positions", [positions], POSITIONS),
            ("projections", plain(projections), PROJECTIONS),
        ):
            if isinstance(value, str) or not set(value) <= set(accepted):
                raise ValueError(f"method.{key} must be of {', '.join(accepted)}, got {value!r}")
        self.rows = _checked_rows(plain(rows))
        self.tasks, self.items, self.split = plain(tasks), items, split
        self.positions, self.projections = positions, plain(projections)
        if self.rows is not None:
            others["fuse_merge"] = False  # no calibration completes the merged model
        super().__init__(**others)

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
