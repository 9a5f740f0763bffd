"""One `featcal calibrate` after its checks: calibration, evaluation, and the saved folder."""

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from fusion_bench_featcal.errors import NotImproved
from fusion_bench_featcal.errors.words import using_vocabulary
from fusion_bench_featcal.files import prepare_directory
from fusion_bench_featcal.files.locks import locked_target
from fusion_bench_featcal.folders.digests import changed_inputs, digests_of, repeats, write_inputs
from fusion_bench_featcal.folders.evaluation import Evaluation
from fusion_bench_featcal.folders.input_models import InputModels
from fusion_bench_featcal.folders.opened import Opened
from fusion_bench_featcal.folders.opened_transformers import open_transformers
from fusion_bench_featcal.folders.options import WORDS
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.folders.saving import REPORT, damaged_files, is_complete, save_folder
from fusion_bench_featcal.folders.screen import quiet, show_downloads, show_scores, show_start
from fusion_bench_featcal.models.hub import fetch_all
from fusion_bench_featcal.results import measure
from fusion_bench_featcal.results.names import row_of_rule
from fusion_bench_featcal.results.notes import WARNING, Note, notes_of
from fusion_bench_featcal.results.remarks import calibration_facts
from fusion_bench_featcal.run.checkpoint import WRITTEN
from fusion_bench_featcal.run.devices import check_device, usual_torch


@using_vocabulary(WORDS)
@usual_torch()
def run_request(request: Request) -> Path:
    """Calibrate models in folders, and return the folder of the calibrated model.

    Raises:
        ValueError: If models or data do not fit, or an option cannot be used.
        CalibrationError: If the calibration cannot go on. Messages name the command's options.
    """
    with quiet(), nullcontext() if request.plan else locked_target(request.folder, "--out"):
        return _run(request)


def _run(request: Request) -> Path:
    out, blocks = request.folder, request.checkpoints
    if (request.resume or blocks.is_dir()) and is_complete(out, request.recipe):
        if damaged := damaged_files(out):
            raise ValueError(
                f"{out} is not as this command saved it: {', '.join(damaged)} changed or is "
                f"missing. Restore it, or remove {out} to calibrate again"
            )
        if changed := changed_inputs(out / REPORT, digests_of(InputModels(request))):
            raise ValueError(
                f"{out} was saved by this command with other files: {', '.join(changed)} changed "
                "since. Name a new folder by --out"
            )
        _remove_blocks(blocks)
        print(f"{out} is complete: this command saved it before")
        return out
    check_device(request.device, f"--device {request.device}")
    request.check_folder()
    try:
        if request.plan and show_downloads(request):
            return out
        fetch_all(request.models)
        inputs = InputModels(request)
        opened, digests = open_request(inputs), digests_of(inputs)
        texts = [text for task in opened.tasks.values() for text in task.notes]
        notes = [*notes_of([*texts, *request.notes]), *repeats(inputs, digests), *opened.notes]
        notes.sort(key=lambda note: note.kind == WARNING)  # warnings last
        _refuse(request, opened, digests, notes)
        show_start(request, opened, notes)
        if not request.plan:
            _calibrate(Evaluation(request, opened, notes, digests))
        return out
    finally:
        if not (request.plan or request.has_blocks):
            _remove_blocks(blocks)


def _remove_blocks(folder: Path) -> None:
    """Remove the files of a run from its folder, and the folder if it has no others."""
    with suppress(OSError):
        for file in folder.iterdir():
            if re.fullmatch(WRITTEN, file.name):
                file.unlink()
        folder.rmdir()  # fails if it contains a lock, or a file of the user


def open_request(inputs: InputModels) -> Opened:
    """Open models and rows, by sentence-transformers if the models are its own.

    Raises:
        ValueError: If that library is missing, or models or rows do not fit.
        CalibrationError: If they cannot be used.
    """
    if name := inputs.class_of_encoders:
        # Imported here, because the library's import takes seconds.
        try:
            from fusion_bench_featcal.folders.opened_encoders import open_encoders
        except ImportError as error:
            raise ValueError(f"a {name} {error}") from error
        return open_encoders(inputs)
    return open_transformers(inputs)


def _refuse(
    request: Request, opened: Opened, digests: Mapping[str, str], notes: Sequence[Note]
) -> None:
    """Refuse what --strict does not accept, and blocks of other models and data."""
    if request.strict and (warnings := [note.text for note in notes if note.kind == WARNING]):
        raise ValueError(f"--strict: {'; '.join(warnings)}. Correct it, or leave --strict out")
    if request.strict and not any(task.tests for task in opened.tasks.values()):
        reasons = "; ".join(text for task in opened.tasks.values() for text in task.notes[1:])
        raise ValueError(
            f"--strict compares scores, and no task has any ({reasons}). Give rows that can be "
            "scored, by --eval NAME=PATH"
        )
    changed = changed_inputs(request.checkpoints, digests)
    # Other rows to evaluate on change no block.
    changed = [option for option in changed if not option.startswith("--eval ")]
    if request.has_blocks and changed and not request.plan:
        raise ValueError(
            f"{', '.join(changed)} changed since the blocks in {request.checkpoints} were "
            "calibrated: restore what they were made of, or remove that folder to begin again"
        )


def _calibrate(evaluation: Evaluation) -> None:
    """Calibrate, evaluate, save and show.

    Raises:
        NotImproved: If --strict forbids to save.
    """
    request, opened, report = evaluation.request, evaluation.opened, evaluation.report
    first_notes, settings = len(report.notes), opened.settings
    prepare_directory(request.checkpoints, "--out")
    write_inputs(request.checkpoints, evaluation.digests)
    with measure() as cost:
        print(f"calibrating; finished blocks are kept in {request.checkpoints}")
        calibrated = opened.run_calibration({n: t.batches for n, t in opened.tasks.items()})
    result, row, merger = calibrated.result, row_of_rule(settings.rule), request.merger[0]
    result.reads["budget"] = settings.expert_read_budget
    result.reads["upstream"] = merger and {"merger": merger, "experts": opened.models.read}
    counts = {record["task"]: record["samples"] for record in result.log.select("task")}
    samples = {task: {"samples": count, "split": "data"} for task, count in counts.items()}
    facts = calibration_facts(row, settings, result.log.records, samples)
    evaluation.add_references()
    evaluation.add(row, calibrated.load, facts, cost.as_dict())
    verdict = evaluation.conclude()
    if is_saved := verdict.is_good or not request.strict:
        # A pooler that experts do not share belongs to each task's head.
        tail = opened.heads.tail(next(iter(opened.tasks))) if opened.heads else ()
        card_facts = replace(facts, as_merged=facts.as_merged.without(tail))
        save_folder(calibrated, card_facts, evaluation)
    _remove_blocks(request.checkpoints)
    show_scores(report, report.notes[first_notes:], evaluation.title)
    if not is_saved:
        raise NotImproved(
            "--strict: nothing was saved, as the verdict has a task that is worse or a doubt, and "
            "the merged model is as it was. Without --strict the calibrated model goes to "
            f"{request.folder}"
        )
