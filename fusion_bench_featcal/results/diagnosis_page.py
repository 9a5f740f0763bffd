"""Page, tables and long table of a diagnosis."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fusion_bench_featcal.files import LOG_DIR_SETTING, write_atomic

from .class_gains import (
    LEAST_ITEMS,
    accuracy_grids,
    by_cosine,
    class_gains,
    class_sentence,
    cosine_grids,
)
from .diagnosis import MEASURES, POSITIONS, Diagnosis, gains_of
from .long_table import AVERAGE, EXPERTS, merged_by
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
    for row, tasks in diagnosis.class_accuracy.items():
        for task, classes in tasks.items():
            for name, (right, items) in classes.items():
                yield line(row, task, "accuracy", right / items, **{"class": name})
                yield line(row, task, "test_items", items, **{"class": name})


def diagnosis_markdown(diagnosis: Diagnosis) -> str:
    """The page: tables."""
    merged = f", {merged_by(diagnosis.upstream)}" if diagnosis.upstream else ""
    parts: list[Any] = [f"# Diagnosis of {diagnosis.suite}{merged}", conditions(diagnosis)]
    for title, make in SECTIONS.items():
        if content := make(diagnosis):
            parts += [f"## {title}", section_text(content)]
    parts += [diagnosis.notes]
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
    tested = ["accuracy by class: all test items of the task pool"]
    last = ["a head reads some of the last block's positions: method.positions=read compares these"]
    return [
        f"items of the {diagnosis.split} split (seed {diagnosis.seed}): {counts}",
        f"drift at blocks' outputs: {_POSITIONS[diagnosis.positions]}; mean over an item's "
        "positions, then over items",
        *(last if diagnosis.positions == "all" else []),
        f"final features: {diagnosis.features}",
        *(tested if diagnosis.class_accuracy else []),
    ]


def help_sentences(diagnosis: Diagnosis) -> list[str]:
    """Say of each calibrated row where it helps most and least: block, task, class."""
    if diagnosis.merged is None:
        return []
    sentences = []
    for row in diagnosis.repairs:
        sentences += [
            _farther(diagnosis, row),
            _change(diagnosis, row),
            class_sentence(diagnosis, row),
        ]
    return [sentence for sentence in sentences if sentence]


def _farther(diagnosis: Diagnosis, row: str) -> str | None:
    """Warn of a row that calibration has moved away from the experts."""
    after, before = (
        np.mean([diagnosis.cosine(name, task) for task in diagnosis.tasks])
        for name in (row, diagnosis.merged or "")
    )
    if after >= before:
        return None
    return (
        f"{row}: final features are farther from the experts' than the merged model's (mean "
        f"cosine {after:.3f}, merged {before:.3f}). Are the calibration samples like these items?"
    )


def _change(diagnosis: Diagnosis, row: str) -> str:
    """The blocks, tasks and classes with the best and the worst change."""
    merged, names = diagnosis.merged or "", short_names(diagnosis.tasks)
    before, after = (diagnosis.mean(name, "relative") for name in (merged, row))
    change = after / np.maximum(before, 1e-30) - 1
    best, worst = int(change.argmin()), int(change.argmax())
    blocks = short_blocks(diagnosis.blocks)
    gains = {
        task: diagnosis.cosine(row, task) - diagnosis.cosine(merged, task)
        for task in diagnosis.tasks
    }
    most, least = max(gains, key=gains.__getitem__), min(gains, key=gains.__getitem__)
    left = min(diagnosis.tasks, key=lambda task: diagnosis.cosine(row, task))
    sentence = (
        f"{row}: change of relative drift ({POSITIONS[diagnosis.positions]}) from "
        f"{100 * change[best]:+.0f} % at block {blocks[best]} (best) to "
        f"{100 * change[worst]:+.0f} % at block {blocks[worst]}; of the final features' cosine "
        f"from {gains[most]:+.3f} on {names[most]} to {gains[least]:+.3f} on {names[least]}; "
        f"farthest from its expert remains {names[left]} ({diagnosis.cosine(row, left):.3f})"
    )
    ordered = by_cosine(class_gains(diagnosis, row))
    if ordered := [gain for gain in ordered if gain.diagnosed >= LEAST_ITEMS]:
        first, last = (
            f"{g.cosine:+.3f} on {names[g.task]}: {g.name} (n = {g.diagnosed})"
            for g in (ordered[0], ordered[-1])
        )
        sentence += f"; by class from {first} to {last}"
    return sentence


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


def change_grids(diagnosis: Diagnosis) -> list[Grid]:
    """Change of relative drift from merged to each calibrated row: blocks down, tasks across."""
    names, grids = short_names(diagnosis.tasks), []
    for row in diagnosis.repairs if diagnosis.merged else ():
        change = drift_change(diagnosis, row)
        lines = [
            (block, [f"{100 * values[place]:+.0f}" for values in change.values()])
            for place, block in enumerate(short_blocks(diagnosis.blocks))
        ]
        grids.append(Grid(f"block: {row}, %", [names[task] for task in change], lines))
    return grids


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
            (f"{gains[task][place]:+.3f}" if place == 0 else f"{100 * gains[task][place]:+z.1f}")
            if task in gains else ABSENT
            for task in names
        ])
        for row, gains in found.items()
        for place, head in enumerate(("cosine", "accuracy, points"))
    ]  # fmt: skip
    return Grid("gain over merged", list(names.values()), lines).for_page()


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
    "Drift along the depth": lambda d: _grids(depth_grid(d)),
    "Change of relative drift by task": change_grids,
    "Local mismatch and upstream propagation": split_grids,
    "Final features": lambda d: _grids(_cosines(d)),
    "Gains in cosine and accuracy": lambda d: _grids(gains_grid(d)),
    "Accuracy": lambda d: _grids(_accuracies(d)),
    "Task vectors": lambda d: _grids(_task_vectors(d)),
    "Classes": cosine_grids,
    "Accuracy by class": accuracy_grids,
}
"""Sections of the page, in order: sentences or tables."""
