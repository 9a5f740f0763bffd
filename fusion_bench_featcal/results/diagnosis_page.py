"""Page, tables and long table of a diagnosis."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fusion_bench_featcal.files import LOG_DIR_SETTING, write_atomic

from .diagnosis import MEASURES, Diagnosis
from .findings import findings_grid, gains_of
from .long_table import AVERAGE, EXPERTS
from .report import csv_text
from .tables import (
    ABSENT,
    Grid,
    bullets,
    page,
    percent,
    short_blocks,
    short_names,
    with_unit,
)

PAGE_FILE, TABLE_FILE = "diagnosis.md", "diagnosis.csv"
_COLUMNS = ("suite", "merger", "row", "task", "class", "block", "metric", "value")
_POSITIONS = {
    "all": "all positions that count (every token of an image, all of a text but padding)",
    "read": "positions whose final features are read (an image's class token; where a text's "
    "target is predicted)",
}


def write_diagnosis(
    diagnosis: Diagnosis, directory: str | Path, setting: str = LOG_DIR_SETTING
) -> Path:
    """Write `diagnosis.csv`, `diagnosis.md` and, last, `diagnosis.json`; return the page's path."""
    folder = Path(directory)
    write_atomic(folder / TABLE_FILE, csv_text(_COLUMNS, long_lines(diagnosis)), setting)
    path = write_atomic(folder / PAGE_FILE, diagnosis_markdown(diagnosis), setting)
    diagnosis.write(folder, setting)
    return path


def long_lines(diagnosis: Diagnosis) -> Iterator[dict[str, Any]]:
    """Yield the lines of the long table: one value each."""

    def line(row: str, task: str, metric: str, value: Any, **more: Any) -> dict[str, Any]:
        known = {"suite": diagnosis.suite, "merger": diagnosis.upstream}
        return {**known, "row": row, "task": task, "metric": metric, "value": value, **more}

    for row in diagnosis.rows:
        for task, measures in diagnosis.drift[row].items():
            for metric in MEASURES:
                for block, value in zip(diagnosis.blocks, measures[metric], strict=True):
                    yield line(row, task, metric, value, block=block)
            yield line(row, task, "final_cosine", diagnosis.cosine(row, task))
            if task in diagnosis.task_vectors.get(row, {}):
                yield line(row, task, "task_vector_cosine", diagnosis.task_vectors[row][task])
            for name, values in diagnosis.classes[row][task].items():
                yield line(row, task, "items", values["items"], **{"class": name})
                yield line(row, task, "final_cosine", values["cosine"], **{"class": name})
                for block, value in zip(diagnosis.blocks, values["relative"], strict=True):
                    yield line(row, task, "relative", value, **{"class": name}, block=block)
    for row, values in diagnosis.accuracy.items():
        for task, value in values.items():
            yield line(row, task, "accuracy", value)


def diagnosis_markdown(diagnosis: Diagnosis) -> str:
    """The page: tables, and links to figures that `featcal plot` draws beside it."""
    merged = f", merged by {diagnosis.upstream}" if diagnosis.upstream else ""
    parts: list[Any] = [f"# Diagnosis of {diagnosis.suite}{merged}", conditions(diagnosis)]
    for title, make in SECTIONS.items():
        if content := make(diagnosis):
            parts += [f"## {title}", section_text(content)]
    parts += [["`featcal plot RUN` draws the figures from `diagnosis.json`"], diagnosis.notes]
    return page(*parts)


def section_text(content: Sequence[str | Grid]) -> str:
    """Markdown of a section: its sentences, then its tables."""
    sentences = [part for part in content if isinstance(part, str)]
    tables = [part.markdown() for part in content if isinstance(part, Grid)]
    return "\n\n".join([*([bullets(sentences)] if sentences else []), *tables])


def conditions(diagnosis: Diagnosis) -> list[str]:
    """Sentences on the items and features that were compared."""
    names = short_names(diagnosis.tasks)
    counts = ", ".join(f"{names[task]} {count}" for task, count in diagnosis.items.items())
    return [
        f"items of the {diagnosis.split} split (seed {diagnosis.seed}): {counts}",
        f"drift at blocks' outputs: {_POSITIONS[diagnosis.positions]}; mean over an item's "
        "positions, then over items",
        f"final features: {diagnosis.features}",
    ]


def help_sentences(diagnosis: Diagnosis) -> list[str]:
    """Say of each calibrated row where it helps most and least: block, task, class."""
    merged = diagnosis.merged
    if merged is None:
        return []
    names = short_names(diagnosis.tasks)
    sentences = []
    for row in diagnosis.repairs:
        before, after = (diagnosis.mean(name, "relative") for name in (merged, row))
        change = after / np.maximum(before, 1e-30) - 1
        best, worst = int(change.argmin()), int(change.argmax())
        blocks = short_blocks(diagnosis.blocks)
        gains = {
            task: diagnosis.cosine(row, task) - diagnosis.cosine(merged, task)
            for task in diagnosis.tasks
        }
        most, least = max(gains, key=gains.__getitem__), min(gains, key=gains.__getitem__)
        sentence = (
            f"{row}: relative drift changes most for the better at block {blocks[best]} "
            f"({100 * change[best]:+.0f} %), least at block {blocks[worst]} "
            f"({100 * change[worst]:+.0f} %); final features gain most on {names[most]} "
            f"({gains[most]:+.3f}), least on {names[least]} ({gains[least]:+.3f})"
        )
        by_class = class_gains(diagnosis, row)
        if by_class:
            (first, gain), (last, loss) = by_class[0], by_class[-1]
            sentence += (
                f"; of all classes most on {names[first[0]]}: {first[1]} ({gain:+.3f}), least on "
                f"{names[last[0]]}: {last[1]} ({loss:+.3f})"
            )
        sentences.append(sentence)
    return sentences


def class_gains(diagnosis: Diagnosis, row: str) -> list[tuple[tuple[str, str], float]]:
    """(Task, class) and gain in final cosine over the merged model, largest first."""
    before = diagnosis.classes[diagnosis.merged or ""]
    gains = {
        (task, name): values["cosine"] - before[task][name]["cosine"]
        for task, classes in diagnosis.classes[row].items()
        for name, values in classes.items()
    }
    return sorted(gains.items(), key=lambda entry: -entry[1])


def depth_grid(diagnosis: Diagnosis) -> Grid:
    """Relative drift, mean over tasks: blocks down, rows across."""
    columns = [diagnosis.mean(row, "relative") for row in diagnosis.rows]
    lines = [
        (block, [f"{column[place]:.3f}" for column in columns])
        for place, block in enumerate(short_blocks(diagnosis.blocks))
    ]
    return Grid("block: relative drift", diagnosis.rows, lines)


def split_grids(diagnosis: Diagnosis) -> list[Grid]:
    """Drift, mismatch and propagation of the merged and each calibrated row: blocks down."""
    heads = {
        "drift": "drift",
        "mismatch": "local mismatch",
        "propagation": "upstream propagation",
        "between": "their cosine",
        "share": "propagation's share",
    }
    grids = []
    for row in [*([diagnosis.merged] if diagnosis.merged else []), *diagnosis.repairs]:
        columns = {measure: diagnosis.mean(row, measure) for measure in heads}
        lines = [
            (block, [
                with_unit(values[place]) if measure == "share" else f"{values[place]:.2f}"
                for measure, values in columns.items()
            ])
            for place, block in enumerate(short_blocks(diagnosis.blocks))
        ]  # fmt: skip
        grids.append(Grid(f"block: {row}", list(heads.values()), lines))
    return grids


def change_grid(diagnosis: Diagnosis) -> Grid | None:
    """Change of relative drift from merged to the first calibrated row: tasks across."""
    if diagnosis.merged is None or not diagnosis.repairs:
        return None
    change = drift_change(diagnosis, diagnosis.repairs[0])
    lines = [
        (block, [f"{100 * values[place]:+.0f}" for values in change.values()])
        for place, block in enumerate(short_blocks(diagnosis.blocks))
    ]
    names = short_names(diagnosis.tasks)
    head = f"block: {diagnosis.repairs[0]}, %"
    return Grid(head, [names[task] for task in change], lines)


def drift_change(diagnosis: Diagnosis, row: str) -> dict[str, list[float]]:
    """Task -> relative change of the relative drift against the merged model, at each block."""
    before = diagnosis.drift[diagnosis.merged or ""]
    return {
        task: [
            after / max(value, 1e-30) - 1
            for after, value in zip(values["relative"], before[task]["relative"], strict=True)
        ]
        for task, values in diagnosis.drift[row].items()
    }


def task_grid(
    diagnosis: Diagnosis, corner: str, values: Mapping[str, Mapping[str, float]]
) -> Grid | None:
    """Numbers of rows by task, and their mean over tasks where all have one."""
    names = short_names(diagnosis.tasks)
    lines = []
    for row, by_task in values.items():
        known = [by_task[task] for task in names if task in by_task]
        cells = [f"{by_task[task]:.3f}" if task in by_task else ABSENT for task in names]
        mean = f"{np.mean(known):.3f}" if len(known) == len(names) else ABSENT
        lines.append((row, [*cells, mean]))
    return Grid(corner, [*names.values(), AVERAGE], lines).for_page() if lines else None


def gains_grid(diagnosis: Diagnosis) -> Grid | None:
    """Gains in cosine and accuracy (points) over the merged model, by task."""
    rows = [row for row in diagnosis.repairs if diagnosis.merged and row in diagnosis.accuracy]
    found = {row: gains_of(diagnosis, row, diagnosis.merged or "") for row in rows}
    if not any(found.values()):
        return None
    names = short_names(diagnosis.tasks)
    lines = [
        (f"{row}: {head}", [
            (f"{gains[task][place]:+.3f}" if place == 0 else f"{100 * gains[task][place]:+.1f}")
            if task in gains else ABSENT
            for task in names
        ])
        for row, gains in found.items()
        for place, head in enumerate(("cosine", "accuracy, points"))
    ]  # fmt: skip
    return Grid("gain over merged", list(names.values()), lines).for_page()


def class_grid(diagnosis: Diagnosis) -> Grid | None:
    """Classes whose final features the first calibrated row helps most and least, by task."""
    if diagnosis.merged is None or not diagnosis.repairs:
        return None
    row, names, lines = diagnosis.repairs[0], short_names(diagnosis.tasks), []
    ordered = class_gains(diagnosis, row)
    for task in diagnosis.tasks:
        own = [(name, gain) for (place, name), gain in ordered if place == task]
        if own:
            worse = sum(gain < 0 for _, gain in own)
            ends = [f"{name} ({gain:+.3f})" for name, gain in (own[0], own[-1])]
            lines.append((names[task], [str(len(own)), *ends, str(worse)]))
    heads = ["classes", "helped most", "helped least", "classes that lose"]
    return Grid(f"{row}: gain in cosine", heads, lines) if lines else None


def _cosines(diagnosis: Diagnosis) -> Grid | None:
    values = {
        row: {task: diagnosis.cosine(row, task) for task in diagnosis.tasks}
        for row in diagnosis.rows
    }
    return task_grid(diagnosis, "cosine to the expert", values)


def _accuracies(diagnosis: Diagnosis) -> Grid | None:
    names = short_names(diagnosis.tasks)
    known = [row for row in (*diagnosis.rows, EXPERTS) if row in diagnosis.accuracy]
    lines = [(row, [percent(diagnosis.accuracy[row].get(task)) for task in names]) for row in known]
    return Grid("accuracy, %", list(names.values()), lines).for_page() if lines else None


def _grids(*made: Grid | None) -> list[Grid]:
    return [grid for grid in made if grid is not None and grid.lines]


def _task_vectors(diagnosis: Diagnosis) -> Grid | None:
    return task_grid(diagnosis, "cosine to the expert's task vector", diagnosis.task_vectors)


SECTIONS: Mapping[str, Callable[[Diagnosis], Sequence[str | Grid]]] = {
    "Where calibration helps": help_sentences,
    "Observations of the paper": lambda d: _grids(findings_grid(d)),
    "Drift along the depth": lambda d: _grids(depth_grid(d)),
    "Change of relative drift by task": lambda d: _grids(change_grid(d)),
    "Local mismatch and upstream propagation": split_grids,
    "Final features": lambda d: _grids(_cosines(d)),
    "Gains in cosine and accuracy": lambda d: _grids(gains_grid(d)),
    "Accuracy": lambda d: _grids(_accuracies(d)),
    "Task vectors": lambda d: _grids(_task_vectors(d)),
    "Classes": lambda d: _grids(class_grid(d)),
}
"""Sections of the page, in order: sentences or tables."""
