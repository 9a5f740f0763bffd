"""Tables of text, in the terminal (rich) and as Markdown."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from .long_table import AVERAGE, Row

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

TEXT_WIDTH = 80
ABSENT = "-"
MARKDOWN_COLUMNS = 12
_LONGEST_WORD = 9
WORST = ("worst task", "its gap")
# Escape codes of terminals, and marks that reverse the direction of writing.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class Grid:
    """A table of text: a corner, column heads, and lines of (head, cells)."""

    corner: str
    columns: Sequence[str]
    lines: Sequence[tuple[str, Sequence[str]]]
    best: frozenset[tuple[int, int]] = frozenset()  # (line, column) of highlighted cells
    rules: frozenset[int] = frozenset()  # lines that are followed by a rule

    def transposed(self) -> "Grid":
        """Swap lines and columns. Rules are dropped."""
        lines = [
            (column, [cells[index] for _, cells in self.lines])
            for index, column in enumerate(self.columns)
        ]
        heads = [head for head, _ in self.lines]
        return Grid("", heads, lines, frozenset((column, line) for line, column in self.best))

    def part(self, first: int, last: int | None = None) -> "Grid":
        """Return the columns from `first` to before `last`."""
        columns = self.columns[first:last]
        best = {(line, col - first) for line, col in self.best if 0 <= col - first < len(columns)}
        lines = [(head, cells[first:last]) for head, cells in self.lines]
        return replace(self, columns=columns, lines=lines, best=frozenset(best))

    def split(self, width: int) -> "list[Grid]":
        """Divide the columns among tables that fit `width`, with at least one column each."""
        grids, first = [], 0
        for column in range(1, len(self.columns)):
            if self.part(first, column + 1).width() > width:
                grids.append(self.part(first, column))
                first = column
        return [*grids, self.part(first)]

    def fitting(self, width: int) -> "list[Grid]":
        """Choose a form that fits `width`: unchanged, transposed, or several grids."""
        forms = (form for form in (self, self.transposed()) if form.width() <= width)
        form = next(forms, None)
        return self.split(width) if form is None else [form]

    def for_page(self) -> "Grid":
        """Choose the form for a Markdown page: transposed if there are too many columns."""
        return self if len(self.columns) <= MARKDOWN_COLUMNS else self.transposed()

    def width(self) -> int:
        """Width in terminal columns."""
        widths = [max(map(len, [self.corner, *(head for head, _ in self.lines)]))]
        for index, column in enumerate(self.columns):
            texts = [*_broken(column).splitlines(), *(cells[index] for _, cells in self.lines)]
            widths.append(max(map(len, texts)))
        return sum(widths) + 2 * len(widths) - 2  # two spaces between columns

    def markdown(self) -> str:
        """Render as a Markdown table."""
        lines = [[self.corner, *self.columns]]
        for number, (head, cells) in enumerate(self.lines):
            bold = ((number, column) in self.best for column in range(len(cells)))
            lines.append(
                [head, *(f"**{c}**" if b else c for c, b in zip(cells, bold, strict=True))]
            )
        texts = ["| " + " | ".join(map(_escaped, cells)) + " |" for cells in lines]
        return "\n".join([texts[0], "|:--" + "|--:" * len(self.columns) + "|", *texts[1:]])

    def rich(self) -> "Table":
        """Render for the terminal."""
        from rich import box
        from rich.table import Table

        table = Table(
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            pad_edge=False,
            show_edge=False,
        )
        # Numbers are never cut. If even one column is too wide, the heads of lines are folded.
        table.add_column(_text(self.corner), overflow="fold")
        for column in self.columns:
            table.add_column(_text(_broken(column)), justify="right", no_wrap=True)
        for number, (head, cells) in enumerate(self.lines):
            styles = (
                "bold" if (number, position) in self.best else "" for position in range(len(cells))
            )
            texts = [_text(cell, style) for cell, style in zip(cells, styles, strict=True)]
            table.add_row(_text(head), *texts, end_section=number in self.rules)
        return table


def titled(title: str, grids: Iterable[Grid]) -> "list[Group]":
    """Render grids for the terminal. The first has the title, the others continue it."""
    from rich.console import Group

    # A title of the table itself would be wrapped at the width of the table.
    return [
        Group(_text(title + " (continued)" * bool(number), "table.title"), grid.rich())
        for number, grid in enumerate(grids)
    ]


def console() -> "Console":
    """Return a console on stdout with the width of the terminal, or 80 columns without one."""
    from rich.console import Console

    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=TEXT_WIDTH)


def print_page(tables: Iterable["Group"], lines: Iterable[str]) -> None:
    """Print tables, and sentences without markup or colours."""
    terminal = console()
    for number, table in enumerate(tables):
        terminal.print(*([""] if number else []), table, sep="\n")
    for line in lines:
        terminal.print(_text(line))


def page(*paragraphs: str | Sequence[str]) -> str:
    """Join the paragraphs of a Markdown page. A sequence becomes a list, empty ones are dropped."""
    texts = (part if isinstance(part, str) else bullets(part) for part in paragraphs)
    return without_html("\n\n".join(text for text in texts if text)) + "\n"


def without_codes(text: str) -> str:
    """Return a text for the terminal, with control characters spelt out."""
    return _CONTROL.sub(lambda match: match.group().encode("unicode_escape").decode(), text)


def without_html(text: str) -> str:
    """Return Markdown with HTML, links and images as plain text. The package writes none."""
    return re.sub("<(?=[A-Za-z/!?])", "&lt;", without_codes(text)).replace("](", "]\\(")


def _text(text: str, style: str = "") -> "Text":
    """Return a text whose brackets are not markup."""
    from rich.text import Text

    return Text(without_codes(text), style=style)


def bullets(lines: Iterable[str]) -> str:
    """Return a Markdown list."""
    return "\n".join(f"- {line}" for line in lines)


def percent(value: float | None) -> str:
    """Write a share as per cent with one digit, and None as a dash."""
    return ABSENT if value is None else f"{100 * value:.1f}"


def with_unit(share: float | None) -> str:
    """Write a share as whole per cent with its unit, and None as a dash."""
    return ABSENT if share is None else f"{100 * share:.0f} %"


def short_names(tasks: Sequence[str]) -> dict[str, str]:
    """Drop the prefix (up to an underscore) that all tasks share, to save space."""
    prefix = tasks[0].partition("_")[0] + "_" if tasks else ""
    shared = len(tasks) > 1 and all(
        task.startswith(prefix) and task[len(prefix) :] not in ("", AVERAGE) for task in tasks
    )
    return {task: task.removeprefix(prefix) if shared else task for task in tasks}


def short_blocks(blocks: Sequence[str]) -> list[str]:
    """Drop the parts that all block names share: `encoder.layers.3` becomes `3`."""
    split_names = [block.split(".") for block in blocks]
    if len(blocks) < 2:
        return list(blocks)
    if len(set(map(len, split_names))) > 1:
        columns = zip(*(words[:-1] for words in split_names), strict=False)
        shared = len(list(takewhile(lambda words: len(set(words)) == 1, columns)))
        return [".".join(words[shared:]) for words in split_names]
    differing = [n for n, words in enumerate(zip(*split_names, strict=True)) if len(set(words)) > 1]
    return [".".join(words[position] for position in differing) for words in split_names]


def best_cells(
    values: Sequence[Sequence[float]], eligible: Sequence[bool]
) -> frozenset[tuple[int, int]]:
    """Return positions of the largest value of each column in the eligible lines (ties: all)."""
    best = set()
    for column in range(len(values[0]) if values else 0):
        candidates = {line: cells[column] for line, cells in enumerate(values) if eligible[line]}
        top = max(candidates.values(), default=None)
        best |= {(line, column) for line, value in candidates.items() if value == top}
    return frozenset(best)


def accuracy_grid(
    rows: Sequence[tuple[str, Row, bool]], tasks: Sequence[str], rules: frozenset[int] = frozenset()
) -> Grid:
    """Return accuracy by tasks and average. The best eligible rows are highlighted."""
    values = [[row[key] for key in (*tasks, AVERAGE)] for _, row, _ in rows]
    best = best_cells(values, [eligible for _, _, eligible in rows])
    lines = [(line[0], list(map(percent, cells))) for line, cells in zip(rows, values, strict=True)]
    return Grid("accuracy, %", [*short_names(tasks).values(), AVERAGE], lines, best, rules)


def worst_cells(worst: tuple[str, float | None] | None, tasks: Sequence[str]) -> dict[str, str]:
    """Return a row's worst task and the share of its gap recovered, or dashes."""
    cells = (short_names(tasks)[worst[0]], with_unit(worst[1])) if worst else (ABSENT, ABSENT)
    return dict(zip(WORST, cells, strict=True))


def loss_grid(losses: Mapping[str, Mapping[str, float]], tasks: Sequence[str]) -> Grid:
    """Return loss of rows by tasks and average, with a dash if there is none."""
    keys = [*tasks, AVERAGE]
    lines = [
        (name, [f"{row[key]:.4f}" if key in row else ABSENT for key in keys])
        for name, row in losses.items()
    ]
    return Grid("loss", [*short_names(tasks).values(), AVERAGE], lines).for_page()


def mapping_grid(table: Mapping[str, Mapping[str, Any]]) -> Grid:
    """Return a grid with keys as lines and rows of the report as columns."""
    keys = dict.fromkeys(key for entries in table.values() for key in entries)
    rows = table.values()
    lines = [(key, [_cell_text(key, row.get(key, ABSENT)) for row in rows]) for key in keys]
    return Grid("", list(table), lines)


def _cell_text(key: str, value: Any) -> str:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and key.endswith("_bytes"):
        return f"{value / 2**20:.1f} MiB"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _broken(name: str) -> str:
    """Break a long head at `_`, `-`, `:`, `+` or blanks into lines of about nine letters."""
    lines = [""]
    for word in re.findall(r"[^-_:+ ]*[-_:+ ]|[^-_:+ ]+$", name):
        # A sign such as `+` or `=` stays with the word after it.
        has_word = len(lines[-1].strip()) > 1
        if word.strip() and has_word and len(lines[-1]) + len(word.rstrip()) > _LONGEST_WORD:
            lines.append("")
        lines[-1] += word
    return "\n".join(line.rstrip() for line in lines)
