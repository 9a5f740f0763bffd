"""How a comparison looks: in the terminal, and as `report.{json,csv,md}`."""

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fusion_bench_featcal.files import (
    LOG_DIR_SETTING,
    plain,
    prepare_directory,
    sealed_json,
    write_atomic,
)

from .combined_report import (
    average_text,
    explanations,
    gain_text,
    loss_parts,
    recovered_text,
    row_head,
    task_grid,
    worst_texts,
)
from .find import SIDE_BY_SIDE_KIND, FailedCell, refuse_run
from .names import AVERAGE, BASE, EXPERTS, NORMALISED, UNAVAILABLE
from .report import REPORT_FILE
from .side_by_side import (
    MODULES_ADDED,
    PARAMETERS_ADDED,
    SECONDS_PER_SAMPLE,
    TASK_ID,
    SideBySide,
    SideBySideRow,
)
from .tables import (
    MARKDOWN_COLUMNS,
    WORST,
    Grid,
    console,
    markdown_grid,
    percent,
    print_lines,
    titled_tables,
)
from .validate import SCHEMA

_ABSENT = "-"
_FAILED = "failed"


def show_side_by_side(comparison: SideBySide) -> None:
    """Print accuracy, what each row takes, and what the columns mean to stdout."""
    terminal = console()
    for title, grid in _grids(comparison):
        for table in titled_tables(f"{comparison.suite}: {title}", grid.split(terminal.width)):
            terminal.print(table)
    print_lines(terminal, _sentences(comparison))


def write_side_by_side(
    comparison: SideBySide, directory: str | Path, setting: str = LOG_DIR_SETTING
) -> Path:
    """Write `report.csv`, `report.md` and, last, `report.json`; returns the last one's path.

    Raises:
        ReportError: The folder cannot be written, or is itself a run whose report would be lost.
    """
    refuse_run(directory, setting)
    directory = prepare_directory(directory, setting)
    content = side_by_side_dict(comparison) | {"runs": _runs_inside(comparison, directory)}
    text = sealed_json(content)
    write_atomic(directory / "report.csv", side_by_side_csv(comparison), setting)
    write_atomic(directory / "report.md", side_by_side_markdown(comparison), setting)
    return write_atomic(directory / REPORT_FILE, text, setting)


def _runs_inside(comparison: SideBySide, directory: Path) -> list[str]:
    """Names of the runs' folders, if they are this folder's own: then it stands for them.

    What else a folder holds, such as an earlier comparison's runs, is not read again with it.
    """
    runs = [Path(run).absolute() for run in comparison.combined.runs]
    return [run.name for run in runs] if all(run.parent == directory for run in runs) else []


def side_by_side_dict(comparison: SideBySide) -> dict[str, Any]:
    """Return what the comparison's `report.json` holds."""
    rows = [
        {**asdict(entry.row), **_without_row(entry), "runs": len(entry.row.seeds)}
        for entry in comparison.rows
    ]
    return {
        "kind": SIDE_BY_SIDE_KIND,
        "schema": SCHEMA,
        "suite": comparison.suite,
        "seeds": comparison.seeds,
        "rows": plain(rows, "comparison"),
        "failed": [asdict(cell) for cell in comparison.failed],
        "notes": comparison.combined.notes,
    }


def side_by_side_csv(comparison: SideBySide) -> str:
    """One line per row, and one per failed cell and seed with its reason."""
    text = io.StringIO()
    heads = ["suite", "upstream", "name", "status", *_CSV_COLUMNS]
    writer = csv.DictWriter(text, heads, restval="", lineterminator="\n")
    writer.writeheader()
    for entry in comparison.rows:
        row = entry.row
        line = {"suite": row.suite, "upstream": row.upstream or "", "name": row.name}
        values = {name: value(entry) for name, value in _CSV_COLUMNS.items()}
        writer.writerow({**line, "status": "finished", **values})
    for cell in comparison.failed:
        line = {"suite": comparison.suite, "upstream": cell.upstream or "", "name": cell.name}
        seed = "" if cell.seed is None else cell.seed
        writer.writerow({**line, "status": f"{_FAILED}: {cell.reason}", "seeds": seed})
    return text.getvalue()


def side_by_side_markdown(comparison: SideBySide) -> str:
    """Return the text of the comparison's `report.md`."""
    parts = [f"# {comparison.suite}: mergers and post-merging methods side by side"]
    for title, grid in _grids(comparison):
        parts += [f"## {title.capitalize()}", markdown_grid(grid)]
    tasks = task_grid(comparison.combined, comparison.suite)
    parts += [
        "## Accuracy per task",
        markdown_grid(tasks if len(tasks.columns) <= MARKDOWN_COLUMNS else tasks.transposed()),
        *loss_parts(comparison.combined, comparison.suite),
        "## What the columns mean",
        "\n".join(f"- {line}" for line in _sentences(comparison)),
    ]
    return "\n\n".join(parts) + "\n"


def _grids(comparison: SideBySide) -> list[tuple[str, Grid]]:
    worst = worst_texts([entry.row for entry in comparison.rows])
    accuracy_cells = map(_accuracy_cells, comparison.rows, worst)
    heads = WORST if any(worst) else ()
    accuracy = ["average", "normalised", "gain over merger", "recovered gap", *heads, "paper"]
    takes = [
        "task id",
        "modules / parameters",
        "seconds",
        "memory, MiB",
        "GPU memory, MiB",
        "GPU energy, Wh",
        "ms / sample",
        "samples",
        "seeds",
    ]
    return [
        ("accuracy", _grid(comparison, "accuracy, %", accuracy, accuracy_cells)),
        ("what it takes", _grid(comparison, "", takes, map(_cost_cells, comparison.rows))),
    ]


def _grid(
    comparison: SideBySide,
    corner: str,
    columns: Sequence[str],
    cells: Iterable[Sequence[str]],
) -> Grid:
    """Rows and failed cells, each under its upstream merger."""
    lines: list[tuple[str, str, Sequence[str]]] = [
        (_section(entry), row_head(entry.row), texts)
        for entry, texts in zip(comparison.rows, cells, strict=True)
    ]
    blank = [_FAILED, *[_ABSENT] * (len(columns) - 1)]
    for upstream, name in dict.fromkeys((cell.upstream, cell.name) for cell in comparison.failed):
        lines.append((upstream or "", _failed_head(upstream, name), blank))
    sections = list(dict.fromkeys(section for section, _, _ in lines))
    lines.sort(key=lambda line: sections.index(line[0]))
    rules = {n for n in range(len(lines) - 1) if lines[n][0] != lines[n + 1][0]}
    return Grid(
        corner, columns, [(head, texts) for _, head, texts in lines], rules=frozenset(rules)
    )


def _section(entry: SideBySideRow) -> str:
    return "" if entry.row.name in (BASE, EXPERTS) else entry.row.upstream or ""


def _failed_head(upstream: str | None, name: str) -> str:
    return name if upstream in (None, name) else f"+ {name}"


def _accuracy_cells(entry: SideBySideRow, worst: Sequence[str]) -> list[str]:
    published = _ABSENT
    if entry.published is not None:
        published = percent(entry.published.value) + ("*" if entry.published.note else "")
    row = entry.row
    share = recovered_text(row) if row.name != row.upstream else _ABSENT
    normalised = percent(entry.normalised)
    if NORMALISED in entry.spread:
        normalised += f" ± {percent(entry.spread[NORMALISED])}"
    return [average_text(row), normalised, gain_text(row), share, *worst, published]


def _cost_cells(entry: SideBySideRow) -> list[str]:
    def cost(key: str, form: Callable[[float], str]) -> str:
        value = entry.cost.get(key, _ABSENT)
        return form(value) if isinstance(value, int | float) else str(value)

    def time(key: str, unit: float) -> str:
        spread = entry.spread.get(key)
        text = cost(key, lambda value: f"{value / unit:.2f}")
        return text if spread is None else f"{text} ± {spread / unit:.2f}"

    modules, parameters = (cost(k, "{:.0f}".format) for k in (MODULES_ADDED, PARAMETERS_ADDED))
    return [
        cost(TASK_ID, str),
        f"{modules} / {parameters}" if modules != _ABSENT else _ABSENT,
        time("seconds", 1),
        cost("peak_rss_bytes", _mebibytes),
        cost("peak_accelerator_bytes", _mebibytes),
        cost("gpu_energy_wh", lambda value: f"{value:.3g}"),
        time(SECONDS_PER_SAMPLE, 1e-3),
        entry.samples or _ABSENT,
        ", ".join(map(str, entry.seeds)) or _ABSENT,
    ]


def _mebibytes(value: float) -> str:
    return f"{value / 2**20:.0f}"


def _sentences(comparison: SideBySide) -> list[str]:
    lines = [_failure(cell) for cell in comparison.failed]
    if len(comparison.seeds) > 1:
        seeds = ", ".join(map(str, comparison.seeds))
        lines.append(f"comparisons with the seeds {seeds}: means ± standard deviation over them")
    lines += explanations(comparison.combined)
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
    published = [entry for entry in comparison.rows if entry.published]
    if published:
        lines.append("paper: average printed in arXiv 2605.13030; * marks doubtful entries")
    for entry in published:
        if entry.published and entry.published.note:
            place = f"{entry.row.upstream}, {entry.row.name}"
            lines.append(f"paper, {place} ({entry.published.source}): {entry.published.note}")
    return lines


def _failure(cell: FailedCell) -> str:
    seed = "" if cell.seed is None else f" (seed {cell.seed})"
    return f"{cell.upstream or 'reference'}, {cell.name} failed{seed}: {cell.reason}"


def _without_row(entry: SideBySideRow) -> dict[str, Any]:
    values = asdict(entry)
    del values["row"]
    return values


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"


_CSV_COLUMNS: dict[str, Callable[[SideBySideRow], Any]] = {
    "runs": lambda entry: len(entry.row.seeds),
    AVERAGE: lambda entry: _number(entry.row.accuracy[AVERAGE]),
    "deviation": lambda entry: _number((entry.row.deviation or {}).get(AVERAGE)),
    NORMALISED: lambda entry: _number(entry.normalised),
    "normalised_deviation": lambda entry: _number(entry.spread.get(NORMALISED)),
    "gain": lambda entry: _number(entry.row.gain),
    "gain_low": lambda entry: _number(entry.row.gain_interval and entry.row.gain_interval.low),
    "gain_high": lambda entry: _number(entry.row.gain_interval and entry.row.gain_interval.high),
    TASK_ID: lambda entry: entry.cost.get(TASK_ID, ""),
    MODULES_ADDED: lambda entry: entry.cost.get(MODULES_ADDED, ""),
    PARAMETERS_ADDED: lambda entry: entry.cost.get(PARAMETERS_ADDED, ""),
    "seconds": lambda entry: entry.cost.get("seconds", ""),
    "seconds_deviation": lambda entry: _number(entry.spread.get("seconds")),
    "peak_rss_bytes": lambda entry: entry.cost.get("peak_rss_bytes", ""),
    "peak_accelerator_bytes": lambda entry: entry.cost.get("peak_accelerator_bytes", ""),
    "gpu_energy_wh": lambda entry: entry.cost.get("gpu_energy_wh", ""),
    SECONDS_PER_SAMPLE: lambda entry: entry.cost.get(SECONDS_PER_SAMPLE, ""),
    "samples": lambda entry: entry.samples,
    "seeds": lambda entry: " ".join(map(str, entry.seeds)),
    "published": lambda entry: _number(entry.published and entry.published.value),
    "published_note": lambda entry: entry.published.note if entry.published else "",
    "worst_task": lambda entry: entry.row.worst_task or "",
    "worst_recovered_gap": lambda entry: _number(entry.row.worst_recovered_gap),
    "loss": lambda entry: _number(entry.row.loss.get(AVERAGE)),
}
