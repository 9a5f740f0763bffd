"""Tables of a page."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fusion_bench_featcal.json_files import digest_json, plain
from fusion_bench_featcal.results.columns import (
    accuracy_cells,
    columns_with_values,
    cost_cells,
    task_cells,
)
from fusion_bench_featcal.results.differences import row_name
from fusion_bench_featcal.results.long_table import AVERAGE, FEATCAL, NORMALISED, samples_range
from fusion_bench_featcal.results.summary import SummaryRow
from fusion_bench_featcal.results.tables import (
    ABSENT,
    WORST,
    Grid,
    best_cells,
    mapping_grid,
    short_names,
)

from .groups import Group, folders_of, labels
from .parts import Cell, Table

_LONG = 40  # letters of a cell


def accuracy(group: Group) -> Table:
    """Rows by tasks, average, gain and recovered gap, with failed cells at the end."""
    rows = group.rows
    tasks = rows[0].tasks
    # Averages first: a phone shows few columns.
    cells = [accuracy_cells(row) | task_cells(row) for row in rows]
    columns = columns_with_values(cells)
    keys = [*tasks, AVERAGE]
    competing = [not row.is_reference for row in rows]
    best = best_cells([[row.accuracy[key] for key in keys] for row in rows], competing)
    lines = []
    for line, (row, texts) in enumerate(zip(rows, cells, strict=True)):
        values = _values(row)
        top = {keys[column] for place, column in best if place == line}
        line_cells = [Cell(texts[c], values.get(c), "best" if c in top else "") for c in columns]
        lines.append((group.name(row), line_cells))
    for cell in dict.fromkeys((f.upstream, f.name) for f in group.summary.failed):
        empty = [Cell(ABSENT)] * (len(columns) - 1)
        lines.append((row_name(("", *cell)), [Cell("failed", kind="failed"), *empty]))
    names = short_names(tasks)
    runs = max(len(row.run_seeds) for row in rows)
    many = f"; mean over {runs} runs ± half of its 95 % interval" if runs > 1 else ""
    heads = [names.get(column, column) for column in columns]
    return Table(f"{group.title}: accuracy in per cent{many}", "row", heads, lines)


def _values(row: SummaryRow) -> dict[str, float | None]:
    """Unrounded numbers behind the cells, to sort by."""
    return {
        **row.accuracy,
        NORMALISED: row.normalised,
        "gain over merger": row.gain,
        "recovered gap": row.recovered_gap,
        WORST[1]: row.worst_recovered_gap,
    }


def costs(group: Group) -> Table:
    """Time, memory and samples of each row, and what its model takes at inference."""
    cells = {group.name(row): cost_cells(row) for row in group.rows if row.cost or row.samples}
    columns = columns_with_values([*cells.values()]) if cells else []
    lines = [(name, [Cell(texts[c]) for c in columns]) for name, texts in cells.items()]
    return Table(f"{group.title}: what each row takes", "row", columns, lines)


def measured(group: Group) -> Table:
    """Every cost that runs recorded."""
    by_row = {group.name(row): row.cost for row in group.rows if row.cost}
    caption = f"{group.title}: costs as they were measured"
    return of_grid(mapping_grid(by_row).transposed(), caption, "row")


def losses(group: Group) -> Table:
    """Loss of each row by task; nothing where no row has one."""
    names = short_names(group.rows[0].tasks) | {AVERAGE: AVERAGE}
    lines = [
        (group.name(row), [number(row.loss.get(key), "{:.4f}") for key in names])
        for row in group.rows
        if row.loss
    ]
    return Table(f"{group.title}: loss", "row", list(names.values()), lines)


def number(value: float | None, form: str) -> Cell:
    """A number that is shown in a format and sorted by itself."""
    return Cell(ABSENT if value is None else form.format(value), value)


def settings(group: Group, defaults: Mapping[str, Any]) -> Table:
    """Settings by row, FeatCal's first; those of its rows that are not its default are marked."""
    columns = _settings_by_row(group)
    usual = {key: _word(plain(value, key)) for key, value in defaults.items()}
    featcal = [name for name in columns if name.rpartition("/")[2].startswith(FEATCAL)]
    others = [name for name in columns if name not in featcal]
    lines = []
    for key in dict.fromkeys(key for name in (*featcal, *others) for key in columns[name]):
        texts = {name: ", ".join(columns[name].get(key, [])) or ABSENT for name in columns}
        known = key in usual
        cells = [
            Cell(texts[n], kind="changed" if known and texts[n] not in (ABSENT, usual[key]) else "")
            for n in featcal
        ]
        cells.append(Cell(usual.get(key, ABSENT)))
        lines.append((key, [*cells, *(Cell(texts[name]) for name in others)]))
    heads = [*featcal, "FeatCal's default", *others] if columns else []
    only = "only settings of FeatCal that differ from the default"
    return Table(f"{group.title}: settings", "setting", heads, lines, only)


def _settings_by_row(group: Group) -> dict[str, dict[str, list[str]]]:
    """Row -> setting -> its values, of which a seed has one for each run.

    A row that several mergers have with the same settings stands once, without the merger.
    """
    rows: dict[str, dict[str, dict[str, list[str]]]] = {}
    for report in group.reports.values():
        for name, settings in report.settings.items():
            key = group.name_of(report.upstream, name)
            values = rows.setdefault(name, {}).setdefault(key, {})
            for setting, value in _flat(settings).items():
                values.setdefault(setting, [])
                if _word(value) not in values[setting]:
                    values[setting].append(_word(value))
    columns = {}
    for name, variants in rows.items():
        first, *others = variants.values()
        columns |= {name: first} if all(other == first for other in others) else variants
    return columns


def _word(value: Any) -> str:
    """A setting's value as YAML has it."""
    return value if isinstance(value, str) else json.dumps(value)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted name."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def data(group: Group) -> Table:
    """Samples that were drawn, and test items."""
    drawn: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    items: dict[str, set[str]] = {}
    for report in group.reports.values():
        for name, tasks in report.samples.items():
            row = drawn.setdefault(group.name_of(report.upstream, name), {})
            for task, entry in tasks.items():
                row.setdefault(task, []).append(entry)
        for task, entry in report.test_sets.items():
            items.setdefault(task, set()).add(str(entry.get("items", ABSENT)))
    tasks = group.rows[0].tasks
    lines = [
        (f"samples of {name}", [" ".join(samples_range(entries.get(task, ()))) for task in tasks])
        for name, entries in drawn.items()
    ]
    if items:
        lines.append(("test items", [", ".join(sorted(items.get(t, ()))) for t in tasks]))
    rows = [(name, [Cell(text or ABSENT) for text in texts]) for name, texts in lines]
    names = list(short_names(tasks).values())
    return Table(f"{group.title}: samples and test items by task", "row", names, rows)


def environments(groups: Sequence[Group]) -> Table:
    """Versions and devices: a column for the runs that agree in them."""
    names = labels(folders_of(groups))
    groups_of_runs: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for group in groups:
        for run, report in group.reports.items():
            content = {**report.versions, **report.device}
            _, runs = groups_of_runs.setdefault(digest_json(content), (content, []))
            runs.append(names[run])
    columns = {
        ", ".join(runs) if len(groups_of_runs) > 1 else "all runs": content
        for content, runs in groups_of_runs.values()
    }
    return of_grid(mapping_grid(columns), "Versions and device", "package, device")


def versions(by_name: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]]) -> Table:
    """Versions and device of studies or diagnoses by name."""
    columns = {name: {**of_name, **device} for name, (of_name, device) in by_name.items()}
    return of_grid(mapping_grid(columns), "Versions and device", "package, device")


def words(text: str) -> Cell:
    """A cell whose text is broken into lines if it is long."""
    return Cell(text, kind="words" if len(text) > _LONG else "")


def of_grid(grid: Grid, caption: str, corner: str = "") -> Table:
    """A page's table from one for the terminal; its corner is the grid's unless it is named."""
    lines = [(head, [words(text) for text in cells]) for head, cells in grid.lines]
    return Table(caption, corner or grid.corner, grid.columns, lines)
