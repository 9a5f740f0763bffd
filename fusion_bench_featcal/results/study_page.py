"""A study as text: tables for the terminal, and the page `study.md`."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from .data_tables import data_grids
from .items import LEVEL, half_width, student_interval
from .long_table import AVERAGE, BASE, EXPERTS
from .remarks import featcal_program
from .schema import STUDY_FILE
from .study import Study, label_text
from .tables import ABSENT, Grid, console, page, percent, print_page, short_names, titled

if TYPE_CHECKING:
    from rich.table import Table

Row = dict[str, Any]
COSTS = {
    "seconds": ("seconds", 1.0, "{:.1f}"),
    "peak_rss_bytes": ("memory, MiB", 2**20, "{:.0f}"),
    "gpu_energy_wh": ("GPU energy, Wh", 1.0, "{:.2f}"),
}
"""Cost -> head, size of its unit, format."""
_WORST_GAP = " (worst gap)"


def show_study(study: Study, folder: Path | None = None) -> None:
    """Print a study's tables and notes to stdout."""
    width = console().width
    tables: list[Table] = []
    for title, grid in study_grids(study):
        tables += titled(f"{study.suite}, {study.name}: {title}", grid.fitting(width))
    lines = notes(study)
    if folder is not None:
        featcal, place = featcal_program(), shlex.quote(str(folder))
        lines.append(f"next: {featcal} report {place}, {featcal} plot {place}")
        lines.append(f"{STUDY_FILE} has all")
    print_page(tables, lines)


def study_markdown(study: Study) -> str:
    """The page of a study."""
    parts: list[str | Sequence[str]] = []
    for title, grid in [*study_grids(study), *task_grids(study)]:
        parts += [f"## {title[0].upper()}{title[1:]}", grid.for_page().markdown()]
    return page(f"# {study.suite}: {study.name}", *parts, "## Notes", notes(study))


def study_grids(study: Study) -> list[tuple[str, Grid]]:
    """Tables of a study: for every merger accuracy by point and row, and costs for `cost`."""
    grids = []
    for merger in study.mergers:
        if merger is None:
            continue
        accuracies = accuracy_table(study, merger)
        # A table that is transposed to fit has no corner: its title tells as well.
        worst = _WORST_GAP * accuracies.corner.endswith(_WORST_GAP)
        grids.append((f"accuracy over {merger}, %{worst}", accuracies))
        grids += data_grids(study, merger, merged_points(study))
        if study.name == "cost":
            grids += [
                (f"{head} over {merger}", cost_table(study, merger, key))
                for key, (head, _, _) in COSTS.items()
                if any(key in row["cost"] for row, _ in rows_of(study, merger))
            ]
    return grids


def task_grids(study: Study) -> list[tuple[str, Grid]]:
    """For every merger the accuracy of each task, by point and row; none of means over subsets."""
    grids = []
    for merger in (merger for merger in study.mergers if merger and not study.over):
        lines, tasks = [], dict[str, None]()
        for labels, rows in merged_points(study):
            place = f"{label_text(labels)}: " if labels else ""
            for (upstream, name), row in rows.items():
                if upstream == merger and name != BASE:
                    tasks |= dict.fromkeys(task for task in row["accuracy"] if task != AVERAGE)
                    lines.append((place + _head(name, merger), row["accuracy"]))
        names = short_names([*tasks])
        cells = [(head, [percent(row.get(task)) for task in tasks]) for head, row in lines]
        grids.append((f"accuracy by task over {merger}, %", Grid("row", [*names.values()], cells)))
    return grids


def accuracy_table(study: Study, merger: str) -> Grid:
    """Average accuracy with its half-width; a line a row and a column a point, or the reverse."""
    points = merged_points(study)
    if len(points) == 1:
        return _differences(study, merger)
    names = [name for name in study.names(merger) if name != BASE]
    lines = []
    for name in names:
        cells = [_cell(rows.get((merger, name)), name == merger) for _, rows in points]
        lines.append((_head(name, merger), cells))
    lines.sort(key=lambda line: line[0] == EXPERTS)
    has_bracket = any("(" in cell for _, cells in lines for cell in cells)
    corner = _average(study) + _WORST_GAP * has_bracket
    grid = Grid(corner, [label_text(labels) for labels, _ in points], lines)
    if len(points) <= len(names) + 3 and len(points) < 10:
        return grid
    return replace(grid.transposed(), corner=corner)


def _average(study: Study) -> str:
    """Head of the averages: what ± is about."""
    several = "seeds" if len(study.seeds) > 1 else ""
    over = " and ".join(study.over) or several
    return f"mean over {over}, %" if over else "average, %"


def cost_table(study: Study, merger: str, key: str) -> Grid:
    """A cost of every row at every point."""
    points, (head, unit, form) = merged_points(study), COSTS[key]
    lines = []
    for name in study.names(merger):
        rows = [rows.get((merger, name)) for _, rows in points]
        values = [ABSENT if row is None else _cost(row, key, unit, form) for row in rows]
        if set(values) != {ABSENT}:
            lines.append((_head(name, merger), values))
    return Grid(head, [label_text(labels) for labels, _ in points], lines)


def _cost(row: Row, key: str, unit: float, form: str) -> str:
    value = row["cost"].get(key)
    return ABSENT if value is None else form.format(value / unit)


def _differences(study: Study, merger: str) -> Grid:
    """Rows of a study of one point: the difference from the row that each is compared with."""
    (_, rows), *_ = merged_points(study)
    lines = []
    for name in study.names(merger):
        row = rows[merger, name]
        gain, other = row["difference"], row.get("against")
        shown = ABSENT
        if gain is not None and other not in (None, name):
            shown = "{:+z.1f} [{:+z.1f}, {:+z.1f}]".format(
                *(100 * gain[key] for key in ("estimate", "low", "high"))
            )
        worst = row.get("worst_recovered_gap")
        share = ABSENT if worst is None else f"{row['worst_task']}, {100 * worst:.0f} %"
        beside = ABSENT if shown == ABSENT else ("merged" if other == merger else str(other))
        cells = [_accuracy(row), shown, beside, share, row.get("samples") or ABSENT]
        lines.append((_head(name, merger), cells))
    columns = [_average(study), "difference", "from", "worst task, gap recovered", "samples"]
    return Grid("row", columns, lines)


def merged_points(study: Study) -> list[tuple[dict[str, Any], dict[tuple[str, str], Row]]]:
    """Points by their labels, means over those in `over`, with their rows by merger and name."""
    by_labels: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for point in study.points:
        labels = {k: v for k, v in point["labels"].items() if k not in study.over}
        by_labels.setdefault(tuple(labels.items()), []).append(point)
    return [
        (dict(labels), _merged_rows(points, is_mean=bool(study.over)))
        for labels, points in by_labels.items()
    ]


def _merged_rows(points: Sequence[Mapping[str, Any]], is_mean: bool) -> dict[tuple[str, str], Row]:
    rows: dict[tuple[str, str], list[Row]] = {}
    for point in points:
        for row in point["rows"]:
            rows.setdefault((row["upstream"], row["name"]), []).append(row)
    return {key: _mean_row(each) if is_mean else each[0] for key, each in rows.items()}


def _mean_row(rows: Sequence[Row]) -> Row:
    """Mean of a row over several points, without what has no mean.

    The half-width is that of the mean over the points, as if they did not overlap, which subsets of
    tasks do; one point has none.
    """
    values = [row["accuracy"][AVERAGE] for row in rows]
    gains = [row["difference"]["estimate"] for row in rows if row["difference"] is not None]
    shares = [row["recovered_gap"] for row in rows if row.get("recovered_gap") is not None]
    worst = [r for r in rows if r.get("worst_recovered_gap") is not None]
    least = min(worst, key=lambda row: row["worst_recovered_gap"], default=rows[0])
    keys = set.intersection(*(set(row["cost"]) for row in rows))
    difference = asdict(student_interval(gains)) if len(gains) > 1 else None
    return {
        **{key: rows[0].get(key) for key in ("upstream", "name", "against")},
        "accuracy": {AVERAGE: fmean(values)},
        "half_width": half_width(values),
        "difference": rows[0]["difference"] if len(rows) == 1 else difference,
        "recovered_gap": fmean(shares) if shares else None,
        "worst_task": least.get("worst_task"),
        "worst_recovered_gap": least.get("worst_recovered_gap"),
        "cost": {key: fmean(row["cost"][key] for row in rows) for key in keys},
        "points": len(rows),
        "values": values,
    }


def bars(study: Study) -> str:
    """Tell what bars of accuracies show, for a figure's legend."""
    if study.over:
        return f"bars: {100 * LEVEL:.0f} % interval over {' and '.join(study.over)}"
    several = f"bars: {100 * LEVEL:.0f} % interval over seeds"
    return several if len(study.seeds) > 1 else "one seed: no interval"


def rows_of(study: Study, merger: str) -> list[tuple[Row, dict[str, Any]]]:
    """All rows of a merger with their points' labels."""
    return [
        (row, point["labels"])
        for point in study.points
        for row in point["rows"]
        if row["upstream"] == merger
    ]


def _cell(row: Row | None, is_merged: bool) -> str:
    if row is None:
        return ABSENT
    worst = row.get("worst_recovered_gap")
    share = "" if worst is None or is_merged else f" ({100 * worst:.0f} %)"
    return f"{_accuracy(row)}{share}"


def _accuracy(row: Row) -> str:
    values = row.get("points", row.get("seeds", 1))
    width = f" ± {100 * row['half_width']:.1f}" if values > 1 else ""
    return f"{100 * row['accuracy'][AVERAGE]:.1f}{width}"


def _head(name: str, merger: str) -> str:
    return name if name in (merger, BASE, EXPERTS) else f"+ {name}"


def notes(study: Study) -> list[str]:
    """Sentences on what the numbers mean, and on what failed."""
    return [*meanings(study), *failures(study), *(f"note: {note}" for note in study.notes)]


def meanings(study: Study) -> list[str]:
    """Sentences on what the numbers mean."""
    level = f"{100 * LEVEL:.0f} %"
    over = " and ".join(study.over)
    if over:
        average = f"mean over {over} and seeds, ± half of the {level} interval over {over}"
        interval = f"over {over} (Student's t, as if these did not overlap)"
    else:
        average = f"mean over the seeds {', '.join(map(str, study.seeds))}"
        average += f", ± half of the {level} interval over them" * (len(study.seeds) > 1)
        interval = "over test items (paired bootstrap) and, where there are several, seeds"
        interval += " (Student's t)"
    lines = [
        f"accuracy in per cent, {average}",
        "in brackets, behind an accuracy (worst gap): the least share of the gap from merger to "
        "expert that a task recovers",
        f"differences: in brackets their {level} interval, {interval}",
    ]
    if len({line for line in _samples(study)}) == 1:
        lines.append(f"samples per task: {_samples(study)[0]}")
    return lines + fewer_samples(study)


def fewer_samples(study: Study) -> list[str]:
    """A sentence for each number of samples that some tasks do not have."""
    found: dict[int, dict[str, None]] = {}
    for point in study.points:
        number = point["labels"].get("samples_per_task")
        if not isinstance(number, int):  # a name for other changes
            continue
        for text in (row["samples"] for row in point["rows"] if row["samples"]):
            if int(text.split()[0]) < number:  # a row may have a number of its own
                found.setdefault(number, {})[text] = None
    return [
        f"{label_text({'samples_per_task': number})}: tasks with fewer samples give all of them "
        f"({', '.join(texts)})"
        for number, texts in found.items()
    ]


def failures(study: Study) -> list[str]:
    """A sentence for each cell that failed."""
    return [
        f"{label_text({**point['labels'], 'seed': cell['seed']})}: "
        f"{cell['upstream'] or 'reference'}, {cell['name']} failed: {cell['reason']}"
        for point in study.points
        for cell in point["failed"]
    ]


def _samples(study: Study) -> list[str]:
    rows = (row for point in study.points for row in point["rows"])
    return [row["samples"] for row in rows if row["samples"]]
