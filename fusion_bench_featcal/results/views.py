"""Several runs as text and files: `featcal report RUN...` and `method=compare`.

A combined report lists suite after suite; a comparison is of one suite and adds what rows cost.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusion_bench_featcal.files import LOG_DIR_SETTING, ReportError, prepare_directory
from fusion_bench_featcal.json_files import plain, sealed_json

from .cost import MODULES_ADDED, PARAMETERS_ADDED, SECONDS_PER_SAMPLE, TASK_ID
from .find import FailedCell, refuse_run
from .items import BOOTSTRAP_SEED, LEVEL, RESAMPLES, Interval
from .long_table import AVERAGE, BASE, NORMALISED, UNAVAILABLE
from .report import csv_text, write_files
from .run_page import WORST, with_unit, worst_cells
from .schema import SCHEMA, SIDE_BY_SIDE_KIND
from .summary import Summary, SummaryRow
from .tables import (
    ABSENT,
    MARKDOWN_COLUMNS,
    Grid,
    best_cells,
    console,
    loss_grid,
    page,
    percent,
    print_page,
    short_names,
    titled,
)

if TYPE_CHECKING:
    from rich.table import Table

COMBINED_KIND = "combined"
_Columns = Mapping[str, Callable[[SummaryRow], str]]
_FAILED = "failed"


# ---- one suite, merger and seed after the other


def show_combined(summary: Summary, *, tasks: bool = True) -> None:
    """Print the tables (those per task only if asked) and what the numbers mean to stdout."""
    print_page(combined_tables(summary, console().width, tasks=tasks), _explanations(summary))


def combined_tables(summary: Summary, width: int, *, tasks: bool = True) -> "list[Table]":
    """Terminal tables of each suite: averages with their intervals and, if asked for, tasks."""
    tables = []
    for suite in summary.suites:
        tables += titled(f"{suite}: average over tasks", _average_grid(summary, suite).split(width))
        if tasks:
            per_task = _task_grid(summary, suite).fitting(width)
            tables += titled(f"{suite}: accuracy per task, %", per_task)
    return tables


def write_combined(summary: Summary, directory: str | Path, setting: str = "--out") -> Path:
    """Write `report.csv`, `report.md` and, last, `report.json`; return the last one's path.

    Raises:
        ReportError: The folder cannot be written, or is itself a run whose report would be lost.
    """
    content = {
        "kind": COMBINED_KIND,
        "schema": SCHEMA,
        "bootstrap": {"resamples": RESAMPLES, "level": LEVEL, "seed": BOOTSTRAP_SEED},
        "rows": plain([_combined_row(row) for row in summary.rows], "combined.rows"),
        "runs": summary.runs,
        "notes": summary.notes,
    }
    files = (sealed_json(content), combined_csv(summary), combined_markdown(summary))
    return write_files(_prepared(directory, setting), *files, setting)


def _prepared(directory: str | Path, setting: str) -> Path:
    refuse_run(directory, setting)
    return prepare_directory(directory, setting)


def _combined_row(row: SummaryRow) -> dict[str, Any]:
    numbers = {what: value for what, value in row.cost.items() if isinstance(value, float)}
    dropped = {"run_seeds", "normalised", "spread", "samples", "published"}
    return _stored(row, dropped, seeds=row.run_seeds, cost=numbers)


def _stored(row: SummaryRow, dropped: set[str], **changes: Any) -> dict[str, Any]:
    return {k: value for k, value in (asdict(row) | changes).items() if k not in dropped}


def combined_csv(summary: Summary) -> str:
    """Long form, one line per suite, upstream merger, row and task; `average` has the intervals."""
    heads = [f"{what}{end}" for what in ("gain", "recovered_gap") for end in ("", "_low", "_high")]

    def lines() -> Iterator[list[Any]]:
        for row in summary.rows:
            limits = _with_limits(row.gain, row.gain_interval)
            limits += _with_limits(row.recovered_gap, row.recovered_gap_interval)
            for task, accuracy in row.accuracy.items():
                yield [
                    row.suite, row.upstream or "", row.name, len(row.run_seeds), task,
                    _number(accuracy), _number((row.deviation or {}).get(task)),
                    *(limits if task == AVERAGE else [""] * len(heads)),
                    _number(row.loss.get(task)),
                ]  # fmt: skip

    place = ["suite", "upstream", "name", "runs", "task", "accuracy", "deviation"]
    return csv_text([*place, *heads, "loss"], lines())


def combined_markdown(summary: Summary) -> str:
    """Return the text of the combined `report.md`."""
    parts: list[str] = []
    for suite in summary.suites:
        averages = _average_grid(summary, suite).markdown()
        parts += [f"## {suite}", averages, *_task_parts(summary, suite)]
    runs = [f"`{run}`" for run in summary.runs]
    return page("# Combined report", *parts, _explanations(summary), "## Runs", runs)


def _task_parts(summary: Summary, suite: str) -> list[str]:
    """Markdown of the accuracies and losses per task."""
    rows, tasks = summary.displayed(suite), _task_grid(summary, suite)
    if len(tasks.columns) > MARKDOWN_COLUMNS:
        tasks = tasks.transposed()
    losses = {
        f"{_head(row)} ({row.upstream})" if row.is_repair else row.name: row.loss
        for row in rows
        if row.loss
    }
    loss = ["### Loss", loss_grid(losses, rows[0].tasks).markdown()] if losses else []
    return [tasks.markdown(), *loss]


def _explanations(summary: Summary) -> list[str]:
    """Sentences under the tables: what the numbers mean, then the runs' own notes."""
    lines = ["accuracy in per cent, mean over runs; ± is the standard deviation over runs"]
    if any(row.gain_interval for row in summary.rows):
        lines.append(
            f"gain over the upstream merger in points; in brackets the {100 * LEVEL:.0f} % "
            f"interval of a paired bootstrap over test items ({RESAMPLES} resamples), given the "
            "runs' seeds"
        )
    lines.append("recovered gap: (row - merged) / (experts - merged) on the average")
    if any(row.worst_task for row in summary.rows):
        lines.append(
            "worst task: the one with the smallest share recovered, of those with a gap of a point "
            "or more"
        )
    return lines + [f"note: {note}" for note in summary.notes]


def _average_grid(summary: Summary, suite: str) -> Grid:
    """Average, gain over the upstream merger and recovered gap, with their intervals."""
    return _grid("average, %", _COMBINED, summary.displayed(suite))


def _task_grid(summary: Summary, suite: str) -> Grid:
    """Mean accuracy per task; the best merged model of each column stands out."""
    rows = summary.displayed(suite)
    names = short_names(rows[0].tasks)
    values = [[row.accuracy[task] for task in [*names, AVERAGE]] for row in rows]
    best = best_cells(values, [not row.is_reference for row in rows])
    lines = [
        (_head(row), list(map(percent, cells))) for row, cells in zip(rows, values, strict=True)
    ]
    rules = _rules(map(_section, rows))
    return Grid("accuracy, %", [*names.values(), AVERAGE], lines, best, rules)


# ---- accuracy and cost of one suite side by side


def show_side_by_side(summary: Summary) -> None:
    """Print accuracy, what each row takes, and what the columns mean to stdout.

    Raises:
        ReportError: The summary is of several suites.
    """
    suite, width = _only_suite(summary), console().width
    tables = [
        table
        for title, grid in _side_by_side_grids(summary)
        for table in titled(f"{suite}: {title}", grid.split(width))
    ]
    print_page(tables, _sentences(summary))


def write_side_by_side(
    summary: Summary, directory: str | Path, setting: str = LOG_DIR_SETTING
) -> Path:
    """Write `report.csv`, `report.md` and, last, `report.json`; return the last one's path.

    Raises:
        ReportError: The folder cannot be written, or is itself a run whose report would be lost;
            or the summary is of several suites.
    """
    suite = _only_suite(summary)
    directory = _prepared(directory, setting)
    runs = [Path(run).absolute() for run in summary.runs]
    rows = [
        _stored(row, {"run_seeds"}, runs=len(row.run_seeds)) for row in summary.displayed(suite)
    ]
    content = {
        "kind": SIDE_BY_SIDE_KIND,
        "schema": SCHEMA,
        "suite": suite,
        "seeds": summary.seeds,
        "rows": plain(rows, "comparison"),
        "failed": [asdict(cell) for cell in summary.failed],
        "notes": summary.notes,
        # If all runs are below this folder it stands for them. What else it holds, such as an
        # earlier comparison's runs, is not read again with it.
        "runs": [r.name for r in runs] if all(r.parent == directory for r in runs) else [],
    }
    files = (sealed_json(content), side_by_side_csv(summary), side_by_side_markdown(summary))
    return write_files(directory, *files, setting)


def _only_suite(summary: Summary) -> str:
    if len(summary.suites) != 1:
        raise ReportError(
            f"a comparison is of one suite, these runs are of {', '.join(summary.suites)}: "
            "name those of one suite at a time"
        )
    return summary.suites[0]


def side_by_side_csv(summary: Summary) -> str:
    """One line per row, and one per failed cell and seed with its reason."""
    suite, columns = _only_suite(summary), list(_CSV_COLUMNS)

    def lines() -> Iterator[list[Any]]:
        for row in summary.displayed(suite):
            values = (value(row) for value in _CSV_COLUMNS.values())
            yield [suite, row.upstream or "", row.name, "finished", *values]
        for cell in summary.failed:
            values = [""] * len(columns)
            values[columns.index("seeds")] = "" if cell.seed is None else str(cell.seed)
            yield [suite, cell.upstream or "", cell.name, f"{_FAILED}: {cell.reason}", *values]

    return csv_text(["suite", "upstream", "name", "status", *columns], lines())


def side_by_side_markdown(summary: Summary) -> str:
    """Return the text of the comparison's `report.md`."""
    suite = _only_suite(summary)
    parts: list[str] = []
    for title, grid in _side_by_side_grids(summary):
        parts += [f"## {title.capitalize()}", grid.markdown()]
    return page(
        f"# {suite}: mergers and post-merging methods side by side",
        *parts,
        "## Accuracy per task",
        *_task_parts(summary, suite),
        "## What the columns mean",
        _sentences(summary),
    )


def _side_by_side_grids(summary: Summary) -> list[tuple[str, Grid]]:
    rows = summary.displayed(_only_suite(summary))
    return [
        ("accuracy", _grid("accuracy, %", _ACCURACY, rows, summary.failed)),
        ("what it takes", _grid("", _COSTS, rows, summary.failed)),
    ]


def _sentences(summary: Summary) -> list[str]:
    """Sentences under the comparison: what failed, what the columns mean, what the paper prints."""
    lines = []
    for cell in summary.failed:
        seed = "" if cell.seed is None else f" (seed {cell.seed})"
        lines.append(f"{cell.upstream or 'reference'}, {cell.name} failed{seed}: {cell.reason}")
    if len(summary.seeds) > 1:
        seeds = ", ".join(map(str, summary.seeds))
        lines.append(f"comparisons with the seeds {seeds}: means ± standard deviation over them")
    lines += _explanations(summary)
    lines += [
        "normalised: mean over tasks of accuracy / the task's expert's accuracy, in per cent",
        "task id: whether the model must be told which task an input belongs to; modules / "
        "parameters: what it carries besides the merged model's, over all tasks",
        "seconds: merging for a merger, the method alone for a post-merging method; reading its "
        "data is part of it, evaluation is not",
        "memory: largest resident set of the process meanwhile, the framework included, with what "
        "its children hold besides; GPU energy: all that the GPUs in use drew meanwhile",
        "ms / sample: inference for one test sample of a batch, correction included: from pixels "
        "to final image features, or an answer of a language model, the same number of tokens "
        f"for all; {UNAVAILABLE}: could not be measured",
        "samples: per task, with their split",
    ]
    rows = [row for row in summary.displayed(_only_suite(summary)) if row.published]
    if rows:
        lines.append("paper: average printed in arXiv 2605.13030; * marks doubtful entries")
    return lines + [
        f"paper, {row.upstream}, {row.name} ({row.published.source}): {row.published.note}"
        for row in rows
        if row.published and row.published.note
    ]


# ---- cells of both


def _grid(
    corner: str, columns: _Columns, rows: Sequence[SummaryRow], failed: Iterable[FailedCell] = ()
) -> Grid:
    """Rows, and failed cells, each under its upstream merger; without what no row has."""
    names = short_names(rows[0].tasks)
    pairs = [(row.worst_task, row.worst_recovered_gap) if row.worst_task else None for row in rows]
    worst: list[dict[str, str]] = [
        dict(zip(WORST, cells, strict=False)) for cells in worst_cells(pairs, names)
    ]
    heads = [head for head in columns if head not in WORST or any(worst)]
    lines: list[tuple[str | None, str, Sequence[str]]] = [
        (_section(row), _head(row), [last.get(head) or columns[head](row) for head in heads])
        for row, last in zip(rows, worst, strict=True)
    ]
    blank = [_FAILED, *[ABSENT] * (len(heads) - 1)]
    for upstream, name in dict.fromkeys((cell.upstream, cell.name) for cell in failed):
        lines.append((upstream or "", name if upstream in (None, name) else f"+ {name}", blank))
    sections = list(dict.fromkeys(section for section, _, _ in lines))
    lines.sort(key=lambda line: sections.index(line[0]))
    rules = _rules(section for section, _, _ in lines)
    return Grid(corner, heads, [(head, texts) for _, head, texts in lines], rules=rules)


def _head(row: SummaryRow) -> str:
    """A repaired model stands under its upstream merger, as `+ name`."""
    return f"+ {row.name}" if row.upstream and row.is_repair else row.name


def _section(row: SummaryRow) -> str | None:
    return "" if row.is_reference else row.upstream


def _rules(sections: Iterable[str | None]) -> frozenset[int]:
    """Lines after which another section begins."""
    keys = list(sections)
    return frozenset(line for line in range(len(keys) - 1) if keys[line] != keys[line + 1])


def _spread(text: str, deviation: float | None, form: Callable[[float], str] = percent) -> str:
    return text if deviation is None else f"{text} ± {form(deviation)}"


def _gain_text(row: SummaryRow) -> str:
    """Gain over the upstream merger in points, with its interval; a dash for the merger itself."""
    if row.gain is None or not row.is_repair:
        return ABSENT
    text, limits = f"{100 * row.gain:+.1f}", row.gain_interval
    return text + (f" [{100 * limits.low:+.1f}, {100 * limits.high:+.1f}]" if limits else "")


def _recovered_text(row: SummaryRow) -> str:
    """Recovered gap in per cent, with its interval; a dash where it says nothing."""
    if row.recovered_gap is None or row.name == BASE:
        return ABSENT
    limits = row.recovered_gap_interval if row.is_repair else None
    brackets = f" [{100 * limits.low:.0f}, {100 * limits.high:.0f}]" if limits else ""
    return with_unit(row.recovered_gap) + brackets


def _paper_text(row: SummaryRow) -> str:
    published = row.published
    return percent(published.value) + "*" * bool(published.note) if published else ABSENT


def _cost(key: str, form: str | Callable[[float], str] = "{:.0f}", unit: float = 1) -> Any:
    """A function of a row: its cost in a unit, with its deviation where it is a time."""
    write = form.format if isinstance(form, str) else form

    def text(row: SummaryRow) -> str:
        value = row.cost.get(key, ABSENT)
        if not isinstance(value, int | float):
            return str(value)
        deviation = row.spread.get(key) if "seconds" in key else None
        return _spread(write(value / unit), deviation and deviation / unit, write)

    return text


def _added_text(row: SummaryRow) -> str:
    modules, parameters = (_cost(key)(row) for key in (MODULES_ADDED, PARAMETERS_ADDED))
    return f"{modules} / {parameters}" if modules != ABSENT else ABSENT


def _average_text(row: SummaryRow) -> str:
    return _spread(percent(row.accuracy[AVERAGE]), (row.deviation or {}).get(AVERAGE))


def _seconds_text(row: SummaryRow) -> str:
    seconds = row.cost.get("seconds")
    return f"{seconds:.1f}" if isinstance(seconds, float) else ABSENT


_COMBINED: _Columns = {
    "runs": lambda row: str(len(row.run_seeds)),
    AVERAGE: _average_text,
    "gain over merged": _gain_text,
    "recovered gap": _recovered_text,
    **dict.fromkeys(WORST, str),
    "seconds": _seconds_text,
}
_ACCURACY: _Columns = {
    AVERAGE: _average_text,
    NORMALISED: lambda row: _spread(percent(row.normalised), row.spread.get(NORMALISED)),
    "gain over merger": _gain_text,
    "recovered gap": lambda row: ABSENT if row.name == row.upstream else _recovered_text(row),
    **dict.fromkeys(WORST, str),
    "paper": _paper_text,
}
_COSTS: _Columns = {
    "task id": _cost(TASK_ID, str),
    "modules / parameters": _added_text,
    "seconds": _cost("seconds", "{:.2f}"),
    "memory, MiB": _cost("peak_rss_bytes", unit=2**20),
    "GPU memory, MiB": _cost("peak_accelerator_bytes", unit=2**20),
    "GPU energy, Wh": _cost("gpu_energy_wh", "{:.3g}"),
    "ms / sample": _cost(SECONDS_PER_SAMPLE, "{:.2f}", unit=1e-3),
    "samples": lambda row: row.samples or ABSENT,
    "seeds": lambda row: ", ".join(map(str, row.seeds)) or ABSENT,
}


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"


def _with_limits(value: float | None, limits: Interval | None) -> list[str]:
    return [_number(value), _number(limits and limits.low), _number(limits and limits.high)]


def _raw(key: str) -> Callable[[SummaryRow], Any]:
    return lambda row: row.cost.get(key, "")


_CSV_COLUMNS: dict[str, Callable[[SummaryRow], Any]] = {
    "runs": lambda row: len(row.run_seeds),
    AVERAGE: lambda row: _number(row.accuracy[AVERAGE]),
    "deviation": lambda row: _number((row.deviation or {}).get(AVERAGE)),
    NORMALISED: lambda row: _number(row.normalised),
    "normalised_deviation": lambda row: _number(row.spread.get(NORMALISED)),
    "gain": lambda row: _number(row.gain),
    "gain_low": lambda row: _number(row.gain_interval and row.gain_interval.low),
    "gain_high": lambda row: _number(row.gain_interval and row.gain_interval.high),
    **{key: _raw(key) for key in (TASK_ID, MODULES_ADDED, PARAMETERS_ADDED, "seconds")},
    "seconds_deviation": lambda row: _number(row.spread.get("seconds")),
    **{key: _raw(key) for key in ("peak_rss_bytes", "peak_accelerator_bytes", "gpu_energy_wh")},
    SECONDS_PER_SAMPLE: _raw(SECONDS_PER_SAMPLE),
    "samples": lambda row: row.samples,
    "seeds": lambda row: " ".join(map(str, row.seeds)),
    "published": lambda row: _number(row.published and row.published.value),
    "published_note": lambda row: row.published.note if row.published else "",
    "worst_task": lambda row: row.worst_task or "",
    "worst_recovered_gap": lambda row: _number(row.worst_recovered_gap),
    "loss": lambda row: _number(row.loss.get(AVERAGE)),
}
