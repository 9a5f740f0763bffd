"""Output of `featcal calibrate`: inputs, bytes to read and write, and the models' scores."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from logging import CRITICAL, ERROR, INFO, StreamHandler, getLogger
from pathlib import Path

import datasets

from fusion_bench_featcal.data.batch_sizes import batch_size_of
from fusion_bench_featcal.data.text_batches import TextBatches
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.masking import masked
from fusion_bench_featcal.errors.plurals import bytes_text, pluralize
from fusion_bench_featcal.folders.opened import Opened
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.folders.tasks import Task
from fusion_bench_featcal.models.fits import fit_lines
from fusion_bench_featcal.models.hub import HubModel, fetch_all
from fusion_bench_featcal.models.plan import Plan, check_room, read_within, show_plan
from fusion_bench_featcal.models.saving import written_bytes
from fusion_bench_featcal.models.shapes import shapes_of
from fusion_bench_featcal.results import Run, frame_of, join
from fusion_bench_featcal.results.names import row_of_rule
from fusion_bench_featcal.results.notes import NOTE, WARNING, Note
from fusion_bench_featcal.results.repair_scores import RepairScores
from fusion_bench_featcal.results.show import tables_of
from fusion_bench_featcal.results.tables import print_lines
from fusion_bench_featcal.run.processes import Processes
from fusion_bench_featcal.streams.samples import number_of_copies


def show_start(
    request: Request, opened: Opened, notes: Sequence[Note], processes: Processes
) -> None:
    """Print the inputs of the run, the number of processes, its reads and its files.

    Raises:
        CalibrationError: If the disk is too small.
    """
    models, settings = opened.models, opened.settings
    print(f"{models.title}, {pluralize(len(request.expert), 'task')}")
    for note in notes:
        print(f"  {masked(note.text)}")
    if processes.size > 1 and request.calibrates:
        is_divided = processes.divides_batches(request.tasks)
        each = "batches of all tasks" if is_divided else "all samples of some tasks"
        print(f"processes: {processes.size} on {request.device}, each with {each}")
    read, size = read_within(models.expert_bytes, settings.expert_read_budget), models.merged_bytes
    row = row_of_rule(settings.rule)
    rows, strengths = {row: 1}, {row: settings.strengths}
    if not request.calibrates:
        rows, strengths = {str(request.merge): 1}, {}
    writes = {str(request.folder): written_bytes(size), str(request.blocks_folder): size}
    writes = {} if request.out is None else writes
    plan = Plan(read=read, output=size, writes=writes, rows=rows, strengths=strengths)
    if request.plan:
        if request.calibrates:
            plan = replace(plan, as_merged=models.left_as_merged(opened.tasks))
        show_plan(plan)
        print_lines(_fit_lines(request, opened) if request.calibrates else ())
        unknown = ": only a run shows whether every block can be calibrated by itself"
        print(f"nothing was run{unknown * request.calibrates}")
        return
    print(f"plan: {bytes_text(read or 0)} read from experts, at most")
    check_room(plan.writes)


def _fit_lines(request: Request, opened: Opened) -> list[str]:
    """Return memory and time of the calibration, or why they are not estimated."""
    settings, tasks = opened.settings, len(opened.tasks)
    sizes = [_samples_and_tokens(task, settings.augment) for task in opened.tasks.values()]
    samples, tokens = map(sum, zip(*sizes, strict=True))
    tokens, folders = max(tokens // samples, 1), fetch_all(request.model_options)
    try:
        shapes = shapes_of(folders.get("MERGED") or folders["--base"], tokens=tokens)
    except CalibrationError as error:
        return [f"memory and time: not estimated ({error})"]
    batch = batch_size_of(settings.batch_size, request.device, tokens)
    plus, samples = settings.rule == "plus", samples // tasks
    return fit_lines(shapes.estimate(tasks=tasks, samples=samples, plus=plus, batch=batch))


def _samples_and_tokens(task: Task, augment: str | None) -> tuple[int, int]:
    """Return the number of a task's samples with augmented ones, and their tokens when padded."""
    batches, count = task.batches, task.samples
    if isinstance(batches, list):  # sentences, of about four characters per token
        return count, sum(len(str(text)) for text in batches) // 4
    if not isinstance(batches, TextBatches):
        return count * (1 + number_of_copies(count, augment or "none", next(iter(batches)))), 0
    lengths, size = batches.lengths(), min(batches.batch_size, count)
    return count, size * sum(max(lengths[n : n + size]) for n in range(0, count, size))


def show_downloads(hub: Mapping[str, HubModel]) -> bool:
    """Print the files to fetch from the hub, and return whether there are any.

    Args:
        hub: Models of the hub, by location.
    """
    sizes = {location: model.missing for location, model in hub.items() if model.missing}
    for location, missing in sizes.items():
        files, size = pluralize(len(missing), "file"), bytes_text(sum(missing.values()))
        print(f"to fetch: {location}, {files}, {size}")
    if sizes:
        print("nothing was run")
    return bool(sizes)


def show_scores(report: Run, first_note: int, scores: RepairScores | None) -> None:
    """Print the advice, tables of all tasks, all warnings, and notes from the given one on.

    Args:
        report: The report.
        first_note: Index of the first note that is not printed yet.
        scores: The scores. None if the model was only merged. Then there is a table for each
            metric, with a line for each model.
    """
    if scores is not None:
        scores.show()
    else:
        results = join({Path(): report})
        for metric in results.metrics:
            for table in tables_of(frame_of(results, metric)):
                table.show()
    warnings = [note for note in report.notes if note.kind == WARNING]
    notes = [note for note in report.notes[first_note:] if note.kind == NOTE]
    print_lines(f"{note.kind}: {note.sentence}" for note in warnings + notes)


@contextmanager
def silent() -> Iterator[None]:
    """Context in which Python prints nothing."""
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
    ):
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Context that prints the progress of the calibration, but not that of loading.

    It restores levels and progress bars of all libraries.
    """
    from transformers.utils import logging

    package = "fusion_bench_featcal."
    # The sentences that these would log are notes of the report.
    levels = {
        "run.progress": INFO,
        "streams.samples": ERROR,
        "data.text_batches": ERROR,
        "experts.similarity": ERROR,
        "run.trust": ERROR,
        "run.log": ERROR,
        "sentence_transformers": ERROR,
    }
    with ExitStack() as before:
        for name, level in levels.items():
            logger = getLogger(package + name)
            before.callback(logger.setLevel, logger.level)
            logger.setLevel(level)
        progress, printed = getLogger(f"{package}run.progress"), StreamHandler(sys.stdout)
        before.callback(progress.removeHandler, printed)
        progress.addHandler(printed)
        # Errors of datasets are also raised.
        for library, level in ((logging, ERROR), (datasets.logging, CRITICAL)):
            before.callback(library.set_verbosity, library.get_verbosity())
            library.set_verbosity(level)
        if logging.is_progress_bar_enabled():
            before.callback(logging.enable_progress_bar)
            logging.disable_progress_bar()
        if not datasets.are_progress_bars_disabled():
            before.callback(datasets.enable_progress_bars)
            datasets.disable_progress_bars()
        yield
