"""Tables, sentences and charts of a diagnosis: drift by block, final features, classes."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from fusion_bench_featcal.results.long_table import (
    AVERAGE,
    BASE,
    LINES_FILE,
    Line,
    is_repair,
    means,
    read_lines,
    where,
)
from fusion_bench_featcal.results.tables import Grid, short_blocks, short_names, with_unit

from . import charts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TERMS = {"drift": "drift", "mismatch": "local mismatch", "propagation": "upstream propagation"}
_CLASSES = 3  # that gain most, and that lose most


def diagnosis_of(run: Path) -> list[Line]:
    """Return the long table of a run's folder if the run was diagnosed, else nothing.

    Raises:
        ReportError: If the file is damaged.
    """
    path = run / LINES_FILE
    lines = read_lines(path) if path.exists() else []
    return lines if any(line["block"] for line in lines) else []


def diagnosis_grids(lines: Sequence[Line]) -> dict[str, Grid]:
    """Return the tables of a diagnosis by title, none without a diagnosis."""
    metric = _metric_of_classes(lines)
    grids = {
        "relative drift (share of upstream propagation)": _drift_grid(lines),
        "cosine of final features": _cosine_grid(lines),
        f"{metric.replace('_', ' ')} of classes that gain and lose most": _class_grid(lines),
    }
    return {title: grid for title, grid in grids.items() if grid.lines}


def diagnosis_sentences(lines: Sequence[Line]) -> list[str]:
    """Return sentences on the blocks and tasks for which each row helps most and least."""
    merger, repairs = merger_of(lines), repairs_of(lines)
    tasks = short_names(list(by_task(lines, merger, "final_cosine")))
    sentences = []
    for row in repairs if tasks else ():
        before, after = (by_task(lines, name, "final_cosine") for name in (merger, row))
        if fmean(after.values()) < fmean(before.values()):
            sentences.append(
                f"{row}: final features are farther from the experts' than the merged model's "
                f"(mean cosine {fmean(after.values()):.3f}, merged {fmean(before.values()):.3f}). "
                "Are the calibration samples like these items?"
            )
        change = _change(lines, row, merger)
        best, worst = min(change, key=change.__getitem__), max(change, key=change.__getitem__)
        farthest = min(after, key=after.__getitem__)
        sentences.append(
            f"{row}: relative drift changes by {change[best]:+.0f} % at block {best} (best) to "
            f"{change[worst]:+.0f} % at block {worst}; farthest from its "
            f"expert is {tasks[farthest]}, with a cosine of {after[farthest]:.3f}"
        )
    return sentences


def diagnosis_figures(lines: Sequence[Line]) -> "dict[str, Figure]":
    """Draw drift, its two terms and its change by calibration over the blocks, by figure name."""
    rows, repairs, merger = rows_of(lines), repairs_of(lines), merger_of(lines)
    if not rows:
        return {}
    by_name = {
        name: where(lines, task=task)
        for task, name in short_names(list(by_task(lines, rows[0], "final_cosine"))).items()
    }
    figures = {
        "diagnosis": charts.blocks(
            {
                panel: {
                    charts.MERGED if row == merger else row: by_block(part, row, "relative")
                    for row in rows
                }
                for panel, part in {"mean over tasks": lines, **by_name}.items()
            },
            "drift / expert's norm",
            title="Relative drift of test items",
        ),
        "diagnosis-terms": charts.blocks(
            {
                row: {term: by_block(lines, row, key) for key, term in _TERMS.items()}
                for row in [row for row in rows if row != BASE] or rows
            },
            "mean L2 norm",
            title="Drift = local mismatch + upstream propagation, mean over tasks",
        ),
    }
    if repairs and merger in rows:
        figures["diagnosis-change"] = charts.heat(
            {
                row: {task: _change(part, row, merger) for task, part in by_name.items()}
                for row in repairs
            },
            "block",
            "+.0f",
            title="Change of relative drift against the merged model, %",
        )
    return figures


def _change(lines: Sequence[Line], row: str, merger: str) -> dict[str, float]:
    """Return the change of relative drift in per cent, by the blocks' short names."""
    before, after = (by_block(lines, name, "relative") for name in (merger, row))
    return {block: 100 * (after[block] / max(before[block], 1e-30) - 1) for block in before}


def merger_of(lines: Sequence[Line]) -> str:
    """Return the upstream merger."""
    return next((line["merger"] for line in lines), "")


def repairs_of(lines: Sequence[Line]) -> list[str]:
    """Return the rows that were made from the merged model."""
    merger = merger_of(lines)
    return [row for row in rows_of(lines) if is_repair(row, merger)]


def rows_of(lines: Iterable[Line]) -> list[str]:
    """Return the diagnosed rows: base, merger, and models made from it."""
    drift = where(lines, metric="relative")
    places = {BASE: 0} | {line["merger"]: 1 for line in drift}
    return sorted(dict.fromkeys(line["row"] for line in drift), key=lambda row: places.get(row, 2))


def by_block(lines: Iterable[Line], row: str, metric: str) -> dict[str, float]:
    """Return a row's metric by the blocks' short names, averaged over tasks."""
    values = means(where(lines, row=row, metric=metric), "block")
    names = short_blocks([block for (block,) in values])
    return dict(zip(names, values.values(), strict=True))


def by_task(lines: Iterable[Line], row: str, metric: str) -> dict[str, float]:
    """Return a row's metric of each task."""
    values = means(where(lines, row=row, metric=metric, block="", class_=""), "task")
    return {task: value for (task,), value in values.items()}


def _drift_grid(lines: Sequence[Line]) -> Grid:
    """Relative drift at each block and the propagation's share of it, mean over tasks."""
    rows = rows_of(lines)
    drift = {row: by_block(lines, row, "relative") for row in rows}
    share = {row: by_block(lines, row, "share") for row in rows}
    cells = [
        (block, [f"{drift[row][block]:.3f} ({with_unit(share[row][block])})" for row in rows])
        for block in (drift[rows[0]] if rows else ())
    ]
    return Grid("block", rows, cells)


def _cosine_grid(lines: Sequence[Line]) -> Grid:
    """Cosine between final features of each row and of the expert, by task."""
    values = {row: by_task(lines, row, "final_cosine") for row in rows_of(lines)}
    tasks = short_names(list(next(iter(values.values()), {})))
    cells = [
        (row, [f"{value:.3f}" for value in (*of.values(), fmean(of.values()))])
        for row, of in values.items()
    ]
    return Grid("row", [*tasks.values(), AVERAGE], cells).for_page()


def _class_grid(lines: Sequence[Line]) -> Grid:
    """Classes with the largest and smallest gain of the calibrated rows over the merged model."""
    rows, metric = [merger_of(lines), *repairs_of(lines)], _metric_of_classes(lines)
    classes = [line for line in lines if line["class"]]
    values = means(where(classes, metric=metric), "task", "class", "row")
    counts = "test_items" if metric == "accuracy" else "items"
    sizes = means(where(classes, metric=counts), "task", "class")
    gains = {
        key: fmean(values[*key, row] - values[*key, rows[0]] for row in rows[1:])
        for key in sizes
        if len(rows) > 1 and all((*key, row) in values for row in rows)
    }
    ordered = sorted(gains, key=gains.__getitem__, reverse=True)
    tasks = short_names(list(by_task(lines, rows[0], "final_cosine")))
    cells = [
        (f"{tasks[task]}: {name}", [
            f"{sizes[task, name]:.0f}",
            *(f"{values[task, name, row]:.3f}" for row in rows),
        ])
        for task, name in dict.fromkeys([*ordered[:_CLASSES], *ordered[-_CLASSES:]])
    ]  # fmt: skip
    return Grid("class", ["items", *rows], cells)


def _metric_of_classes(lines: Sequence[Line]) -> str:
    """Return the metric for comparing classes: accuracy, if it is known."""
    evaluated = where(lines, metric="accuracy")
    return "accuracy" if any(line["class"] for line in evaluated) else "final_cosine"
