"""Several runs as text and files: `featcal report RUN...` and `method=compare`.

A combined report lists suite after suite; a comparison is of one suite and adds what rows cost.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusion_bench_featcal.files import LOG_DIR_SETTING, ReportError, prepare_directory, write_atomic
from fusion_bench_featcal.json_files import plain

from .columns import (
    accuracy_cells,
    average_cells,
    columns_with_values,
    cost_cells,
    csv_cells,
    number,
    run_cells,
    with_limits,
)
from .differences import (
    DIFFERENCES_FILE,
    LOSS,
    TIE,
    WIN,
    all_pairs,
    difference_lines,
    matrix,
)
from .find import FailedCell, refuse_run
from .items import BOOTSTRAP_SEED, LEVEL, RESAMPLES
from .long_table import AVERAGE, EXPERTS, UNAVAILABLE, RowKey
from .report import Report, csv_text, write_files
from .run_page import provenance, report_grid, run_title
from .schema import COMBINED_KIND, SCHEMA, SIDE_BY_SIDE_KIND
from .summary import Summary, SummaryRow
from .tables import (
    ABSENT,
    Grid,
    accuracy_grid,
    console,
    loss_grid,
    page,
    print_page,
    titled,
)

if TYPE_CHECKING:
    from rich.table import Table

_FAILED = "failed"


# ---- one suite, merger and seed after the other


def show_one_run(report: Report, summary: Summary) -> None:
    """Print the table of a run, what made its rows, and what the numbers mean to stdout.

    Args:
        report: The run's report.
        summary: The same run's rows with their intervals.
    """
    tables = titled(run_title(report), one_run_grid(report, summary).fitting(console().width))
    print_page(tables, [*provenance(report), *explanations(summary)])


def one_run_grid(report: Report, summary: Summary) -> Grid:
    """Accuracy per task and average of a run's rows, with what follows from them."""
    rows = {row.name: row for row in summary.rows}
    grid = report_grid(report).part(0, len(report.tasks) + 1)
    more = [run_cells(rows[name]) for name in report.rows]
    heads = columns_with_values(more)
    return replace(
        grid,
        columns=[*grid.columns, *heads],
        lines=[
            (name, [*cells, *(extra[head] for head in heads)])
            for (name, cells), extra in zip(grid.lines, more, strict=True)
        ],
    )


def show_combined(summary: Summary) -> None:
    """Print the tables and what the numbers mean to stdout."""
    print_page(combined_tables(summary, console().width), explanations(summary))


def combined_tables(summary: Summary, width: int) -> "list[Table]":
    """Terminal tables of each suite: averages with their intervals, and tasks."""
    tables = []
    for suite in summary.suites:
        rows = summary.displayed(suite)
        tables += titled(f"{suite}: average over tasks", _average_grid(rows).split(width))
        tables += titled(f"{suite}: accuracy per task, %", task_grid(rows).fitting(width))
    return tables


def write_combined(summary: Summary, directory: str | Path, setting: str = "--out") -> Path:
    """Write `report.csv`, `report.md` and, last, `report.json`; return the last one's path."""
    content = {
        "kind": COMBINED_KIND,
        "schema": SCHEMA,
        "bootstrap": {"resamples": RESAMPLES, "level": LEVEL, "seed": BOOTSTRAP_SEED},
        "rows": plain([_combined_row(row) for row in summary.rows], "combined.rows"),
        "runs": summary.runs,
        "notes": summary.notes,
    }
    lines = [line for row in summary.rows for line in _combined_csv(row)]
    parts: list[str] = []
    for suite in summary.suites:
        rows = summary.displayed(suite)
        parts += [f"## {suite}", _average_grid(rows).markdown(), *_task_parts(rows)]
    runs = [f"`{run}`" for run in summary.runs]
    text = page("# Combined report", *parts, explanations(summary), "## Runs", runs)
    directory = _prepared(directory, setting)
    return write_files(directory, content, csv_text(lines[0], lines), text, setting)


def _prepared(directory: str | Path, setting: str) -> Path:
    refuse_run(directory, setting)
    return prepare_directory(directory, setting)


def _combined_row(row: SummaryRow) -> dict[str, Any]:
    numbers = {what: value for what, value in row.cost.items() if isinstance(value, float)}
    dropped = {"run_seeds", "normalised", "spread", "samples"}
    stored = asdict(row) | {"seeds": row.run_seeds, "cost": numbers}
    return {key: value for key, value in stored.items() if key not in dropped}


def _combined_csv(row: SummaryRow) -> list[dict[str, Any]]:
    """A line per task; the one of the average has the intervals."""
    limits = {
        **with_limits("gain", row.gain, row.gain_interval),
        **with_limits("recovered_gap", row.recovered_gap, row.recovered_gap_interval),
    }
    return [
        {
            "suite": row.suite,
            "upstream": row.upstream,
            "name": row.name,
            "runs": len(row.run_seeds),
            "task": task,
            "accuracy": number(accuracy),
            "deviation": number((row.deviation or {}).get(task)),
            **(limits if task == AVERAGE else dict.fromkeys(limits)),
            "loss": number(row.loss.get(task)),
        }
        for task, accuracy in row.accuracy.items()
    ]


def _task_parts(rows: Sequence[SummaryRow]) -> list[str]:
    """Markdown of the accuracies and losses per task."""
    losses = {
        f"{_head(row)} ({row.upstream})" if row.is_repair else row.name: row.loss
        for row in rows
        if row.loss
    }
    loss = ["### Loss", loss_grid(losses, rows[0].tasks).markdown()] if losses else []
    return [task_grid(rows).for_page().markdown(), *loss]


def explanations(summary: Summary) -> list[str]:
    """Sentences under the tables: what the numbers mean, then the runs' own notes."""
    lines = ["accuracy in per cent" + spread_meaning(summary.rows)]
    if any(row.gain_interval for row in summary.rows):
        lines.append(
            f"gain over the upstream merger in points, in brackets its {100 * LEVEL:.0f} % "
            f"interval, over test items (paired bootstrap, {RESAMPLES} resamples) and, where there "
            "are several, seeds (Student's t)"
        )
    lines.append("recovered gap: (row - merged) / (experts - merged) on the average")
    if any(row.worst_task for row in summary.rows):
        lines.append(
            "worst task: the one with the smallest share recovered, of those with a gap of a point "
            "or more"
        )
    return lines + [f"note: {note}" for note in summary.notes]


def spread_meaning(rows: Sequence[SummaryRow]) -> str:
    """Say what stands behind ±, where a row has several runs."""
    draws = sorted({len(row.run_seeds) for row in rows if row.deviation})
    if not draws:
        return ""
    return (
        f", mean over {' or '.join(map(str, draws))} runs, ± half of the {100 * LEVEL:.0f} % "
        "interval of this mean (Student's t, none for one run)"
    )


def _average_grid(rows: Sequence[SummaryRow]) -> Grid:
    """Average, gain over the upstream merger and recovered gap, with their intervals."""
    return _grid("average, %", average_cells, rows)


def task_grid(rows: Sequence[SummaryRow]) -> Grid:
    """Mean accuracy per task; the best merged model of each column stands out."""
    lines = [(_head(row), row.accuracy, not row.is_reference) for row in rows]
    return accuracy_grid(lines, rows[0].tasks, _rules(map(_section, rows)))


# ---- accuracy and cost of one suite side by side


def show_side_by_side(summary: Summary) -> None:
    """Print accuracy, what each row takes, and what the columns mean to stdout."""
    suite, width = _only_suite(summary), console().width
    tables = [
        table
        for title, grid in _side_by_side_grids(summary)
        for table in titled(f"{suite}: {title}", grid.split(width))
    ]
    print_page(tables, sentences(summary))


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
    rows = [asdict(row) | {"runs": len(row.run_seeds)} for row in summary.displayed(suite)]
    for row in rows:
        del row["run_seeds"]
    runs = [Path(run).absolute() for run in summary.runs]
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
    pairs = difference_lines(all_pairs(summary.scores))
    if pairs:
        write_atomic(directory / DIFFERENCES_FILE, csv_text(pairs[0], pairs), setting)
    lines = _side_by_side_csv(summary)
    table = csv_text(lines[0], lines)
    return write_files(directory, content, table, _side_by_side_markdown(summary), setting)


def _only_suite(summary: Summary) -> str:
    if len(summary.suites) != 1:
        raise ReportError(
            f"a comparison is of one suite, these runs are of {', '.join(summary.suites)}: "
            "name those of one suite at a time"
        )
    return summary.suites[0]


def _side_by_side_csv(summary: Summary) -> list[dict[str, Any]]:
    """A line per row, and one per failed cell and seed with its reason."""
    suite = _only_suite(summary)
    lines = []
    for row in summary.displayed(suite):
        place = {"suite": suite, "upstream": row.upstream, "name": row.name}
        lines.append({**place, "status": "finished", **csv_cells(row)})
    for cell in summary.failed:
        place = {"suite": suite, "upstream": cell.upstream, "name": cell.name}
        lines.append({**place, "status": f"{_FAILED}: {cell.reason}", "seeds": cell.seed})
    return lines


def _side_by_side_markdown(summary: Summary) -> str:
    suite = _only_suite(summary)
    parts: list[str] = []
    for title, grid in _side_by_side_grids(summary):
        parts += [f"## {title.capitalize()}", grid.markdown()]
    return page(
        f"# {suite}: mergers and post-merging methods side by side",
        *parts,
        "## Accuracy per task",
        *_task_parts(summary.displayed(suite)),
        *_matrices(summary),
        "## What the columns mean",
        sentences(summary),
    )


def _matrices(summary: Summary) -> list[str]:
    """Markdown of wins, ties and losses among the rows of each merger, the experts beside them."""
    parts: list[str] = []
    sections: dict[str | None, dict[RowKey, str]] = {}
    for key in summary.scores:
        sections.setdefault(key[1], {})[key] = key[2]
    shared = sections.pop(None, {})
    for upstream, names in sections.items():
        if len(names) > 1:
            names = {key: name for key, name in shared.items() if name == EXPERTS} | names
            scores = {key: summary.scores[key] for key in names}
            parts += [f"### {upstream}", matrix(all_pairs(scores), names).markdown()]
    head = [
        "## Wins, ties and losses",
        f"`{WIN}`, `{TIE}`, `{LOSS}`: the row is above the column, not told from it, or below it "
        f"in average accuracy, at a level of {100 * (1 - LEVEL):.0f} % after Holm's correction "
        f"over the pairs of the table (paired bootstrap over test items, Student's t over seeds). "
        f"`{DIFFERENCES_FILE}` has every pair of rows; `featcal report RUN --against ROW` compares "
        "all with one.",
    ]
    return [*head, *parts] if parts else []


def _side_by_side_grids(summary: Summary) -> list[tuple[str, Grid]]:
    return list(suite_grids(summary, _only_suite(summary)).items())[:2]


def suite_grids(summary: Summary, suite: str) -> dict[str, Grid]:
    """Return the tables of a suite's rows by title: accuracy, costs and tasks."""
    rows = summary.displayed(suite)
    return {
        "accuracy": _grid("accuracy, %", accuracy_cells, rows, summary.failed),
        "what it takes": _grid("", cost_cells, rows, summary.failed),
        "accuracy per task": task_grid(rows),
    }


def failures(failed: Iterable[FailedCell]) -> list[str]:
    """Return a sentence for each failed cell."""
    lines = []
    for cell in failed:
        seed = "" if cell.seed is None else f" (seed {cell.seed})"
        point = f"{cell.point}: " if cell.point else ""
        name = f"{point}{cell.upstream or 'reference'}, {cell.name}"
        lines.append(f"{name} failed{seed}: {cell.reason}")
    return lines


def sentences(summary: Summary) -> list[str]:
    """Sentences under the comparison: what failed and what the columns mean."""
    lines = failures(summary.failed)
    if len(summary.seeds) > 1:
        seeds = ", ".join(map(str, summary.seeds))
        lines.append(f"means over comparisons with the seeds {seeds}")
    lines += explanations(summary)
    lines += [
        "normalised: mean over tasks of accuracy / the task's expert's accuracy, in per cent",
        "unseen: corrections trained on samples of the test split, on the other test items alone; "
        "gain over the merger on the same items; number of tasks that have any",
        "task id: whether the model must be told which task an input belongs to; modules / "
        "parameters: what it carries besides the merged model's, over all tasks",
        "settings tried: settings that the row's were chosen from on calibration samples, without "
        "labels",
        "seconds: merging for a merger, the method alone for a post-merging method; reading its "
        "data is part of it, evaluation is not; with merger: both together",
        "memory: largest resident set of the process meanwhile, the framework included, with what "
        "its children hold besides; GPU energy: all that the GPUs in use drew meanwhile",
        "ms / sample: inference for one test sample of a batch, correction included: from pixels "
        "to final image features, or an answer of a language model, the same number of tokens "
        f"for all; {UNAVAILABLE}: could not be measured",
        "samples: per task, with their split",
    ]
    return lines


# ---- cells of both


def _grid(
    corner: str,
    cells_of: Callable[[SummaryRow], Mapping[str, str]],
    rows: Sequence[SummaryRow],
    failed: Iterable[FailedCell] = (),
) -> Grid:
    """Rows, and failed cells, each under its upstream merger."""
    lines = [(_section(row), _head(row), cells_of(row)) for row in rows]
    # The first column stays, because it shows what failed.
    with_values = columns_with_values([cells for *_, cells in lines])
    columns = list(dict.fromkeys([next(iter(lines[0][2])), *with_values]))
    for upstream, name in dict.fromkeys((cell.upstream, cell.name) for cell in failed):
        head = name if upstream in (None, name) else f"+ {name}"
        lines.append((upstream or "", head, {columns[0]: _FAILED}))
    sections = list(dict.fromkeys(section for section, _, _ in lines))
    lines.sort(key=lambda line: sections.index(line[0]))
    texts = [(head, [cells.get(key, ABSENT) for key in columns]) for _, head, cells in lines]
    if any(row.deviation for row in rows):
        corner = "mean over runs" + ", %" * corner.endswith("%")
    return Grid(corner, columns, texts, rules=_rules(section for section, _, _ in lines))


def _head(row: SummaryRow) -> str:
    """A repaired model stands under its upstream merger, as `+ name`."""
    return f"+ {row.name}" if row.upstream and row.is_repair else row.name


def _section(row: SummaryRow) -> str | None:
    return "" if row.is_reference else row.upstream


def _rules(sections: Iterable[str | None]) -> frozenset[int]:
    """Lines after which another section begins."""
    keys = list(sections)
    return frozenset(line for line in range(len(keys) - 1) if keys[line] != keys[line + 1])
