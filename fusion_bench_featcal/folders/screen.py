"""The lines of `featcal calibrate`: what it will do, what that takes, and how the models score."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging import ERROR, NOTSET, getLogger

import datasets
import torch
from torch import nn

from fusion_bench_featcal.files import free_space
from fusion_bench_featcal.folders.model_folder import ModelFolder
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.folders.tasks import Task
from fusion_bench_featcal.hub_files import hub_models
from fusion_bench_featcal.plan import bytes_text, one_line, plan_of, show_plan, warnings_of
from fusion_bench_featcal.plan_shapes import Request as PlanRequest
from fusion_bench_featcal.plurals import counted
from fusion_bench_featcal.results import AVERAGE, FEATCAL, Report

MOST_TASKS = 8
"""Tasks that are listed on the screen. The report has all."""


def show_start(
    home: ModelFolder, body: nn.Module, request: Request, tasks: Mapping[str, Task], report: Report
) -> None:
    """Print what will be done, with what, and what it takes.

    Args:
        home: The folder whose class the calibrated model has.
        body: The part that is calibrated, without weights.
        request: The request.
        tasks: Task -> its data.
        report: The report, with the notes so far.
    """
    print(f"{home.kind}: {home.calibrated_class.__name__}, {counted(len(tasks), 'task')}")
    samples = {task.notes[0] for task in list(tasks.values())[MOST_TASKS:]}
    for note in report.notes:
        if note not in samples:
            print(f"  {note}")
    if samples:
        print(f"  {counted(len(samples), 'further task')}: all are in the report")
    if request.verbose:
        print(f"  settings: {request.settings.of_the_model().described()}")
    asked = PlanRequest(
        model=body,
        settings=request.settings,
        tasks=len(tasks),
        length=max(1, *(task.length for task in tasks.values())),
        samples=[task.samples for task in tasks.values()],
        device=torch.device(request.device),
    )
    try:
        plan = plan_of(asked)
    except Exception as error:  # a model of unknown inputs: the calibration itself will tell
        print(f"no plan of reads and memory: {error}")
        return
    if request.plan:
        show_plan(plan)
        free = bytes_text(free_space(request.folder.absolute().parent))
        print(f"nothing was run; {free} are free for --out {request.folder}")
        return
    print(one_line(plan))
    for warning in warnings_of(plan):
        warnings.warn(warning, stacklevel=2)


def show_downloads(request: Request) -> bool:
    """Print what would be fetched from the hub; return whether anything would.

    Raises:
        CalibrationError: If the hub does not tell.
    """
    lacking = [model for model in hub_models(request.models).values() if model.missing]
    for model in lacking:
        size = bytes_text(sum(model.missing.values()))
        print(f"to fetch: {model.location}, {counted(len(model.missing), 'file')}, {size}")
    if lacking:
        for task, location in request.data.items():
            print(f"  {task}: samples of {location}")
        print("nothing was run; memory is known when the models are here")
    return bool(lacking)


def show_scores(report: Report, *, verbose: bool) -> None:
    """Print accuracy and loss of every row by task, those first that changed least for the better.

    Args:
        report: The report.
        verbose: Whether to print the report's own tables.
    """
    if verbose:
        report.show(losses=True)
        return
    names, rows = list(report.rows), report.rows
    merged, calibrated = rows[str(report.upstream)], rows[FEATCAL]
    tasks = report.tasks
    if len(tasks) > MOST_TASKS:
        tasks = sorted(tasks, key=lambda task: calibrated[task] - merged[task])
    shown = [*tasks[:MOST_TASKS], *([AVERAGE] if len(tasks) > 1 else [])]
    lines = [["accuracy % (loss)", *names]]
    for task in shown:
        cells = [f"{100 * report.rows[n][task]:.1f} ({report.loss[n][task]:.3f})" for n in names]
        lines.append([task, *cells])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *cells in lines:
        aligned = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        print("  ".join([first.ljust(widths[0]), *aligned]))
    if len(tasks) > MOST_TASKS:
        print(f"{counted(len(tasks) - MOST_TASKS, 'further task')}: all are in the report")
    hidden = tuple(f"gain of {task} on " for task in tasks[MOST_TASKS:])
    for note in report.notes:
        if not note.startswith(hidden):
            print(f"note: {note}")


@contextmanager
def quiet() -> Iterator[None]:
    """Context without the reports and bars of loading, whose tensors have been checked before."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    # The plan names every task's samples, and a note the samples that are not trusted.
    repeated = [getLogger(f"fusion_bench_featcal.{name}") for name in ("streams.samples", "trust")]
    for logger in repeated:
        logger.setLevel(ERROR)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs is raised as well
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
        datasets.enable_progress_bars()
        datasets.logging.set_verbosity_warning()
        for logger in repeated:
            logger.setLevel(NOTSET)
