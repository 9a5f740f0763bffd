"""Sections of a page on diagnoses: drift by block, its two terms, and final features."""

from collections.abc import Callable, Mapping, Sequence

from fusion_bench_featcal.results.class_gains import class_gains
from fusion_bench_featcal.results.diagnosis import POSITIONS, Diagnosis
from fusion_bench_featcal.results.diagnosis_figures import TERMS
from fusion_bench_featcal.results.diagnosis_page import SECTIONS, conditions
from fusion_bench_featcal.results.feature_figures import looks_of
from fusion_bench_featcal.results.long_table import AVERAGE
from fusion_bench_featcal.results.tables import Grid, short_blocks, short_names

from .figures import BlockLine, block_panel, block_panels
from .parts import Figure, Lines, Part, Section, Table
from .svg import Axis, Panel, Point, Series
from .tables import number, of_grid

_SECTIONS = {
    "Where calibration helps": ("Where calibration helps",),
    "Drift along the depth": ("Drift along the depth", "Change of relative drift by task"),
    "Mismatch and propagation": ("Local mismatch and upstream propagation",),
    "Final features": (
        "Final features", "Classes", "Gains in cosine and accuracy", "Accuracy",
        "Accuracy by class", "Task vectors",
    ),
}  # fmt: skip
"""Section of the page -> parts of `diagnosis.md`, whose headings are the tables' captions."""
_MARKERS = dict(zip(TERMS, "os^", strict=True))


def diagnosis_sections(diagnoses: Sequence[Diagnosis]) -> list[Section]:
    """Sections with the figures and tables of all diagnoses; none without a diagnosis."""
    if not diagnoses:
        return []
    sections = [
        Section(title, [part for one in diagnoses for name in names for part in _parts(one, name)])
        for title, names in _SECTIONS.items()
    ]
    lines = [f"{one.suite}: {line}" for one in diagnoses for line in (*conditions(one), *one.notes)]
    return [*sections, Section("How drift was measured", [Lines(lines)], folded=True)]


def _parts(diagnosis: Diagnosis, name: str) -> list[Part]:
    content = SECTIONS[name](diagnosis)
    sentences = [f"{diagnosis.suite}, {part}" for part in content if isinstance(part, str)]
    grids = [part for part in content if isinstance(part, Grid)]
    caption = f"{diagnosis.suite}: {name[0].lower()}{name[1:]}"
    captions = [caption if len(grids) == 1 else f"{caption}, {grid.corner}" for grid in grids]
    drawn = [_FIGURES[name](diagnosis)] if name in _FIGURES else []
    more = [_TABLES[name](diagnosis)] if name in _TABLES else []
    tables = [*map(of_grid, grids, captions), *(table for table in more if table.rows)]
    return [*drawn, Lines(sentences), *tables]


def _drift_figure(diagnosis: Diagnosis) -> Figure:
    """Relative drift by block: mean over tasks, and every task."""
    lines = [BlockLine(row, f"drift of {row}", look) for row, look in looks_of(diagnosis).items()]
    records = [
        {"block": block, "task": task}
        | {line.key: diagnosis.drift[line.name][task]["relative"][place] for line in lines}
        for place, block in enumerate(diagnosis.blocks)
        for task in diagnosis.tasks
    ]
    panels = block_panels("drift", records, lines, "drift / norm", tasks=True)
    note = (
        "The distance to the expert's features at each block's output, divided by their norm; "
        f"{POSITIONS[diagnosis.positions]}."
    )
    return Figure(f"{diagnosis.suite}: drift of {diagnosis.split} items by block", panels, note)


def _split_figure(diagnosis: Diagnosis) -> Figure:
    """Drift and its two terms by block, mean over tasks: a panel for each row, on equal axes."""
    rows = [*([diagnosis.merged] if diagnosis.merged else []), *diagnosis.repairs]
    means = {
        row: {key: diagnosis.mean(row, key).tolist() for key in TERMS}
        for row in rows or diagnosis.rows
    }
    values = [value for terms in means.values() for line in terms.values() for value in line]
    axes = (
        Axis.names(short_blocks(diagnosis.blocks), "block"),
        Axis.linear(values, "mean L2 norm", zero=True),
    )
    lines = [
        BlockLine(label, key, {"color": colour, "marker": _MARKERS[key]})
        for key, (colour, _, label) in TERMS.items()
    ]
    panels = []
    for row, terms in means.items():
        records = [
            {"block": block, "task": AVERAGE, **{key: terms[key][place] for key in terms}}
            for place, block in enumerate(diagnosis.blocks)
        ]
        panels.append(block_panel(row, *axes, diagnosis.blocks, records, lines))
    note = (
        f"{diagnosis.split.capitalize()} items, {POSITIONS[diagnosis.positions]}. As vectors both "
        "terms add up to the drift of every item; their norms need not."
    )
    return Figure(f"{diagnosis.suite}: both terms of drift, mean over tasks", panels, note)


def _cosine_figure(diagnosis: Diagnosis) -> Figure:
    """Cosine of final features to the expert's: a line for each task, a mark for each row."""
    names = {**short_names(diagnosis.tasks), AVERAGE: AVERAGE}
    # The average stands apart, below the tasks.
    heights = {key: line + 0.5 * (key == AVERAGE) for line, key in enumerate(names)}
    series = []
    for row, look in looks_of(diagnosis).items():
        values = {key: diagnosis.cosine(row, None if key == AVERAGE else key) for key in names}
        points = [
            Point(values[key], heights[key], f"{row}, {name}: {values[key]:.3f}")
            for key, name in names.items()
        ]
        series.append(Series(row, look, points))
    means = ", ".join(f"{one.name} {one.points[-1].x:.3f}" for one in series)
    panel = Panel(
        f"mean over {diagnosis.split} items",
        Axis.linear([point.x for one in series for point in one.points], "cosine to the expert's"),
        Axis.lines({label: heights[key] for key, label in names.items()}),
        series,
        f"Cosine of final features to the expert's, by task. Averages: {means}.",
        height=70 + 24 * len(names),
        left=31,
        upright=False,
    )
    return Figure(f"{diagnosis.suite}: final features by task", [panel])


def _classes(diagnosis: Diagnosis) -> Table:
    """Cosine of final features by class, and its gain by each calibrated row."""
    names, rows = short_names(diagnosis.tasks), diagnosis.rows
    repairs = diagnosis.repairs if diagnosis.merged else []
    lines = []
    for task in diagnosis.tasks:
        for name, first in diagnosis.classes[rows[0]].get(task, {}).items():
            values = {row: diagnosis.classes[row][task][name]["cosine"] for row in rows}
            gains = [values[row] - values[diagnosis.merged or ""] for row in repairs]
            cells = [number(first["items"], "{}")]
            cells += [number(value, "{:.3f}") for value in values.values()]
            lines.append(
                (f"{names[task]}: {name}", [*cells, *(number(g, "{:+.3f}") for g in gains)])
            )
    heads = ["items", *rows, *(f"gain of {row}" for row in repairs)]
    caption = f"{diagnosis.suite}: cosine of final features to the expert's by class"
    return Table(caption, "task: class", heads, lines)


def _class_accuracy(diagnosis: Diagnosis) -> Table:
    """Accuracy by class of every row and the experts, and the calibrated rows' gains in points."""
    names, known = short_names(diagnosis.tasks), diagnosis.class_accuracy
    gains = {row: class_gains(diagnosis, row) for row in diagnosis.class_flips}
    points = {
        (row, gain.task, gain.name): 100 * (gain.accuracy or 0.0)
        for row, own in gains.items()
        for gain in own
    }
    lines = []
    for task, classes in next(iter(known.values()), {}).items():
        for name, (_, items) in classes.items():
            counts = [tasks[task][name] for tasks in known.values()]
            cells = [number(items, "{}"), *(number(100 * r / n, "{:.1f}") for r, n in counts)]
            cells += [number(points[row, task, name], "{:+z.1f}") for row in gains]
            lines.append((f"{names[task]}: {name}", cells))
    heads = ["test items", *known, *(f"gain of {row}" for row in gains)]
    return Table(f"{diagnosis.suite}: accuracy by class in per cent", "task: class", heads, lines)


_TABLES: Mapping[str, Callable[[Diagnosis], Table]] = {
    "Classes": _classes,
    "Accuracy by class": _class_accuracy,
}
_FIGURES: Mapping[str, Callable[[Diagnosis], Figure]] = {
    "Drift along the depth": _drift_figure,
    "Local mismatch and upstream propagation": _split_figure,
    "Final features": _cosine_figure,
}
