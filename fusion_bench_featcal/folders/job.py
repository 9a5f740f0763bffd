"""One `featcal calibrate` after its checks: evaluation, calibration, and the saved folder."""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fusion_bench_featcal.calibration import calibrate
from fusion_bench_featcal.data.text_samples import TextEncoder, tokens_allowed
from fusion_bench_featcal.errors import CalibrationError, NotImproved
from fusion_bench_featcal.errors.block import first_line
from fusion_bench_featcal.experts.budget import budget_left
from fusion_bench_featcal.experts.safetensors_files import SafetensorsExpert
from fusion_bench_featcal.experts.source import total_bytes
from fusion_bench_featcal.folders.evaluation import Evaluation
from fusion_bench_featcal.folders.images import ZeroShot, open_image_task
from fusion_bench_featcal.folders.model_folder import (
    LANGUAGE_MODELS,
    TEXT_CLASSIFIER,
    ModelFolder,
    class_names,
)
from fusion_bench_featcal.folders.models import Models
from fusion_bench_featcal.folders.options import in_words_of_the_command
from fusion_bench_featcal.folders.request import MAX_LENGTH, Request
from fusion_bench_featcal.folders.saving import is_saved, save
from fusion_bench_featcal.folders.screen import quiet, show_downloads, show_scores, show_start
from fusion_bench_featcal.folders.tasks import Task
from fusion_bench_featcal.folders.texts import open_classifier_task, open_language_task
from fusion_bench_featcal.models.hub import fetch_all
from fusion_bench_featcal.models.saving import CardFacts
from fusion_bench_featcal.results import measure
from fusion_bench_featcal.run.problem import CalibrationResult
from fusion_bench_featcal.settings import FeatCalSettings


@dataclass(frozen=True)
class Job:
    """Models, settings and data of one calibration, after all checks have passed.

    Attributes:
        models: The models.
        settings: The request's settings, adapted to the kind of models.
        processor: Tokenizer or image processor.
        tasks: Task -> its data.
        notes: Sentences on models and data.
    """

    models: Models
    settings: FeatCalSettings
    processor: Any
    tasks: Mapping[str, Task]
    notes: Sequence[str]

    @classmethod
    def of(cls, models: Models) -> "Job":
        """Open and read the data of every task."""
        request, processor = models.request, models.processor()
        length = None
        if models.home.kind in (*LANGUAGE_MODELS, TEXT_CLASSIFIER):
            length = request.settings.max_length
            if length == MAX_LENGTH:
                length = min(MAX_LENGTH, tokens_allowed(processor))
        settings = request.settings.replace(max_length=length)
        tasks = open_tasks(models, processor, length)
        notes = [note for task in tasks.values() for note in task.notes]
        notes += [*request.notes, *map(in_words_of_the_command, models.notes)]
        return cls(models, settings, processor, tasks, notes)

    @property
    def merge_bytes(self) -> int:
        """Bytes of the experts that `--merge` reads, 0 without it."""
        if self.models.request.merge is None:
            return 0
        return sum(map(total_bytes, self.models.sources.values()))

    @property
    def budget_left(self) -> float | str | None:
        """The read budget without the bytes that `--merge` reads. Raises if nothing is left."""
        budget, request = self.settings.expert_read_budget, self.models.request
        if budget is None or request.merge is None:
            return budget
        return budget_left(budget, self.merge_bytes, f"--merge {request.merge}")

    def calibrate(self) -> CalibrationResult:
        """Calibrate the shared part of the models, block by block, into the folder of blocks."""
        models, merger = self.models, self.models.request.merger[0]
        result = calibrate(
            models.empty_body,
            models.base_source,
            models.sources,
            {name: task.batches for name, task in self.tasks.items()},
            self.settings.replace(expert_read_budget=self.budget_left),
            device=models.request.device,
            merged_weights=models.merged_source,
        )
        result.reads["budget"] = self.settings.expert_read_budget
        result.reads["upstream"] = merger and {"merger": merger, "experts": self.merge_bytes}
        return result


def run(request: Request) -> Path:
    """Calibrate models in folders, and return the folder of the calibrated model.

    Raises:
        ValueError: If models or data do not fit, or an option cannot be used.
        CalibrationError: If the calibration cannot go on. Messages name the command's options.
    """
    try:
        with quiet():
            return _run(request)
    except NotImproved:
        raise
    except CalibrationError as error:
        raise CalibrationError(in_words_of_the_command(error)) from error
    except ValueError as error:
        raise ValueError(in_words_of_the_command(error)) from error


def _run(request: Request) -> Path:
    out, blocks = request.folder, request.checkpoints
    if (request.resume or blocks.is_dir()) and is_saved(out, request.recipe):
        shutil.rmtree(blocks, ignore_errors=True)
        print(f"{out} is complete: this command saved it before")
        return out
    request.check_folder()
    _check_device(request.device)
    try:
        if request.plan and show_downloads(request):
            return out
        fetch_all(request.models)
        models = Models.of(request)
        _check_image_options(request, models)
        job = Job.of(models)
        _ = job.budget_left  # raises if it cannot be kept
        show_start(models, job.settings, job.tasks, job.notes)
        return out if request.plan else _evaluate_and_save(job)
    finally:
        with suppress(OSError):
            blocks.rmdir()  # fails, and keeps the folder, if it contains blocks


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # a build without CUDA asserts
        raise ValueError(f"--device {device} cannot be used: {first_line(error)}") from error


def _check_image_options(request: Request, models: Models) -> None:
    for option, value in {"--text-tower": request.text_tower, "--prompt": request.prompt}.items():
        if value and models.home.kind in (*LANGUAGE_MODELS, TEXT_CLASSIFIER):
            raise ValueError(f"{option} is for CLIP, these models read texts. Leave it out")


def _evaluate_and_save(job: Job) -> Path:
    """Evaluate, calibrate, evaluate again, and save."""
    models, request = job.models, job.models.request
    evaluation = Evaluation(models, job.settings, job.tasks, job.notes)
    evaluation.add_references(models.merged_source)
    with measure() as cost:
        print(f"calibrating; finished blocks are kept in {request.checkpoints}")
        result = job.calibrate()
    assert result.folder is not None
    evaluation.add(evaluation.row, SafetensorsExpert(result.folder))
    verdict = evaluation.conclude(result, cost.as_dict())
    if verdict.is_good or not request.strict:
        _save(job, result, evaluation)
    shutil.rmtree(request.checkpoints, ignore_errors=True)
    show_scores(evaluation.report, evaluation.new_notes)
    if request.strict and not verdict.is_good:
        raise NotImproved(
            "--strict: nothing was saved, and the merged model is as it was. Without --strict "
            f"the calibrated model goes to {request.folder}"
        )
    return request.folder


def _save(job: Job, result: CalibrationResult, evaluation: Evaluation) -> None:
    request = job.models.request
    merger: dict[str, Any] = {"merged model": request.merged}
    if request.merge is not None:
        merger = dict(zip(("method", "scaling_factor"), request.merger, strict=True))
    counts = {name: task.samples for name, task in job.tasks.items()}
    settings = job.settings.of_the_model().as_dict()
    facts = CardFacts(evaluation.row, merger, settings, counts)
    report, heads = evaluation.report, evaluation.heads
    save(job.models, result, job.processor, facts, report, heads)


def open_tasks(models: Models, processor: Any, max_length: int | None) -> dict[str, Task]:
    """Open every task's data, for the kind of models."""
    request, kind = models.request, models.home.kind
    if kind in LANGUAGE_MODELS:
        encoder = TextEncoder(processor, kind, max_length)  # type: ignore[arg-type]
        return {
            task: open_language_task(task, request, encoder, partial(models.load_expert, task))
            for task in request.expert
        }
    heads: dict[str, Any] = {}
    if kind == "clip":
        heads = dict.fromkeys(request.expert, _zero_shot(models))
    elif not request.no_eval:
        heads = {
            task: class_names(models.base if expert.is_adapter and models.base else expert)
            for task, expert in models.experts.items()
        }
    if kind == TEXT_CLASSIFIER:
        encoder = TextEncoder(processor, "classification", max_length)
        configs = [model.config for model in (models.home, *models.experts.values())]
        pads = all(config.get("pad_token_id") is not None for config in configs if config)
        return {
            task: open_classifier_task(task, request, encoder, heads.get(task, ()), pads=pads)
            for task in request.expert
        }
    return {t: open_image_task(t, request, processor, heads.get(t)) for t in request.expert}


def _zero_shot(models: Models) -> ZeroShot | None:
    """Return zero-shot heads of a whole CLIP, or None if there is no such model."""
    request = models.request
    if request.no_eval:
        return None
    if request.text_tower is not None:
        return ZeroShot(ModelFolder("text tower", request.text_tower, "--text-tower"))
    for model in (models.merged, models.base):
        if model is not None and model.architecture.__name__ == "CLIPModel":
            return ZeroShot(model)
    return None
