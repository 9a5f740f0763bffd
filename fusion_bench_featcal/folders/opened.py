"""Models, settings and tasks, as `featcal calibrate` opens them before it calibrates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from fusion_bench_featcal.folders.heads import ClassifierHeads
from fusion_bench_featcal.folders.input_models import InputModels
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.folders.tasks import Task
from fusion_bench_featcal.models.cards import CardHead
from fusion_bench_featcal.results.notes import Note
from fusion_bench_featcal.run.log import AsMerged
from fusion_bench_featcal.run.processes import Processes
from fusion_bench_featcal.run.result import CalibrationResult
from fusion_bench_featcal.settings import FeatCalSettings


class Models(Protocol):
    """Merged model, base and experts of one request, which fit each other.

    Attributes:
        title: Kind and class of the models.
        merged_bytes: Bytes of the merged model.
        expert_bytes: Bytes of all experts.
        heads: The experts' heads, or None if all tasks share the merged model's.
    """

    title: str
    merged_bytes: int
    expert_bytes: int
    heads: ClassifierHeads | None = None

    def load_merged(self) -> nn.Module:
        """Return the merged model on the device."""
        ...

    def load_expert(self, task: str) -> nn.Module:
        """Return a task's expert on the device."""
        ...

    def load_base(self) -> nn.Module | None:
        """Return the base on the device, or None without one."""
        ...

    def left_as_merged(self, tasks: Mapping[str, Task]) -> AsMerged:
        """Return the modules that a calibration with these tasks leaves unchanged, if known."""
        ...

    def calibrate(
        self, settings: FeatCalSettings, batches: Mapping[str, Any], processes: Processes
    ) -> CalibrationResult:
        """Calibrate the merged model with each task's batches, which processes share."""
        ...

    def merge(self) -> CalibrationResult:
        """Return the merged model in the form of a calibrated one, without a calibration."""
        ...

    def load_calibrated(self, result: CalibrationResult) -> nn.Module:
        """Return the calibrated model on the device."""
        ...

    def write_calibrated(
        self, result: CalibrationResult, folder: Path, heads: Mapping[str, nn.Module]
    ) -> CardHead:
        """Write the calibrated model and the files beside it, but no card.

        Args:
            result: The calibration.
            folder: An empty folder.
            heads: Task -> its expert's head, if experts have heads of their own.
        """
        ...


@dataclass(frozen=True)
class Opened:
    """The models and data of one run.

    Attributes:
        models: The models.
        settings: Settings of the calibration, all of them set.
        tasks: Task -> its data.
        notes: Notes on models and settings. Warnings name experts that may not read the data in
            the way in which they were trained.
        further: Task without an expert -> its test examples.
    """

    models: Models
    settings: FeatCalSettings
    tasks: Mapping[str, Task]
    notes: Sequence[Note]
    further: Mapping[str, Task] = field(default_factory=dict)


def notes_on_inputs(inputs: InputModels) -> list[str]:
    """Return a line for the merger, the base, each expert, and weights beside the merged model."""
    request = inputs.request
    notes = [f"merge: {request.merge}"] if request.merge else []
    notes += [f"base: {request.base}"] if request.base else []
    notes += [
        f"expert {task}: {request.expert[task]}{' (adapter)' * expert.is_adapter}"
        for task, expert in inputs.experts.items()
    ]
    return notes + ([] if inputs.merged is None else inputs.merged.folder_files.weights_note)


def require_base(request: Request) -> None:
    """Refuse a request without a base that its rule or its merger needs."""
    is_needed = request.merged is None or request.settings.rule_object.needs_base
    if request.base is None and is_needed:
        instead = "" if request.merged is None else ", or give --set anchor_rho=1"
        raise ValueError(
            f"--base is missing: name the model that the experts were fine-tuned from{instead}"
        )
