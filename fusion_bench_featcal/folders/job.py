"""One `featcal calibrate` after its checks: calibration, evaluation, and the saved folder."""

import shutil
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path

from fusion_bench_featcal.errors import CalibrationError, NotImproved
from fusion_bench_featcal.files import prepare_directory
from fusion_bench_featcal.files.locks import locked_target
from fusion_bench_featcal.folders.evaluation import Evaluation
from fusion_bench_featcal.folders.inputs import changed_inputs, digests_of, repeats, write_inputs
from fusion_bench_featcal.folders.kinds import class_of_encoders
from fusion_bench_featcal.folders.opened import Opened
from fusion_bench_featcal.folders.opened_transformers import OpenedTransformers
from fusion_bench_featcal.folders.options import INPUTS_FILE, in_words_of_the_command
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.folders.saving import REPORT, is_complete, save_folder
from fusion_bench_featcal.folders.screen import quiet, show_downloads, show_scores, show_start
from fusion_bench_featcal.folders.tasks import Task
from fusion_bench_featcal.models.hub import fetch_all
from fusion_bench_featcal.models.saving import CardFacts
from fusion_bench_featcal.results import measure
from fusion_bench_featcal.results.notes import NOTE, Note
from fusion_bench_featcal.results.remarks import calibration_facts
from fusion_bench_featcal.results.run import row_of_rule
from fusion_bench_featcal.run.devices import check_device
from fusion_bench_featcal.settings import FeatCalSettings


def run_request(request: Request) -> Path:
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
    if (request.resume or blocks.is_dir()) and is_complete(out, request.recipe):
        if changed := changed_inputs(out / REPORT, digests_of(request)):
            raise ValueError(
                f"{out} was saved by this command with other files: {', '.join(changed)} changed "
                "since. Name a new folder by --out"
            )
        shutil.rmtree(blocks, ignore_errors=True)
        print(f"{out} is complete: this command saved it before")
        return out
    check_device(request.device, f"--device {request.device}")
    request.check_folder()
    repeated = _accepted(request, repeats(request))
    try:
        if request.plan and show_downloads(request):
            return out
        fetch_all(request.models)
        opened = open_request(request)
        settings, tasks = opened.settings, opened.open_tasks()
        if request.strict and not any(task.tests for task in tasks.values()):
            reasons = "; ".join(note for task in tasks.values() for note in task.notes[1:])
            raise ValueError(
                f"--strict compares scores, and no task has any ({reasons}). Give rows that can be "
                "scored, by --eval NAME=PATH"
            )
        notes = [note for task in tasks.values() for note in task.notes]
        texts = [*opened.notes, *settings.extremes]
        notes += [*request.notes, *map(in_words_of_the_command, texts)]
        notes += [*repeated, *opened.doubts]
        show_start(opened, settings, tasks, notes)
        if not request.plan:
            digests = _checked_digests(request)
            doubts = _accepted(request, [*repeats(request, digests), *opened.doubts])
            evaluation = Evaluation(opened, tasks, notes, digests, doubts)
            has_saved = _calibrate_and_save(opened, settings, tasks, evaluation)
            titles = {task.title for task in tasks.values() if task.tests}
            title = titles.pop() if len(titles) == 1 else "score % (loss)"
            show_scores(evaluation.report, evaluation.report.notes[len(notes) :], title)
            if not has_saved:
                raise NotImproved(
                    "--strict: nothing was saved, as the verdict has a task that is worse or a "
                    "doubt, and the merged model is as it was. Without --strict the calibrated "
                    f"model goes to {out}"
                )
        return out
    finally:
        if not (request.plan or request.has_blocks):
            (blocks / INPUTS_FILE).unlink(missing_ok=True)
            with suppress(OSError):
                blocks.rmdir()  # fails, and keeps the folder, if it contains a lock


def _accepted(request: Request, doubts: list[str]) -> list[str]:
    """Return reasons for doubt, which --strict refuses."""
    if request.strict and doubts:
        raise ValueError(f"--strict: {'; '.join(doubts)}. Correct it, or leave --strict out")
    return doubts


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


def open_request(request: Request) -> Opened:
    """Open the models of a request, by sentence-transformers if they are its own.

    Raises:
        ValueError: If that library is missing, or as `Opened`.
    """
    if name := class_of_encoders(request):
        # Imported here, because the library's import takes seconds.
        try:
            from fusion_bench_featcal.folders.opened_encoders import OpenedEncoders
        except ImportError as error:
            raise ValueError(f"a {name} {error}") from error
        return OpenedEncoders(request, name)
    return OpenedTransformers(request)


def _calibrate_and_save(
    opened: Opened, settings: FeatCalSettings, tasks: Mapping[str, Task], evaluation: Evaluation
) -> bool:
    """Calibrate, evaluate, and save. Returns False if --strict forbids it."""
    request = opened.request
    prepare_directory(request.checkpoints, "--out")
    write_inputs(request.checkpoints, evaluation.digests)
    with measure() as cost:
        print(f"calibrating; finished blocks are kept in {request.checkpoints}")
        result, weights, notes = opened.calibrate(tasks)
    row, merger = row_of_rule(settings.rule), request.merger[0]
    result.reads["budget"] = settings.expert_read_budget
    result.reads["upstream"] = merger and {"merger": merger, "experts": opened.read}
    counts = {record["task"]: record["samples"] for record in result.log.of_kind("task")}
    samples = {task: {"samples": count, "split": "data"} for task, count in counts.items()}
    facts = calibration_facts(row, settings, result.log.records, samples)
    evaluation.add_references(opened.merged_weights)
    evaluation.add(row, weights, facts, cost.as_dict())
    evaluation.report.note(*(Note(NOTE, text) for text in notes))
    verdict = evaluation.conclude(settings)
    if has_saved := verdict.is_good or not request.strict:
        origin = {"merged model": request.merged or request.merge}
        card = CardFacts(row, origin, facts.settings, counts)
        save_folder(opened, result, weights, card, evaluation)
    shutil.rmtree(request.checkpoints, ignore_errors=True)
    return has_saved
