"""One `featcal calibrate` after the check of its options.

`run_job` opens models and data, calibrates, evaluates and saves. Without samples it only merges.
"""

import os
import re
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from fusion_bench_featcal.errors import NotImproved
from fusion_bench_featcal.errors.signals import end_at_once
from fusion_bench_featcal.errors.words import using_vocabulary
from fusion_bench_featcal.files import prepare_directory
from fusion_bench_featcal.files.locks import locked_target
from fusion_bench_featcal.folders.digests import changed_inputs, digests_of, repeats, write_inputs
from fusion_bench_featcal.folders.evaluation import Evaluation
from fusion_bench_featcal.folders.input_models import InputModels
from fusion_bench_featcal.folders.opened import Opened
from fusion_bench_featcal.folders.opened_transformers import open_transformers
from fusion_bench_featcal.folders.options import WORDS
from fusion_bench_featcal.folders.pushing import push_to_hub
from fusion_bench_featcal.folders.read_request import check_folder
from fusion_bench_featcal.folders.request import SWUDI, Request
from fusion_bench_featcal.folders.saving import REPORT, damaged_files, is_complete, save_folder
from fusion_bench_featcal.folders.screen import (
    quiet,
    show_downloads,
    show_scores,
    show_start,
    silent,
)
from fusion_bench_featcal.models.hub import HubModel, fetch_all
from fusion_bench_featcal.results import measure
from fusion_bench_featcal.results.names import row_of_rule
from fusion_bench_featcal.results.notes import NOTE, WARNING, Note, notes_of
from fusion_bench_featcal.results.remarks import calibration_facts
from fusion_bench_featcal.results.run import Facts
from fusion_bench_featcal.run.checkpoint import CHECKPOINT_FILES
from fusion_bench_featcal.run.devices import check_device, isolated_torch_state
from fusion_bench_featcal.run.processes import Processes
from fusion_bench_featcal.run.result import CalibrationResult

_MERGED_ONLY = (
    "the model was merged but not calibrated. To repair it with FeatCal+, give unlabeled samples "
    "of each task, --data NAME=FILE"
)
_SAMPLES_ADD = {
    SWUDI: " (with 64 samples per task it gained 0 to 8 points on the bundled benchmark suites)"
}


@using_vocabulary(WORDS)
@isolated_torch_state()
def run_job(
    request: Request, hub: Mapping[str, HubModel], processes: Processes | None = None
) -> Path:
    """Calibrate models in folders, and return the folder of the calibrated model.

    Args:
        request: The request.
        hub: Models of the hub, by location.
        processes: The processes that share the calibration. The first one does everything else. By
            default there is one process.

    Raises:
        ValueError: If models or data do not fit, or an option cannot be used.
        CalibrationError: If the calibration cannot go on. Messages name the command's options.
    """
    processes = processes or Processes()
    if processes.size > 1:
        end_at_once()
        if request.device == "cuda" and torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if processes.rank > 0:
        with silent(), quiet():
            _calibrate_with_others(request, processes)
        return request.folder
    with quiet(), nullcontext() if request.plan else locked_target(request.folder, "--out"):
        if _ends_early(request, hub):
            processes.gather(False)
        else:
            _open_and_run(request, processes)
        if request.push and not request.plan:
            print(f"uploaded: {push_to_hub(request.folder, request.push)}")
    return request.folder


def _ends_early(request: Request, hub: Mapping[str, HubModel]) -> bool:
    """Return whether the model is saved already, or --plan only lists downloads, and print it.

    Raises:
        ValueError: If --out or --device cannot be used.
    """
    out, blocks = request.folder, request.blocks_folder
    if (request.resume or blocks.is_dir()) and is_complete(out, request.recipe):
        _check_complete(request)
        _remove_blocks(blocks)
        print(f"{out} is complete: this command saved it before")
        return True
    check_device(request.device, f"--device {request.device}")
    check_folder(request)
    return request.plan and show_downloads(hub)


def _open_and_run(request: Request, processes: Processes) -> None:
    """Open models and data, and unless there is only a plan, make and save the model."""
    try:
        fetch_all(request.models)
        processes.gather(request.calibrates and not request.plan)
        sharing = processes if request.calibrates else Processes()  # a merge is not shared
        evaluation = _open_inputs(InputModels(request), sharing)
        show_start(request, evaluation.opened, evaluation.report.notes, processes)
        if request.plan:
            return
        if request.calibrates:
            _calibrate_and_save(evaluation)
        else:
            _merge_and_save(evaluation)
    finally:
        if not (request.plan or request.has_blocks):
            _remove_blocks(request.blocks_folder)


def _check_complete(request: Request) -> None:
    """Refuse a saved model if its files, or those that it was made of, have changed."""
    out = request.folder
    if damaged := damaged_files(out):
        raise ValueError(
            f"{out} is not as this command saved it: {', '.join(damaged)} changed or is "
            f"missing. Restore it, or remove {out} to calibrate again"
        )
    if changed := changed_inputs(out / REPORT, digests_of(InputModels(request))):
        raise ValueError(
            f"{out} was saved by this command with other files: {', '.join(changed)} changed "
            "since. Name a new folder with --out"
        )


def _remove_blocks(folder: Path) -> None:
    """Remove the files of a run from its folder, and the folder if it has no others."""
    with suppress(OSError):
        for file in folder.iterdir():
            if re.fullmatch(CHECKPOINT_FILES, file.name):
                file.unlink()
        folder.rmdir()  # fails if it contains a lock, or a file of the user


def _calibrate_with_others(request: Request, processes: Processes) -> None:
    """Take part in the calibration, if the first process says that there is one.

    It first downloads the models, and it alone refuses inputs and folders.
    """
    if processes.gather(False)[0]:
        fetch_all(request.models)
        opened = open_models_and_data(InputModels(request))
        _calibrate_and_evaluate(Evaluation(request, opened, processes))


def _calibrate_and_evaluate(evaluation: Evaluation) -> tuple[CalibrationResult, Facts]:
    """Calibrate the merged model and score all models. Afterwards the first process is alone."""
    opened, processes = evaluation.opened, evaluation.processes
    settings, models = opened.settings, opened.models
    batches = {name: task.batches for name, task in opened.tasks.items()}
    with measure() as cost:
        result = models.calibrate(settings, batches, processes)
    row, merger = row_of_rule(settings.rule), evaluation.request.merger
    result.reads["budget"] = settings.expert_read_budget
    result.reads["upstream"] = merger and {"merger": merger.name, "experts": models.expert_bytes}
    counts = {record["task"]: record["samples"] for record in result.log.select("task")}
    samples = {task: {"samples": count, "split": "data"} for task, count in counts.items()}
    facts = calibration_facts(row, settings, result.log.records, samples)
    evaluation.add_references()
    costs = cost.as_dict() | processes.cost
    evaluation.add(row, partial(models.load_calibrated, result), facts, costs)
    processes.leave()
    return result, facts


def open_models_and_data(inputs: InputModels) -> Opened:
    """Open models and data with the library that the models' files are written for.

    Raises:
        ValueError: If they do not fit each other.
        CalibrationError: If they cannot be used.
    """
    name = inputs.encoder_class
    if not name:
        return open_transformers(inputs)
    # Imported here, because the library's import takes seconds.
    try:
        from fusion_bench_featcal.folders.opened_encoders import open_encoders
    except ImportError as error:
        raise ValueError(f"a {name} {error}") from error
    return open_encoders(inputs, name)


def _open_inputs(inputs: InputModels, processes: Processes) -> Evaluation:
    """Open models and data, and return a report of them without scores.

    Raises:
        ValueError: If models or data do not fit, --strict does not accept them, or finished blocks
            were calibrated with others.
        CalibrationError: If models or data cannot be used.
    """
    request, opened = inputs.request, open_models_and_data(inputs)
    tasks, digests = [*opened.tasks.values(), *opened.further.values()], digests_of(inputs)
    texts = [text for task in tasks for text in task.notes]
    notes = [*notes_of([*texts, *request.notes]), *repeats(inputs, digests), *opened.notes]
    notes.sort(key=lambda note: note.kind == WARNING)  # warnings last
    if request.strict and (warnings := [note.text for note in notes if note.kind == WARNING]):
        raise ValueError(f"--strict: {'; '.join(warnings)}. Correct it, or leave --strict out")
    if request.strict and not any(task.scorer for task in tasks):
        reasons = "; ".join(text for task in tasks for text in task.notes[1:])
        raise ValueError(
            f"--strict compares scores, but no task can be scored ({reasons}). Give test examples "
            "that can be scored with --eval NAME=PATH"
        )
    changed = changed_inputs(request.blocks_folder, digests)
    # Other test examples change no block.
    changed = [option for option in changed if not option.startswith("--eval ")]
    if request.has_blocks and changed and not request.plan:
        raise ValueError(
            f"{', '.join(changed)} changed since the blocks in {request.blocks_folder} were "
            "calibrated: restore these inputs, or remove that folder to start over"
        )
    return Evaluation(request, opened, processes, notes, digests)


def _calibrate_and_save(evaluation: Evaluation) -> None:
    """Calibrate the merged model, evaluate and save it, and print the scores.

    Raises:
        NotImproved: If --strict forbids to save.
    """
    request, opened, report = evaluation.request, evaluation.opened, evaluation.report
    first_notes, models = len(report.notes), opened.models
    prepare_directory(request.blocks_folder, "--out")
    write_inputs(request.blocks_folder, evaluation.digests)
    print(f"calibrating; finished blocks are kept in {request.blocks_folder}")
    result, facts = _calibrate_and_evaluate(evaluation)
    if is_saved := evaluation.conclude() or not request.strict:
        # A pooler that experts do not share belongs to each task's head.
        tail = models.heads.tail(next(iter(opened.tasks))) if models.heads else ()
        save_folder(result, replace(facts, as_merged=facts.as_merged.without(tail)), evaluation)
    _remove_blocks(request.blocks_folder)
    show_scores(report, first_notes, evaluation.scores)
    if not is_saved:
        raise NotImproved(
            "--strict: nothing was saved, because a task is worse or there are warnings. The "
            "merged model is unchanged. Without --strict, the calibrated model is saved to "
            f"{request.folder}"
        )


def _merge_and_save(evaluation: Evaluation) -> None:
    """Merge the experts without samples, evaluate and save the merged model, and print scores."""
    request, models, report = evaluation.request, evaluation.opened.models, evaluation.report
    first_notes = len(report.notes)
    prepare_directory(request.blocks_folder, "--out")
    write_inputs(request.blocks_folder, evaluation.digests)
    with measure() as cost:
        print(f"merging; finished blocks are kept in {request.blocks_folder}")
        result = models.merge()
    evaluation.add_experts()
    load = partial(models.load_calibrated, result)
    evaluation.add(evaluation.row, load, Facts(), cost.as_dict())
    report.note(Note(NOTE, _MERGED_ONLY + _SAMPLES_ADD.get(evaluation.row, "")))
    save_folder(result, Facts(), evaluation)
    _remove_blocks(request.blocks_folder)
    show_scores(report, first_notes, None)
