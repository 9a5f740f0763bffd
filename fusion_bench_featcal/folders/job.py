"""One `featcal calibrate` after its checks: evaluation, calibration, and the saved folder."""

import shutil
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from fusion_bench_featcal.calibration import calibrate
from fusion_bench_featcal.data.text_samples import TextEncoder, tokens_allowed
from fusion_bench_featcal.errors import CalibrationError, NotImproved
from fusion_bench_featcal.experts.source import total_bytes
from fusion_bench_featcal.files import prepare_directory
from fusion_bench_featcal.files.locks import locked_target
from fusion_bench_featcal.folders.encoders import NameHeads
from fusion_bench_featcal.folders.evaluation import Evaluation
from fusion_bench_featcal.folders.images import ZeroShot, open_image_task
from fusion_bench_featcal.folders.inputs import changed_inputs, digests_of, write_inputs
from fusion_bench_featcal.folders.model_folder import (
    ENCODER,
    IMAGE_ENCODER,
    LANGUAGE_MODELS,
    TEXT_CLASSIFIER,
    TEXT_MODELS,
    ModelFolder,
    class_names,
)
from fusion_bench_featcal.folders.models import Models
from fusion_bench_featcal.folders.options import INPUTS, in_words_of_the_command
from fusion_bench_featcal.folders.request import MAX_LENGTH, Request
from fusion_bench_featcal.folders.saving import REPORT, is_saved, save
from fusion_bench_featcal.folders.screen import quiet, show_downloads, show_scores, show_start
from fusion_bench_featcal.folders.tasks import Task
from fusion_bench_featcal.folders.texts import open_class_task, open_language_task
from fusion_bench_featcal.models.hub import fetch_all
from fusion_bench_featcal.models.saving import CardFacts
from fusion_bench_featcal.results import measure
from fusion_bench_featcal.results.remarks import calibration_facts
from fusion_bench_featcal.results.run import row_of_rule
from fusion_bench_featcal.run.devices import check_device
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.settings.rules import completed


def run(request: Request) -> Path:
    """Calibrate models in folders, and return the folder of the calibrated model.

    Raises:
        ValueError: If models or data do not fit, or an option cannot be used.
        CalibrationError: If the calibration cannot go on. Messages name the command's options.
    """
    try:
        with quiet(), nullcontext() if request.plan else locked_target(request.folder, "--out"):
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
        if changed := changed_inputs(out / REPORT, digests_of(request)):
            raise ValueError(
                f"{out} was saved by this command with other files: {', '.join(changed)} changed "
                "since. Name a new folder by --out"
            )
        shutil.rmtree(blocks, ignore_errors=True)
        print(f"{out} is complete: this command saved it before")
        return out
    request.check_folder()
    check_device(request.device, f"--device {request.device}")
    try:
        if request.plan and show_downloads(request):
            return out
        fetch_all(request.models)
        models = Models.of(request)
        processor = models.processor()
        settings = _settings(models, processor)
        tasks = open_tasks(models, processor, settings.max_length)
        notes = [note for task in tasks.values() for note in task.notes]
        notes += [*request.notes, *map(in_words_of_the_command, models.notes)]
        show_start(models, settings, tasks, notes)
        if not request.plan:
            digests = _checked_digests(request)
            evaluation = Evaluation(models, tasks, notes, digests)
            has_saved = _evaluate_and_save(models, settings, processor, tasks, evaluation)
            show_scores(evaluation.report, evaluation.report.notes[len(notes) :])
            if not has_saved:
                raise NotImproved(
                    "--strict: nothing was saved, and the merged model is as it was. Without "
                    f"--strict the calibrated model goes to {out}"
                )
        return out
    finally:
        if not (request.plan or request.has_blocks):
            (blocks / INPUTS).unlink(missing_ok=True)
            with suppress(OSError):
                blocks.rmdir()  # fails, and keeps the folder, if it contains a lock


def _checked_digests(request: Request) -> dict[str, str]:
    """Return the digests of models and data, which must be those of blocks to resume from."""
    digests = digests_of(request)
    # Other rows to evaluate on change no block.
    changed = [
        option
        for option in changed_inputs(request.checkpoints, digests)
        if not option.startswith("--eval ")
    ]
    if request.has_blocks and changed:
        raise ValueError(
            f"{', '.join(changed)} changed since the blocks in {request.checkpoints} were "
            "calibrated: restore what they were made of, or remove that folder to begin again"
        )
    return digests


def _settings(models: Models, processor: Any) -> FeatCalSettings:
    """Return the request's settings with the longest text of the models, None for images."""
    request, length = models.request, models.request.settings.max_length
    kind = models.like.kind
    if kind not in TEXT_MODELS:
        length = None
    elif request.text_tower or (request.prompt and kind != ENCODER):
        raise ValueError(
            f"--text-tower is for CLIP, --prompt for CLIP and encoders, and these are {kind} models"
        )
    elif length == MAX_LENGTH:
        of_sentences = models.pooling.max_length if kind == ENCODER else None
        length = min(filter(None, [MAX_LENGTH, tokens_allowed(processor), of_sentences]))
    return completed(request.settings.replace(max_length=length))


def _evaluate_and_save(
    models: Models,
    settings: FeatCalSettings,
    processor: Any,
    tasks: Mapping[str, Task],
    evaluation: Evaluation,
) -> bool:
    """Evaluate, calibrate, evaluate again, and save. Returns False if --strict forbids it."""
    request = models.request
    evaluation.add_references(models.merged_source)
    prepare_directory(request.checkpoints, "--out")
    write_inputs(request.checkpoints, evaluation.digests)
    with measure() as cost:
        print(f"calibrating; finished blocks are kept in {request.checkpoints}")
        result = calibrate(
            models.empty_body,
            models.base_source,
            models.sources,
            {name: task.batches for name, task in tasks.items()},
            settings,
            device=request.device,
            merged_weights=models.merged_source,
        )
    assert result.weights is not None
    row, merger = row_of_rule(settings.rule), request.merger[0]
    read = sum(map(total_bytes, models.sources.values()))
    result.reads["budget"] = settings.expert_read_budget
    result.reads["upstream"] = merger and {"merger": merger, "experts": read}
    counts = {record["task"]: record["samples"] for record in result.log.of_kind("task")}
    samples = {task: {"samples": count, "split": "data"} for task, count in counts.items()}
    facts = calibration_facts(row, settings, result.log.records, samples)
    evaluation.add(row, result.weights, facts, cost.as_dict())
    verdict = evaluation.conclude(settings)
    if has_saved := verdict.is_good or not request.strict:
        origin = {"merged model": request.merged or request.merge}
        card = CardFacts(row, origin, facts.settings, counts)
        save(models, result, processor, card, evaluation)
    shutil.rmtree(request.checkpoints, ignore_errors=True)
    return has_saved


def open_tasks(models: Models, processor: Any, max_length: int | None) -> dict[str, Task]:
    """Open every task's data, for the kind of models."""
    request, kind = models.request, models.like.kind
    if kind in LANGUAGE_MODELS:
        encoder = TextEncoder(processor, kind, max_length)  # type: ignore[arg-type]
        return {
            task: open_language_task(task, request, encoder, partial(models.load_expert, task))
            for task in request.expert
        }
    if kind not in TEXT_MODELS:
        heads = {} if request.no_eval else _image_heads(models)
        return {t: open_image_task(t, request, processor, heads.get(t)) for t in request.expert}
    encoder, pads = TextEncoder(processor, "classification", max_length), True
    heads = {} if request.no_eval else _text_heads(models, encoder)
    if kind == TEXT_CLASSIFIER:
        configs = [model.config for model in (models.like, *models.experts.values())]
        pads = all(config.get("pad_token_id") is not None for config in configs if config)
    return {
        task: open_class_task(task, request, encoder, heads.get(task, ()), pads=pads)
        for task in request.expert
    }


def _text_heads(models: Models, encoder: TextEncoder) -> dict[str, Any]:
    """Return each task's class names, or heads that embed the names of labels."""
    if models.like.kind == TEXT_CLASSIFIER:
        return _class_names(models)
    load = partial(models.load, models.base_source or models.merged_source)
    return dict.fromkeys(models.experts, NameHeads(load, models.pooling, encoder))


def _image_heads(models: Models) -> dict[str, Any]:
    """Return each task's class names, or zero-shot heads."""
    if models.like.kind == IMAGE_ENCODER:
        raise ValueError(f"{models.like.label} has no head to be scored with: give --no-eval")
    is_clip = models.like.kind == "clip"
    return dict.fromkeys(models.experts, _zero_shot(models)) if is_clip else _class_names(models)


def _class_names(models: Models) -> dict[str, Any]:
    return {
        task: class_names(models.base if expert.is_adapter and models.base else expert)
        for task, expert in models.experts.items()
    }


def _zero_shot(models: Models) -> ZeroShot | None:
    """Return zero-shot heads of a whole CLIP, or None if there is no such model."""
    request = models.request
    if request.text_tower is not None:
        return ZeroShot(ModelFolder("text tower", request.text_tower, "--text-tower"))
    for model in (models.merged, models.base):
        if model is not None and model.architecture.__name__ == "CLIPModel":
            return ZeroShot(model)
    return None
