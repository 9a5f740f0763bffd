"""Tables of text, in the terminal (rich) and as Markdown; the pages of a run's report."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .long_table import AVERAGE, BASE, EXPERTS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from .report import Report

from dataclasses import dataclass

TEXT_WIDTH = 80
RECOVERED = "recovered gap"
WORST = ("worst task", "its gap")
ABSENT = "-"
MARKDOWN_COLUMNS = 12


@dataclass(frozen=True)
class Grid:
    """A table of text: a corner, column heads, and lines of (head, cells); `best` cells stand out.

    `best` holds (line, column) positions. `rules` holds lines that a rule follows.
    """

    corner: str
    columns: Sequence[str]
    lines: Sequence[tuple[str, Sequence[str]]]
    best: frozenset[tuple[int, int]] = frozenset()
    rules: frozenset[int] = frozenset()

    def transposed(self) -> "Grid":
        """Swap lines and columns; rules do not survive."""
        heads = [head for head, _ in self.lines]
        lines = [
            (column, [cells[index] for _, cells in self.lines])
            for index, column in enumerate(self.columns)
        ]
        return Grid("", heads, lines, frozenset((column, line) for line, column in self.best))

    def part(self, first: int, last: int | None = None) -> "Grid":
        """Keep the columns from `first` to before `last`."""
        lines = [(head, cells[first:last]) for head, cells in self.lines]
        columns = self.columns[first:last]
        kept = {(line, col - first) for line, col in self.best if 0 <= col - first < len(columns)}
        return Grid(self.corner, columns, lines, frozenset(kept), self.rules)

    def split(self, width: int) -> "list[Grid]":
        """Divide the columns among tables that fit `width`, each of one column at least."""
        grids, first = [], 0
        for column in range(1, len(self.columns)):
            if self.part(first, column + 1).width() > width:
                grids.append(self.part(first, column))
                first = column
        return [*grids, self.part(first)]

    def width(self) -> int:
        """Terminal columns that `rich_grid` needs for it."""
        heads = [self.corner, *(head for head, _ in self.lines)]
        widths = [max(map(len, heads))]
        for index, column in enumerate(self.columns):
            texts = [*broken(column).splitlines(), *(cells[index] for _, cells in self.lines)]
            widths.append(max(map(len, texts)))
        return sum(widths) + 2 * len(widths)


def console() -> "Console":
    """Return a console on stdout: as wide as the terminal, or 80 columns where there is none."""
    from rich.console import Console

    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=TEXT_WIDTH)


def print_lines(terminal: "Console", lines: Sequence[str]) -> None:
    """Print sentences as they are: no markup, no colours."""
    for line in lines:
        terminal.print(line, markup=False, highlight=False)


def percent(value: float | None, digits: int = 1) -> str:
    """Write a share as per cent; None as a dash."""
    return ABSENT if value is None else f"{100 * value:.{digits}f}"


def short_names(tasks: Sequence[str]) -> dict[str, str]:
    """Drop the prefix (up to an underscore) that all tasks share; it only takes room."""
    prefix = tasks[0].partition("_")[0] + "_" if tasks else ""
    shared = len(tasks) > 1 and all(
        len(task) > len(prefix) and task.startswith(prefix) for task in tasks
    )
    return {task: task.removeprefix(prefix) if shared else task for task in tasks}


def best_cells(
    values: Sequence[Sequence[float | None]], eligible: Sequence[bool]
) -> frozenset[tuple[int, int]]:
    """Positions of the largest value of each column among the eligible lines (ties: all)."""
    best = set()
    for column in range(len(values[0]) if values else 0):
        candidates = {
            line: value
            for line, cells in enumerate(values)
            if eligible[line] and (value := cells[column]) is not None
        }
        top = max(candidates.values(), default=None)
        best |= {(line, column) for line, value in candidates.items() if value == top}
    return frozenset(best)


def worst_cells(rows: Sequence[tuple[str, float | None] | None]) -> list[list[str]]:
    """Worst task of each row and the share of its gap; no cells if no row has one."""
    if not any(rows):
        return [[] for _ in rows]
    return [[row[0], with_unit(row[1])] if row else [ABSENT] * len(WORST) for row in rows]


def report_grid(report: "Report") -> Grid:
    """Rows of the report by tasks, average, recovered gap and worst task.

    The best merged model of each column stands out.
    """
    names = short_names(report.tasks)
    keys = [*report.tasks, AVERAGE]
    values = [[row[key] for key in keys] for row in report.rows.values()]
    eligible = [name not in (BASE, EXPERTS) for name in report.rows]
    # Base is not an attempt to repair the merged model: its share says nothing.
    shares = [None if name == BASE else report.share(name, AVERAGE) for name in report.rows]
    worst = [report.worst(name) for name in report.rows]
    worst = worst_cells([found and (names[found[0]], found[1]) for found in worst])
    lines = [
        (name, [*map(percent, cells), with_unit(share), *last])
        for name, cells, share, last in zip(report.rows, values, shares, worst, strict=True)
    ]
    columns = [*names.values(), AVERAGE, RECOVERED, *(WORST if any(worst) else ())]
    best = best_cells(values, eligible) if sum(eligible) > 1 else frozenset()
    return Grid("accuracy, %", columns, lines, best)


def report_tables(report: "Report", width: int) -> "list[Table]":
    """Lay the report out for `width` columns: one table, else a summary and the tasks."""
    grid, tasks = report_grid(report), len(report.tasks)
    if grid.width() <= width:
        return titled_tables(_title(report), [grid])
    summary = titled_tables(_title(report), grid.part(tasks).split(width))
    return summary + titled_tables("accuracy per task, %", fitting(grid.part(0, tasks), width))


def titled_tables(title: str, grids: Sequence[Grid]) -> "list[Table]":
    """Render grids of which the first has the title, the others continue it."""
    from rich.text import Text

    tables = [rich_grid(grid) for grid in grids]
    for number, table in enumerate(tables):
        # As Text, so that brackets in a name are not read as markup.
        table.title = Text(title + (" (continued)" if number else ""))
    return tables


def fitting(grid: Grid, width: int) -> list[Grid]:
    """Choose the form of `grid` that fits `width`: as it is, transposed, or several grids."""
    for form in (grid, grid.transposed()):
        if form.width() <= width:
            return [form]
    return grid.split(width)


def loss_grid(losses: Mapping[str, Mapping[str, float]], tasks: Sequence[str]) -> Grid:
    """Loss of rows by tasks and average; a dash where there is none."""
    keys = [*tasks, AVERAGE]
    lines = [
        (name, [f"{row[key]:.4f}" if key in row else ABSENT for key in keys])
        for name, row in losses.items()
    ]
    grid = Grid("loss", [*short_names(tasks).values(), AVERAGE], lines)
    return grid if len(keys) <= MARKDOWN_COLUMNS else grid.transposed()


def rich_grid(grid: Grid) -> "Table":
    """Render for the terminal."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left")
    # Numbers are never cut: where even one column is too wide, the heads of lines are folded.
    table.add_column(grid.corner, overflow="fold")
    for column in grid.columns:
        table.add_column(Text(broken(column)), justify="right", no_wrap=True)
    for number, (head, cells) in enumerate(grid.lines):
        styles = ["bold" if (number, column) in grid.best else "" for column in range(len(cells))]
        texts = [Text(cell, style=style) for cell, style in zip(cells, styles, strict=True)]
        table.add_row(Text(head), *texts, end_section=number in grid.rules)
    return table


def markdown_grid(grid: Grid) -> str:
    """Render as a Markdown table."""
    lines = [
        "| " + " | ".join(map(_escaped, [grid.corner, *grid.columns])) + " |",
        "|:--" + "|--:" * len(grid.columns) + "|",
    ]
    for number, (head, cells) in enumerate(grid.lines):
        marked = [
            f"**{cell}**" if (number, column) in grid.best else _escaped(cell)
            for column, cell in enumerate(cells)
        ]
        lines.append("| " + " | ".join([_escaped(head), *marked]) + " |")
    return "\n".join(lines)


def provenance(report: "Report") -> list[str]:
    """Sentences under a table: what was calibrated with what, where, and what to mind."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, tasks in report.samples.items():
        groups.setdefault(tuple(samples_range(tasks.values())), []).append(name)
    lines = [
        f"{', '.join(names)}: {drawn[0]} samples per task from the {drawn[1]} split"
        for drawn, names in groups.items()
        if drawn
    ]
    times = [
        f"{name} {cost['seconds']:.1f} s"
        for name, cost in report.cost.items()
        if isinstance(cost.get("seconds"), (int, float))
    ]
    if times:
        lines.append("calibration time: " + ", ".join(times))
    seeds = ", ".join(f"{name} {seed}" for name, seed in report.seeds.items())
    place = ", ".join(str(report.device[key]) for key in ("device", "cpu") if key in report.device)
    lines.append("; ".join(part for part in (f"seeds: {seeds}" if seeds else "", place) if part))
    return [line for line in lines if line] + [f"note: {note}" for note in report.notes]


def samples_range(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """Number of samples per task and their splits, such as `256` and `train`; nothing for none."""
    drawn = list(entries)
    if not drawn:
        return []
    counts = sorted({int(entry["samples"]) for entry in drawn})
    splits = sorted({str(entry["split"]) for entry in drawn})
    number = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return [number, " and ".join(splits)]


def report_markdown(report: "Report") -> str:
    """Return the text of `report.md`: the table, then everything needed to judge it."""
    grid = report_grid(report)
    if len(grid.columns) > MARKDOWN_COLUMNS:
        grid = grid.transposed()
    parts = [
        f"# {_title(report)}",
        markdown_grid(grid),
        "Accuracy in per cent. *Recovered gap*: (row - merged) / (experts - merged) on the "
        f"average, where merged is `{report.upstream}`. *Worst task*: the one with the smallest "
        "share recovered (of the tasks with a gap of a point or more). Bold: best merged model of "
        "a column.",
        "\n".join(f"- {line}" for line in provenance(report)),
    ]
    if report.loss:
        parts += ["## Loss", markdown_grid(loss_grid(report.loss, report.tasks))]
    for title, table in (("Settings", report.settings), ("Cost", report.cost)):
        if table:
            parts += [f"## {title}", markdown_grid(mapping_grid(table))]
    for title, mapping in (("Versions", report.versions), ("Device", report.device)):
        if mapping:
            parts += [
                f"## {title}",
                "\n".join(f"- {key}: {value}" for key, value in mapping.items()),
            ]
    return "\n\n".join(part for part in parts if part) + "\n"


def mapping_grid(table: Mapping[str, Mapping[str, Any]]) -> Grid:
    """Keys down, rows of the report across."""
    keys = list(dict.fromkeys(key for entries in table.values() for key in entries))
    lines = [
        (key, [_shown(key, table[row][key]) if key in table[row] else ABSENT for row in table])
        for key in keys
    ]
    return Grid("", list(table), lines)


def _shown(key: str, value: Any) -> str:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and key.endswith("_bytes"):
        return f"{value / 2**20:.1f} MiB"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _title(report: "Report") -> str:
    return f"{report.suite}, merged by {report.upstream or 'nobody'}"


def with_unit(share: float | None) -> str:
    """Write a share as whole per cent with its unit; None as a dash."""
    return ABSENT if share is None else f"{100 * share:.0f} %"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


_LONGEST_WORD = 9


def broken(name: str) -> str:
    """Break a long head at `_`, `-`, `:`, `+` or blanks into lines of about nine letters."""
    lines = [""]
    word = ""
    for letter in name + " ":
        word += letter
        if letter in "_-:+ ":
            if word.strip() and lines[-1] and len(lines[-1]) + len(word.rstrip()) > _LONGEST_WORD:
                lines.append("")
            lines[-1] += word
            word = ""
    return "\n".join(line.rstrip() for line in lines)
