"""The parts that `featcal calibrate` opens before it calibrates, and runs afterwards."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from fusion_bench_featcal.folders.heads import ClassifierHeads
from fusion_bench_featcal.folders.input_models import InputModels
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.folders.tasks import Task
from fusion_bench_featcal.results.notes import Note
from fusion_bench_featcal.run.log import AsMerged
from fusion_bench_featcal.run.result import CalibrationResult
from fusion_bench_featcal.settings import FeatCalSettings


class CardHead(NamedTuple):
    """Beginning of a model card: keys that name the library, and tags."""

    library: Mapping[str, str]
    tags: Sequence[str]


@dataclass(frozen=True)
class CalibratedModel:
    """The calibrated model.

    Attributes:
        result: The calibration's log and reads.
        load: Returns the model on the device.
        write: Writes the model and all that belongs to it, but no card. Receives an empty folder,
            and task -> its expert's head, if experts have heads of their own.
    """

    result: CalibrationResult
    load: Callable[[], nn.Module]
    write: Callable[[Path, Mapping[str, nn.Module]], CardHead]


class Models(NamedTuple):
    """Merged model, base and experts of one request, which fit each other.

    Attributes:
        title: Kind and class of the models.
        size: Bytes of the merged model.
        read: Bytes of all experts.
        load_merged: Returns the merged model on the device.
        load_expert: Returns a task's expert on the device.
        as_merged: Returns the modules that a calibration leaves as merged.
    """

    title: str
    size: int
    read: int
    load_merged: Callable[[], nn.Module]
    load_expert: Callable[[str], nn.Module]
    as_merged: Callable[[], AsMerged] = AsMerged


@dataclass(frozen=True)
class Opened:
    """The parts of one run.

    Attributes:
        models: The models.
        heads: The experts' heads, or None if all tasks share the merged model's.
        settings: Settings of the calibration, all of them set.
        run_calibration: Calibrates the merged model with these settings and each task's batches.
        tasks: Task -> its rows.
        notes: Notes on models and settings. Warnings are on experts that may not read the data as
            they did when they were tuned.
    """

    models: Models
    heads: ClassifierHeads | None
    settings: FeatCalSettings
    run_calibration: Callable[[Mapping[str, Any]], CalibratedModel]
    tasks: Mapping[str, Task]
    notes: Sequence[Note]


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
            f"--base is missing: name the model that the experts were tuned from{instead}"
        )
