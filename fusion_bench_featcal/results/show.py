"""The frame of results as text: tables with their sentences, and the files of a report."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fusion_bench_featcal.errors import ReportError
from fusion_bench_featcal.files import prepare_directory, write_atomic

from .against import against
from .columns import AVERAGE
from .frame import Frame, FrameLine
from .joining import Results
from .lines import LINES_FILE, RUN_FILE, lines_csv, table_csv
from .names import REFERENCES, short_label
from .sentences import (
    COSTS,
    compare_repair,
    cost_texts,
    sentences,
    single_repair,
    verdicts,
)
from .statistics import Difference
from .tables import (
    ABSENT,
    Table,
    Unit,
    console,
    latex_comment,
    p_text,
    page,
    print_lines,
    share_text,
)

_LETTERS = 14  # of a task where the table is wider than the terminal


def shorten(names: Iterable[str], letters: int) -> dict[str, str]:
    """Cut names to a number of letters, with an ellipsis, unless two names would become equal."""
    short = {
        name: name if len(name) <= letters else f"{name[: letters - 1].rstrip('_- ')}…"
        for name in names
    }
    return {n: c if [*short.values()].count(c) == 1 else n for n, c in short.items()}


# ---- the table


def tables_of(frame: Frame, width: int | None = None) -> list[Table]:
    """Return the tables of each suite: of its tasks if it has a single repair, else of its models.

    Arguments are those of `model_tables`.
    """
    tables = []
    for suite, suite_frame in frame.by_suite().items():
        repair = single_repair(suite_frame)
        if repair is None:
            tables += model_tables(suite_frame, width)
            continue
        scored = compare_repair(repair, suite_frame).tables()
        tables += [replace(table, title=f"{suite}: {table.title}") for table in scored]
    return tables


def model_tables(frame: Frame, width: int | None = None) -> list[Table]:
    """Return a table for each suite, with a line per model.

    Its columns are the settings that differ, average, gain, gap closed, worst task, costs, and
    tasks.

    Args:
        frame: The frame.
        width: Width in which names of tasks are cut if needed, or None to leave them.
    """
    tables = []
    for suite, suite_frame in frame.by_suite().items():
        table = _make_table(suite, suite_frame, {task: task for task in suite_frame.tasks})
        if width is not None and table.width() > width:
            table = _make_table(suite, suite_frame, shorten(suite_frame.tasks, _LETTERS))
        tables.append(table)
    return tables


def _make_table(suite: str, frame: Frame, names: Mapping[str, str]) -> Table:
    """Return the table of one suite, with `names` for its tasks."""
    unit = Unit.of(frame.metric)
    columns: list[tuple[str, Callable[[FrameLine], str]]] = [
        (AVERAGE, lambda line: unit.value(line.values.get(AVERAGE))),
        ("gain", lambda line: unit.gain(line.gain, len(line.rows))),
        ("gap\nclosed", lambda line: share_text(line.share)),
        ("worst task", lambda line: names[line.worst.task] if line.worst else ABSENT),
        ("its gap\nclosed", lambda line: share_text(line.worst.share if line.worst else None)),
    ]
    columns += [
        (cost.replace(" ", "\n"), lambda line, cost=cost: cost_texts(line).get(cost, ABSENT))
        for cost in COSTS
    ]
    columns.append(("task\nid", lambda line: _yes_no(line.needs_task_id)))
    columns += [(names[t], lambda line, t=t: unit.value(line.values.get(t))) for t in frame.tasks]
    cells = [(head, [text(line) for line in frame.lines]) for head, text in columns]
    settings = [
        (short_label(key).replace(".", ".\n"),
         [str(line.first.labels.get(key, ABSENT)) for line in frame.lines])
        for key in frame.labels
    ]  # fmt: skip
    cells = [(head, body) for head, body in cells if {*body} - {ABSENT, _yes_no(False)}]
    cells = [*settings, *cells]
    title = f"{suite}: {frame.metric}{', %' if unit.factor == 100 else ''}"
    lines = [(_heading(line), [body[i] for _, body in cells]) for i, line in enumerate(frame.lines)]
    heads = [head for head, _ in cells]
    average, tasks = len(settings), range(len(heads) - len(frame.tasks), len(heads))
    compared = (average, *tasks) if frame.tasks else ()
    bold = {(line, i) for i in compared for line in _best_lines(frame, cells[i][1])}
    return Table(title if frame.tasks else suite, heads, lines, fixed=average, bold=bold)


def _best_lines(frame: Frame, column: Sequence[str]) -> list[int]:
    """Return the indices of a column's best values, apart from those of base and experts."""
    texts = {
        index: text
        for index, (line, text) in enumerate(zip(frame.lines, column, strict=True))
        if line.first.name not in REFERENCES and text != ABSENT
    }
    best = (max if frame.sign > 0 else min)(texts.values(), key=float, default=None)
    return [index for index, text in texts.items() if text == best]


def _heading(line: FrameLine) -> str:
    """Return a model's name: `+ name` for a repair, which stands below its merged model."""
    row = line.first
    return f"+ {row.name}" if row.is_repair and row.merger else row.name


def _yes_no(value: bool | None) -> str:
    return ABSENT if value is None else "yes" if value else "no"


# ---- tables and sentences


def show(frame: Frame) -> None:
    """Print the verdicts, the tables of a frame, their legend and the notes."""
    print_lines(verdicts(frame))
    for number, table in enumerate(tables_of(frame, console().width)):
        print("\n" * bool(number), end="")
        table.show()
    print_lines(sentences(frame))


def show_against(results: Results, name: str, metric: str | None = None) -> None:
    """Print every model's difference from one model."""
    table = against(results, name, metric)
    unit = Unit.of(metric := table.attrs["metric"])
    records = table.astype(object).where(table.notna(), None).to_dict("records")
    for suite in table.suite.unique():
        lines = [
            (r["row"], [unit.gain(Difference(r["difference"], r["half"], r["seeds"], r["p"])),
                        p_text(r["adjusted"])])
            for r in records if r["suite"] == suite
        ]  # fmt: skip
        Table(f"{suite}: average {metric} minus that of {name}", ["points", "p"], lines).show()
    print_lines(
        ["±: half of the 95 % interval over test examples and, with three seeds or more, over "
         "seeds. p: p-values with Holm's correction over these models"]
    )  # fmt: skip


def markdown(frame: Frame) -> str:
    """Return verdicts, tables, legend and notes as a Markdown page."""
    paragraphs: list[Any] = ["# Report", verdicts(frame)]
    for table in tables_of(frame):
        paragraphs += [f"## {table.title}", table.markdown()]
    return page(*paragraphs, "## Notes", sentences(frame))


def latex(frame: Frame) -> str:
    """Return the tables as LaTeX, with the verdicts, the legend and the notes as comments."""
    tables = [table.latex() for table in model_tables(frame)]
    first = latex_comment([*verdicts(frame), r"The tables need \usepackage{booktabs}."])
    return "\n\n".join([first, *tables, latex_comment(sentences(frame))]) + "\n"


def write_report(
    frame: Frame, results: Results, folder: str | Path, setting: str = "--out"
) -> Path:
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
    write_atomic(folder / "report.csv", table_csv(frame.columns, frame.records()), setting)
    write_atomic(folder / "report.md", markdown(frame), setting)
    write_atomic(folder / LINES_FILE, lines_csv(results.lines()), setting)
    return folder
