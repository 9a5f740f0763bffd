"""Views of a summary, in the terminal and as `report.{json,csv,md}`: combined, and side by side."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusion_bench_featcal.files import LOG_DIR_SETTING, ReportError, prepare_directory
from fusion_bench_featcal.json_files import plain, sealed_json

from .cost import MODULES_ADDED, PARAMETERS_ADDED, SECONDS_PER_SAMPLE, TASK_ID
from .find import SIDE_BY_SIDE_KIND, FailedCell, refuse_run
from .items import BOOTSTRAP_SEED, LEVEL, RESAMPLES, Interval
from .long_table import AVERAGE, BASE, NORMALISED, UNAVAILABLE
from .rendering import (
    ABSENT,
    MARKDOWN_COLUMNS,
    TEXT_WIDTH,
    WORST,
    Grid,
    best_cells,
    console,
    fitting,
    loss_grid,
    markdown_grid,
    percent,
    print_lines,
    short_names,
    titled_tables,
    with_unit,
    worst_cells,
)
from .report import csv_text, write_files
from .summary import Summary, SummaryRow
from .validate import SCHEMA

if TYPE_CHECKING:
    from rich.table import Table

COMBINED_KIND = "combined"
_FAILED = "failed"
# Fields that a comparison's report has and a combined one has not.
_COMPARISON_KEYS = ("run_seeds", "normalised", "spread", "samples", "published")


# ---- one suite, merger and seed after the other: `featcal report RUN...`


def combined_tables(
    summary: Summary, width: int = TEXT_WIDTH, *, tasks: bool = True
) -> "list[Table]":
    """Terminal tables of each suite: averages with their intervals and, if asked for, tasks."""
    tables = []
    for suite in summary.suites:
        averages = _average_grid(summary, suite).split(width)
        tables += titled_tables(f"{suite}: average over tasks", averages)
        if tasks:
            per_task = fitting(_task_grid(summary, suite), width)
            tables += titled_tables(f"{suite}: accuracy per task, %", per_task)
    return tables


def show_combined(summary: Summary, *, tasks: bool = True) -> None:
    """Print the tables (those per task only if asked) and what the numbers mean to stdout."""
    terminal = console()
    for table in combined_tables(summary, terminal.width, tasks=tasks):
        terminal.print(table)
    print_lines(terminal, _explanations(summary))


def write_combined(summary: Summary, directory: str | Path, setting: str = "--out") -> Path:
    """Write `report.csv`, `report.md` and, last, `report.json`; returns the last one's path.

    Raises:
        ReportError: The folder cannot be written, or is itself a run whose report would be lost.
    """
    refuse_run(directory, setting)
    content = {
        "kind": COMBINED_KIND,
        "schema": SCHEMA,
        "bootstrap": {"resamples": RESAMPLES, "level": LEVEL, "seed": BOOTSTRAP_SEED},
        "rows": plain([_combined_row(row) for row in summary.rows], "combined.rows"),
        "runs": summary.runs,
        "notes": summary.notes,
    }
    text = sealed_json(content)
    directory = prepare_directory(directory, setting)
    page = combined_markdown(summary)
    return write_files(directory, text, combined_csv(summary), page, setting)


def _combined_row(row: SummaryRow) -> dict[str, Any]:
    values = asdict(row) | {"seeds": row.run_seeds, "cost": _measured(row)}
    return {key: value for key, value in values.items() if key not in _COMPARISON_KEYS}


def _measured(row: SummaryRow) -> dict[str, float]:
    return {what: value for what, value in row.cost.items() if isinstance(value, float)}


def combined_csv(summary: Summary) -> str:
    """Long form, one line per suite, upstream merger, row and task; `average` has the intervals."""
    measures = ("gain", "recovered_gap")
    heads = [f"{measure}{part}" for measure in measures for part in ("", "_low", "_high")]
    place = ["suite", "upstream", "name", "runs", "task"]

    def lines() -> Iterator[list[Any]]:
        for row in summary.rows:
            limits = _with_limits(row.gain, row.gain_interval)
            limits += _with_limits(row.recovered_gap, row.recovered_gap_interval)
            for task, accuracy in row.accuracy.items():
                deviation = row.deviation[task] if row.deviation else None
                yield [
                    row.suite, row.upstream or "", row.name, len(row.run_seeds), task,
                    _number(accuracy), _number(deviation),
                    *(limits if task == AVERAGE else [""] * len(heads)),
                    _number(row.loss.get(task)),
                ]  # fmt: skip

    return csv_text([*place, "accuracy", "deviation", *heads, "loss"], lines())


def combined_markdown(summary: Summary) -> str:
    """Return the text of the combined `report.md`."""
    parts = ["# Combined report"]
    for suite in summary.suites:
        averages = markdown_grid(_average_grid(summary, suite))
        parts += [f"## {suite}", averages, *_task_parts(summary, suite)]
    parts.append("\n".join(f"- {line}" for line in _explanations(summary)))
    parts += ["## Runs", "\n".join(f"- `{run}`" for run in summary.runs)]
    return "\n\n".join(parts) + "\n"


def _task_parts(summary: Summary, suite: str) -> list[str]:
    """Markdown of the accuracies and losses per task."""
    tasks = _task_grid(summary, suite)
    shown = tasks if len(tasks.columns) <= MARKDOWN_COLUMNS else tasks.transposed()
    losses = {
        f"{_head(row)} ({row.upstream})" if row.is_repair else row.name: row.loss
        for row in summary.displayed(suite)
        if row.loss
    }
    names = next(row.tasks for row in summary.rows if row.suite == suite)
    loss = ["### Loss", markdown_grid(loss_grid(losses, names))] if losses else []
    return [markdown_grid(shown), *loss]


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
    rows = summary.displayed(suite)
    worst = _worst_texts(rows)
    lines = [
        (
            _head(row),
            [
                str(len(row.run_seeds)),
                _average_text(row),
                _gain_text(row),
                _recovered_text(row),
                *last,
                f"{row.cost['seconds']:.1f}" if "seconds" in _measured(row) else ABSENT,
            ],
        )
        for row, last in zip(rows, worst, strict=True)
    ]
    heads = WORST if any(worst) else ()
    columns = ["runs", AVERAGE, "gain over merged", "recovered gap", *heads, "seconds"]
    return Grid("average, %", columns, lines, rules=_rules(map(_section, rows)))


def _task_grid(summary: Summary, suite: str) -> Grid:
    """Mean accuracy per task; the best merged model of each column stands out."""
    rows = summary.displayed(suite)
    tasks = rows[0].tasks
    values = [[row.accuracy[task] for task in [*tasks, AVERAGE]] for row in rows]
    best = best_cells(values, [not row.is_reference for row in rows])
    lines = [
        (_head(row), list(map(percent, cells))) for row, cells in zip(rows, values, strict=True)
    ]
    rules = _rules(map(_section, rows))
    return Grid("accuracy, %", [*short_names(tasks).values(), AVERAGE], lines, best, rules)


# ---- accuracy and cost of one suite side by side: `method=compare`


def show_side_by_side(summary: Summary) -> None:
    """Print accuracy, what each row takes, and what the columns mean to stdout.

    Raises:
        ReportError: The summary is of several suites.
    """
    suite, terminal = _only_suite(summary), console()
    for title, grid in _side_by_side_grids(summary):
        for table in titled_tables(f"{suite}: {title}", grid.split(terminal.width)):
            terminal.print(table)
    print_lines(terminal, _sentences(summary))


def write_side_by_side(
    summary: Summary, directory: str | Path, setting: str = LOG_DIR_SETTING
) -> Path:
    """Write `report.csv`, `report.md` and, last, `report.json`; returns the last one's path.

    Raises:
        ReportError: The folder cannot be written, or is itself a run whose report would be lost;
            or the summary is of several suites.
    """
    suite = _only_suite(summary)
    refuse_run(directory, setting)
    directory = prepare_directory(directory, setting)
    rows = [_side_by_side_row(row) for row in summary.displayed(suite)]
    content = {
        "kind": SIDE_BY_SIDE_KIND,
        "schema": SCHEMA,
        "suite": suite,
        "seeds": summary.seeds,
        "rows": plain(rows, "comparison"),
        "failed": [asdict(cell) for cell in summary.failed],
        "notes": summary.notes,
        "runs": _runs_inside(summary, directory),
    }
    text, page = sealed_json(content), side_by_side_markdown(summary)
    return write_files(directory, text, side_by_side_csv(summary), page, setting)


def _only_suite(summary: Summary) -> str:
    if len(summary.suites) != 1:
        raise ReportError(
            f"a comparison is of one suite, these runs are of {', '.join(summary.suites)}: "
            "name those of one suite at a time"
        )
    return summary.suites[0]


def _side_by_side_row(row: SummaryRow) -> dict[str, Any]:
    values = asdict(row) | {"runs": len(row.run_seeds)}
    del values["run_seeds"]
    return values


def _runs_inside(summary: Summary, directory: Path) -> list[str]:
    """Names of the runs' folders, if they are this folder's own: then it stands for them.

    What else a folder holds, such as an earlier comparison's runs, is not read again with it.
    """
    runs = [Path(run).absolute() for run in summary.runs]
    return [run.name for run in runs] if all(run.parent == directory for run in runs) else []


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
    parts = [f"# {suite}: mergers and post-merging methods side by side"]
    for title, grid in _side_by_side_grids(summary):
        parts += [f"## {title.capitalize()}", markdown_grid(grid)]
    parts += [
        "## Accuracy per task",
        *_task_parts(summary, suite),
        "## What the columns mean",
        "\n".join(f"- {line}" for line in _sentences(summary)),
    ]
    return "\n\n".join(parts) + "\n"


def _side_by_side_grids(summary: Summary) -> list[tuple[str, Grid]]:
    rows = summary.displayed(_only_suite(summary))
    worst = _worst_texts(rows)
    heads = WORST if any(worst) else ()
    accuracy = ["average", "normalised", "gain over merger", "recovered gap", *heads, "paper"]
    takes = [
        "task id", "modules / parameters", "seconds", "memory, MiB", "GPU memory, MiB",
        "GPU energy, Wh", "ms / sample", "samples", "seeds",
    ]  # fmt: skip
    cells = [_accuracy_cells(row, last) for row, last in zip(rows, worst, strict=True)]
    return [
        ("accuracy", _with_failed(summary, rows, "accuracy, %", accuracy, cells)),
        ("what it takes", _with_failed(summary, rows, "", takes, map(_cost_cells, rows))),
    ]


def _with_failed(
    summary: Summary,
    rows: Sequence[SummaryRow],
    corner: str,
    columns: Sequence[str],
    cells: Iterable[Sequence[str]],
) -> Grid:
    """Rows and failed cells, each under its upstream merger."""
    lines: list[tuple[str, str, Sequence[str]]] = [
        (_section(row) or "", _head(row), texts) for row, texts in zip(rows, cells, strict=True)
    ]
    blank = [_FAILED, *[ABSENT] * (len(columns) - 1)]
    for upstream, name in dict.fromkeys((cell.upstream, cell.name) for cell in summary.failed):
        head = name if upstream in (None, name) else f"+ {name}"
        lines.append((upstream or "", head, blank))
    sections = list(dict.fromkeys(section for section, _, _ in lines))
    lines.sort(key=lambda line: sections.index(line[0]))
    rules = _rules(section for section, _, _ in lines)
    return Grid(corner, columns, [(head, texts) for _, head, texts in lines], rules=rules)


def _accuracy_cells(row: SummaryRow, worst: Sequence[str]) -> list[str]:
    published = ABSENT
    if row.published is not None:
        published = percent(row.published.value) + ("*" if row.published.note else "")
    share = _recovered_text(row) if row.name != row.upstream else ABSENT
    normalised = percent(row.normalised)
    if NORMALISED in row.spread:
        normalised += f" ± {percent(row.spread[NORMALISED])}"
    return [_average_text(row), normalised, _gain_text(row), share, *worst, published]


def _cost_cells(row: SummaryRow) -> list[str]:
    def cost(key: str, form: Callable[[float], str]) -> str:
        value = row.cost.get(key, ABSENT)
        return form(value) if isinstance(value, int | float) else str(value)

    def time(key: str, unit: float) -> str:
        spread = row.spread.get(key)
        text = cost(key, lambda value: f"{value / unit:.2f}")
        return text if spread is None else f"{text} ± {spread / unit:.2f}"

    def mebibytes(value: float) -> str:
        return f"{value / 2**20:.0f}"

    modules, parameters = (cost(k, "{:.0f}".format) for k in (MODULES_ADDED, PARAMETERS_ADDED))
    return [
        cost(TASK_ID, str),
        f"{modules} / {parameters}" if modules != ABSENT else ABSENT,
        time("seconds", 1),
        cost("peak_rss_bytes", mebibytes),
        cost("peak_accelerator_bytes", mebibytes),
        cost("gpu_energy_wh", lambda value: f"{value:.3g}"),
        time(SECONDS_PER_SAMPLE, 1e-3),
        row.samples or ABSENT,
        ", ".join(map(str, row.seeds)) or ABSENT,
    ]


def _sentences(summary: Summary) -> list[str]:
    """Sentences under the comparison: what failed, what the columns mean, what the paper prints."""
    lines = [_failure(cell) for cell in summary.failed]
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
    published = [
        (row, row.published) for row in summary.displayed(_only_suite(summary)) if row.published
    ]
    if published:
        lines.append("paper: average printed in arXiv 2605.13030; * marks doubtful entries")
    return lines + [
        f"paper, {row.upstream}, {row.name} ({paper.source}): {paper.note}"
        for row, paper in published
        if paper.note
    ]


def _failure(cell: FailedCell) -> str:
    seed = "" if cell.seed is None else f" (seed {cell.seed})"
    return f"{cell.upstream or 'reference'}, {cell.name} failed{seed}: {cell.reason}"


# ---- cells that both views have


def _head(row: SummaryRow) -> str:
    """A repaired model stands under its upstream merger, as `+ name`."""
    return f"+ {row.name}" if row.upstream and row.is_repair else row.name


def _section(row: SummaryRow) -> str | None:
    return "" if row.is_reference else row.upstream


def _rules(sections: Iterable[str | None]) -> frozenset[int]:
    """Lines after which another section begins."""
    keys = list(sections)
    return frozenset(line for line in range(len(keys) - 1) if keys[line] != keys[line + 1])


def _worst_texts(rows: Sequence[SummaryRow]) -> list[list[str]]:
    """Cells for each row's worst task and the share of its gap; no cells if no row has one."""
    names = short_names(rows[0].tasks)
    return worst_cells(
        [
            (names[row.worst_task], row.worst_recovered_gap) if row.worst_task else None
            for row in rows
        ]
    )


def _average_text(row: SummaryRow) -> str:
    spread = f" ± {percent(row.deviation[AVERAGE])}" if row.deviation else ""
    return percent(row.accuracy[AVERAGE]) + spread


def _gain_text(row: SummaryRow) -> str:
    """Gain over the upstream merger in points, with its interval; a dash for the merger itself."""
    if row.gain is None or not row.is_repair:
        return ABSENT
    text = f"{100 * row.gain:+.1f}"
    limits = row.gain_interval
    return text + (f" [{100 * limits.low:+.1f}, {100 * limits.high:+.1f}]" if limits else "")


def _recovered_text(row: SummaryRow) -> str:
    """Recovered gap in per cent, with its interval; a dash where it says nothing."""
    if row.recovered_gap is None or row.name == BASE:
        return ABSENT
    limits = row.recovered_gap_interval if row.is_repair else None
    brackets = f" [{100 * limits.low:.0f}, {100 * limits.high:.0f}]" if limits else ""
    return with_unit(row.recovered_gap) + brackets


def _with_limits(value: float | None, limits: Interval | None) -> list[str]:
    return [_number(value), _number(limits and limits.low), _number(limits and limits.high)]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"


def _measured_as(key: str) -> Callable[[SummaryRow], Any]:
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
    **{key: _measured_as(key) for key in (TASK_ID, MODULES_ADDED, PARAMETERS_ADDED, "seconds")},
    "seconds_deviation": lambda row: _number(row.spread.get("seconds")),
    **{
        key: _measured_as(key)
        for key in (
            "peak_rss_bytes", "peak_accelerator_bytes", "gpu_energy_wh", SECONDS_PER_SAMPLE,
        )
    },
    "samples": lambda row: row.samples,
    "seeds": lambda row: " ".join(map(str, row.seeds)),
    "published": lambda row: _number(row.published and row.published.value),
    "published_note": lambda row: row.published.note if row.published else "",
    "worst_task": lambda row: row.worst_task or "",
    "worst_recovered_gap": lambda row: _number(row.worst_recovered_gap),
    "loss": lambda row: _number(row.loss.get(AVERAGE)),
}  # fmt: skip
