"""Views of results as text: the table, the table of points, and differences from one row."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fusion_bench_featcal.errors import ReportError
from fusion_bench_featcal.files import prepare_directory, write_atomic

from .joining import Results, join
from .lines import LINES_FILE, RUN_FILE, csv_of, csv_text
from .notes import BELOW, Note, sentences_of
from .run import ACCURACY, AVERAGE, DRIFT, EXPERTS, REFERENCES, Run, label_texts
from .summaries import against, summary
from .tables import ABSENT, Table, console, page, print_lines

TASK_ID = "task_id_at_inference"
_MIB = 2**20
_MOST_POINTS = 9  # points that are columns
_SHORTEST = 4  # letters of an abbreviated task


# ---- numbers


class Unit(NamedTuple):
    """Factor and number of digits of a metric in tables: per cent, or plain with three digits."""

    factor: float
    digits: int

    @classmethod
    def of(cls, metric: str) -> "Unit":
        """Return the unit: per cent for accuracies, plain for others, which have no bounds."""
        return cls(100, 1) if metric == ACCURACY else cls(1, 3)

    def value(self, number: float) -> str:
        """Write a value."""
        return ABSENT if is_missing(number) else f"{self.factor * number:.{self.digits}f}"

    def gain(self, number: float, half: float, seeds: int) -> str:
        """Write a difference ± half of its interval, or with the number of seeds without one."""
        if is_missing(number):
            return ABSENT
        text = f"{self.factor * number:+z.{self.digits}f}"
        if is_missing(half):
            return text + (f", {seeds} seeds" if seeds > 1 else "")
        return f"{text} ± {self.value(half)}"


def is_missing(value: Any) -> bool:
    """Return whether a cell of a frame is empty: None or NaN."""
    return value is None or value != value


def share_text(share: Any) -> str:
    """Write a share as whole per cent, and nothing as a dash."""
    return ABSENT if is_missing(share) else f"{100 * share:.0f} %"


def short_names(tasks: Sequence[str]) -> dict[str, str]:
    """Drop the prefix (up to an underscore) that all tasks share, to save space."""
    prefix = tasks[0].partition("_")[0] + "_" if tasks else ""
    shared = len(tasks) > 1 and all(
        task.startswith(prefix) and task[len(prefix) :] not in ("", AVERAGE) for task in tasks
    )
    return {task: task.removeprefix(prefix) if shared else task for task in tasks}


def abbreviated(names: Iterable[str], letters: int) -> dict[str, str]:
    """Cut names to some letters, the last of them an ellipsis, unless two would be equal."""
    cut = {
        name: name if len(name) <= letters else f"{name[: letters - 1].rstrip('_- ')}…"
        for name in names
    }
    return {n: c if [*cut.values()].count(c) == 1 else n for n, c in cut.items()}


# ---- the table of rows


def row_tables(frame: Any, width: int | None = None) -> list[Table]:
    """Return a table for each suite: rows by tasks, average, gain, share, worst task and costs.

    Args:
        frame: A frame of `summary` without labels.
        width: Width in which task names are abbreviated, or None to leave them.
    """
    return [_row_table(suite, frame[frame.suite == suite], width) for suite in frame.suite.unique()]


def _row_table(suite: str, frame: Any, width: int | None) -> Table:
    names = short_names(tasks_of(frame))
    table = _with_names(suite, frame, names)
    if width is None or table.width() <= width:
        return table
    longest, forms = max(map(len, names.values()), default=0), []
    for letters in range(longest, min(longest, _SHORTEST) - 1, -1):
        short = abbreviated(names.values(), letters)
        forms.append(_with_names(suite, frame, {task: short[names[task]] for task in names}))
    # The longest names with which the table has as few parts as with the shortest.
    return min(forms, key=lambda form: len(form.fitting(width)))


def _with_names(suite: str, frame: Any, names: Mapping[str, str]) -> Table:
    metric, rows = frame.attrs["metric"], frame.to_dict("records")
    unit = Unit.of(metric)
    # No mapping by head: a task may be called gain or seconds.
    columns: list[tuple[str, Callable[[Mapping[str, Any]], str]]] = [
        (name, lambda row, task=task: unit.value(row[f"{metric}.{task}"]))
        for task, name in names.items()
    ]
    columns += [
        (AVERAGE, lambda row: unit.value(row[f"{metric}.{AVERAGE}"])),
        ("gain", lambda row: unit.gain(row["gain"], row["half"], row["seeds"])),
        ("share", lambda row: share_text(row["share"])),
        ("worst task", lambda row: worst_text(row, names, unit)),
        ("seconds", lambda row: _cost(row, "seconds", 1, ".1f")),
        ("MiB", lambda row: _cost(row, "peak_rss_bytes", _MIB, ".0f")),
        ("GPU\nMiB", lambda row: _cost(row, "peak_accelerator_bytes", _MIB, ".0f")),
        ("GPU\nWh", lambda row: _cost(row, "gpu_energy_wh", 1, ".3g")),
        ("task\nid", lambda row: _yes(row.get(f"cost.{TASK_ID}"))),
    ]
    cells = [(head, [cell(row) for row in rows]) for head, cell in columns]
    cells = [(head, texts) for head, texts in cells if {*texts} - {ABSENT, _yes(0)}]
    unit_text = ", %" if unit.factor == 100 else ""
    title = f"{suite}: {metric}{unit_text}" if names else suite
    lines = [
        (head_of(row), [texts[number] for _, texts in cells]) for number, row in enumerate(rows)
    ]
    return Table(title, [head for head, _ in cells], lines)


def tasks_of(frame: Any) -> list[str]:
    """Return the tasks of a frame of `summary` that some row has."""
    start = f"{frame.attrs['metric']}."
    columns = frame.columns[frame.notna().any()]
    heads = (head.removeprefix(start) for head in columns if head.startswith(start))
    return [task for task in heads if task != AVERAGE]


def head_of(row: Mapping[str, Any]) -> str:
    """Return a row's name, below its merger as `+ name`."""
    alone = row["row"] in (*REFERENCES, row["merger"]) or not row["merger"]
    return row["row"] if alone else f"+ {row['row']}"


def worst_text(row: Mapping[str, Any], names: Mapping[str, str], unit: Unit) -> str:
    """Write the worst task with its share of the gap and its value, such as `dtd 45 % 61.2`."""
    task = row["worst_task"]
    if not isinstance(task, str):
        return ABSENT
    texts = [names.get(task, task), share_text(row["worst_share"]), unit.value(row["worst_value"])]
    return " ".join(text for text in texts if text != ABSENT)


def _yes(value: Any) -> str:
    return ABSENT if is_missing(value) else "yes" if value else "no"


def _cost(row: Mapping[str, Any], what: str, unit: float, form: str) -> str:
    value: Any = row.get(f"cost.{what}")
    return ABSENT if is_missing(value) else format(value / unit, form)


def legend(frame: Any) -> list[str]:
    """Return at most five lines on the meaning of the table."""
    lines = []
    if frame.attrs["metric"] == DRIFT:
        lines.append(
            f"{DRIFT}: distance behind the last block from the expert's features, relative to them"
        )
    if frame.gain.notna().any():
        lines.append(
            "gain: over the merged model, ± half of its 95 % interval (items; seeds, if 3)"
        )
    if frame.share.notna().any():
        lines.append("share: of the gap from merged to experts; worst task: least share, its value")
    elif frame.worst_task.notna().any():
        lines.append("worst task: least gain, its value")
    if f"cost.{TASK_ID}" in frame and frame[f"cost.{TASK_ID}"].any():
        lines.append("task id: inference needs the task of each input")
    used = frame[frame.samples != ""].groupby("samples", sort=False).row.unique()
    texts = [f"{', '.join(rows)} {samples}" for samples, rows in used.items()]
    if texts:
        lines.append(f"samples per task: {'; '.join(texts)}")
    return lines


# ---- the table of points


def point_legend(frame: Any, notes: Iterable[Note]) -> list[str]:
    """Return lines on the meaning of the table of points."""
    lines = ["n: samples per task"] if "samples_per_task" in frame.attrs["labels"] else []
    if any(note.kind == BELOW for note in notes):
        lines.append("tasks end below the merged model: --out DIR names each row's worst task")
    return lines


def point_tables(frame: Any) -> list[Table]:
    """Return a table for each merger: rows by points, each an average and the worst task's share.

    Args:
        frame: A frame of `summary` with labels.
    """
    metric, labels, tables = frame.attrs["metric"], frame.attrs["labels"], []
    unit = Unit.of(metric)
    for suite, merger in frame[frame.merger != ""].groupby(["suite", "merger"], sort=False).groups:
        part = frame[(frame.suite == suite) & frame.merger.isin([merger, ""])]
        records = [row for row in part.to_dict("records") if row["row"] != "base"]
        records.sort(key=lambda row: row["row"] == EXPERTS)
        points = points_of(records, labels)
        lines = {
            head_of(row): [_at(records, row["row"], point, unit, metric) for point in points]
            for row in records
        }
        heads = [point_text(point) for point in points]
        title = f"{suite}, {merger}: average {metric} (share of the worst task's gap)"
        table = Table(title, heads, list(lines.items()))
        tables.append(table if len(points) <= _MOST_POINTS else _transposed(table))
    return tables


def points_of(records: Iterable[Mapping[str, Any]], labels: Sequence[str]) -> list[dict[str, Any]]:
    """Return the values of labels at each point. A row without a label belongs to all points."""
    points = [{k: row[k] for k in labels if not is_missing(row[k])} for row in records]
    distinct = [point for n, point in enumerate(points) if point not in points[:n]]
    largest = [one for one in distinct if not any(one.items() < two.items() for two in distinct)]
    return sorted(largest, key=lambda point: [(isinstance(v, str), v) for v in point.values()])


def is_at(row: Mapping[str, Any], point: Mapping[str, Any]) -> bool:
    """Return whether a row belongs to a point: its labels have the point's values."""
    return all(is_missing(row[key]) or row[key] == value for key, value in point.items())


def point_text(point: Mapping[str, Any]) -> str:
    """Return a point as text, a label a line."""
    return "\n".join(label_texts(point))


def _at(
    records: Iterable[Mapping[str, Any]], name: str, point: Mapping[str, Any], unit: Unit,
    metric: str,
) -> str:  # fmt: skip
    row = next((row for row in records if row["row"] == name and is_at(row, point)), None)
    if row is None:
        return ABSENT
    share = share_text(row["worst_share"])
    return unit.value(row[f"{metric}.{AVERAGE}"]) + (f" ({share})" if share != ABSENT else "")


def _transposed(table: Table) -> Table:
    heads = [head.replace("\n", ", ") for head in table.heads]
    lines = [(head, [cells[n] for _, cells in table.lines]) for n, head in enumerate(heads)]
    return Table(table.title, [head for head, _ in table.lines], lines)


# ---- all of it


def tables_of(frame: Any, width: int | None = None) -> list[Table]:
    """Return the tables of a frame of `summary`: rows, or rows by points where settings differ."""
    return point_tables(frame) if frame.attrs["labels"] else row_tables(frame, width)


def sentences(frame: Any, notes: Iterable[Note]) -> list[str]:
    """Return the legend of a frame of `summary`, and the notes."""
    notes, has_points = list(notes), bool(frame.attrs["labels"])
    legends = point_legend(frame, notes) if has_points else legend(frame)
    texts = sentences_of(notes, *[BELOW] * has_points)
    return [*means_text(frame), *legends, *(f"note: {text}" for text in texts)]


def means_text(frame: Any) -> list[str]:
    """Return a sentence on the number of seeds of repairs, or of mergers alone, if several."""
    of_repairs = frame.seeds[~frame.row.isin(REFERENCES) & (frame.row != frame.merger)]
    seeds = of_repairs if len(of_repairs) else frame.seeds
    if not len(seeds):
        return []
    least, most = int(seeds.min()), int(seeds.max())
    if most == 1:
        return []
    return [f"means over {most} seeds" if least == most else f"means over {least} to {most} seeds"]


def show(frame: Any, notes: Iterable[Note]) -> None:
    """Print the tables of a frame of `summary`, their legend and the notes."""
    for number, table in enumerate(tables_of(frame, console().width)):
        print("\n" * bool(number), end="")
        table.show()
    print_lines(sentences(frame, notes))


def show_run(run: Run) -> None:
    """Print the table of one run, if its models were evaluated."""
    if run.tasks:
        results = join({Path(): run})
        show(summary(results), results.notes)


def show_against(results: Results, name: str, metric: str | None = None) -> None:
    """Print every row's difference from one row."""
    frame = against(results, name, metric)
    unit = Unit.of(metric := frame.attrs["metric"])
    for suite, part in frame.groupby("suite", sort=False):
        lines = [
            (row["row"], [unit.gain(row["difference"], row["half"], row["seeds"]), _p(row)])
            for row in part.to_dict("records")
        ]
        Table(f"{suite}: average {metric} minus that of {name}", ["points", "p"], lines).show()
    print_lines(
        ["± half of the 95 % interval over test items and, from three seeds on, over seeds; "
         "p-values with Holm's correction over these rows"]
    )  # fmt: skip


def _p(row: Mapping[str, Any]) -> str:
    return ABSENT if is_missing(row["adjusted"]) else f"{row['adjusted']:.2g}"


def markdown(frame: Any, notes: Iterable[Note]) -> str:
    """Return the tables, legend and notes as a Markdown page."""
    paragraphs: list[Any] = ["# Report"]
    for table in tables_of(frame):
        paragraphs += [f"## {table.title}", table.markdown()]
    return page(*paragraphs, "## Notes", sentences(frame, notes))


def write(frame: Any, results: Results, folder: str | Path, setting: str = "--out") -> Path:
    """Write `report.csv`, `report.md` and the joined `lines.csv`. Return the folder.

    Raises:
        ReportError: If the folder is that of a run, or cannot be written.
    """
    if (Path(folder) / RUN_FILE).exists():
        raise ReportError(
            f"{folder} has the files of a run, which would be overwritten. Change {setting} to "
            "another folder."
        )
    folder = prepare_directory(folder, setting)
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    write_atomic(folder / "report.csv", csv_of([*frame.columns], rows), setting)
    write_atomic(folder / "report.md", markdown(frame, results.notes), setting)
    write_atomic(folder / LINES_FILE, csv_text(results.lines()), setting)
    return folder
