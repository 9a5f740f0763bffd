"""Numbers as text, and tables of text: on the terminal (rich) and as Markdown."""

import math
import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from .names import NO_EXPERT, PERCENTAGES
from .statistics import Difference

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

ABSENT = "-"
_WIDTH = 80
_LATEX = {
    **{mark: f"\\{mark}" for mark in "&%$#_{}"}, "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$", "|": "$|$",
    "±": r"$\pm$", "…": r"\ldots{}", "\n": " ",
}  # fmt: skip
# Escape codes of terminals, and marks that reverse the direction of writing.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class Table:
    """A table of text: a title, heads of columns, and lines of (head, cells).

    Lines whose head begins with `+ ` belong to the line before. Other lines start a section. The
    first `fixed` columns are repeated if a wide table is divided. The best values of columns are
    `bold`: pairs of the index of a line and of a column.
    """

    title: str
    heads: Sequence[str]
    lines: Sequence[tuple[str, Sequence[str]]]
    fixed: int = 0
    bold: Collection[tuple[int, int]] = ()

    def columns(self, first: int, last: int) -> "Table":
        """Return a table of the fixed columns and of columns `first` to `last - 1`."""
        chosen = [*range(self.fixed), *range(max(first, self.fixed), last)]
        lines = [(head, [cells[i] for i in chosen]) for head, cells in self.lines]
        bold = {(line, chosen.index(i)) for line, i in self.bold if i in chosen}
        return replace(self, heads=[self.heads[i] for i in chosen], lines=lines, bold=bold)

    def split_tasks(self, count: int) -> tuple["Table", "Table"]:
        """Return the columns before those of the last `count` tasks, and those of the tasks.

        Both tables have the fixed columns and the one after them, the average.
        """
        both, first = replace(self, fixed=self.fixed + 1), len(self.heads) - count
        return both.columns(0, first), both.columns(first, len(self.heads))

    def width(self) -> int:
        """Width on the terminal."""
        widths = [max((len(head) for head, _ in self.lines), default=0)]
        for index, head in enumerate(self.heads):
            texts = [*head.split("\n"), *(cells[index] for _, cells in self.lines)]
            widths.append(max(map(len, texts)))
        return sum(widths) + 2 * len(widths) - 2  # two spaces between columns

    def fitting(self, width: int) -> "list[Table]":
        """Divide the columns among tables of at most `width`, with at least one column each."""
        tables, first = [], self.fixed
        for last in range(first + 1, len(self.heads)):
            if self.columns(first, last + 1).width() > width:
                tables.append(self.columns(first, last))
                first = last
        return [*tables, self.columns(first, len(self.heads))]

    def markdown(self) -> str:
        """Return a Markdown table."""
        lines = [["", *(head.replace("\n", " ") for head in self.heads)]]
        lines += [[head, *cells] for head, cells in self.lines]
        texts = [
            " | ".join(t.replace("|", "\\|").replace("\n", " ") for t in line) for line in lines
        ]
        texts = [f"| {text} |" for text in texts]
        return "\n".join([texts[0], "|:--" + "|--:" * len(self.heads) + "|", *texts[1:]])

    def latex(self) -> str:
        """Return a LaTeX table, which needs the package booktabs."""
        rows = [["", *map(latex_text, self.heads)]]
        for line, (head, cells) in enumerate(self.lines):
            texts = ["--" if text in (ABSENT, "") else latex_text(text) for text in cells]
            texts = [
                rf"\textbf{{{text}}}" if (line, index) in self.bold else text
                for index, text in enumerate(texts)
            ]
            rows.append([latex_text(head), *texts])
        first, *others = [" & ".join(row) + r" \\" for row in rows]
        return "\n".join([
            r"\begin{table}", rf"\caption{{{latex_text(self.title)}}}",
            rf"\begin{{tabular}}{{l{'r' * len(self.heads)}}}", r"\toprule", first, r"\midrule",
            *others, r"\bottomrule", r"\end{tabular}", r"\end{table}",
        ])  # fmt: skip

    def show(self) -> None:
        """Print the table, divided if it is wider than the terminal."""
        from rich import box
        from rich.table import Table as RichTable

        terminal = console()
        for index, part in enumerate(self.fitting(terminal.width)):
            terminal.print(_text(self.title + " (continued)" * bool(index), "bold"))
            table = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False,
                              show_edge=False)  # fmt: skip
            table.add_column("", overflow="fold")
            for head in part.heads:
                table.add_column(_text(head), justify="right", no_wrap=True)
            following = [head for head, _ in part.lines[1:]]
            for (head, cells), after in zip(part.lines, [*following, ""], strict=True):
                ends = bool(after) and head.startswith("+ ") and not after.startswith("+ ")
                table.add_row(_text(head), *map(_text, cells), end_section=ends)
            terminal.print(table)


def console() -> "Console":
    """Return a console on stdout, as wide as the terminal or COLUMNS, else 80 columns wide."""
    from rich.console import Console

    terminal = Console()
    is_sized = terminal.is_terminal or "COLUMNS" in os.environ
    return terminal if is_sized else Console(width=_WIDTH)


def print_lines(lines: Iterable[str]) -> None:
    """Print sentences without markup or colours. Only a terminal wraps them."""
    terminal = console()
    for line in lines:
        terminal.print(_text(line), soft_wrap=not terminal.is_terminal)


def page(*paragraphs: str | Sequence[str]) -> str:
    """Join the paragraphs of a Markdown page. A sequence becomes a list, empty ones are dropped."""
    texts = (
        part if isinstance(part, str) else "\n".join(f"- {line}" for line in part)
        for part in paragraphs
    )
    return without_html("\n\n".join(text for text in texts if text)) + "\n"


def without_codes(text: str) -> str:
    """Return a text for the terminal, with control characters spelt out."""
    return _CONTROL.sub(lambda match: match.group().encode("unicode_escape").decode(), text)


def latex_text(text: str) -> str:
    """Return a text for LaTeX, with its special characters escaped and true minus signs."""
    escaped = "".join(_LATEX.get(letter, letter) for letter in without_codes(text))
    return re.sub(r"(?<![\w.-])-(?=\d)", "$-$", escaped)


def latex_comment(lines: Iterable[str]) -> str:
    """Return sentences as comments of LaTeX."""
    return re.sub("(?m)^", "% ", "\n".join(map(without_codes, lines)))


def without_html(text: str) -> str:
    """Return Markdown with HTML, links and images as plain text. The package writes none."""
    return re.sub("<(?=[A-Za-z/!?])", "&lt;", without_codes(text)).replace("](", "]\\(")


def _text(text: str, style: str = "") -> "Text":
    """Return a text whose brackets are not markup."""
    from rich.text import Text

    return Text(without_codes(text), style=style)


class Unit(NamedTuple):
    """Factor and number of digits of a metric in tables: per cent, or plain with three digits."""

    factor: float
    digits: int

    @classmethod
    def of(cls, metric: str) -> "Unit":
        """Return the unit: per cent for accuracies and the like, plain for losses and others."""
        return cls(100, 1) if metric.removesuffix(NO_EXPERT) in PERCENTAGES else cls(1, 3)

    def value(self, number: float | None) -> str:
        """Write a value."""
        return ABSENT if number is None else f"{self.factor * number:.{self.digits}f}"

    def difference(self, gain: Difference) -> str:
        """Write a difference ± half of its interval, if it has one."""
        has_interval = gain.half is not None and not math.isnan(gain.half)
        half = f" ± {self.value(gain.half)}" if has_interval else ""
        return f"{self.factor * gain.value:+z.{self.digits}f}{half}"

    def gain(self, gain: Difference | None, seeds: int = 1) -> str:
        """Write a difference ± half of its interval, or with the number of seeds without one.

        `seeds` is the number of the model's seeds. If the difference has fewer, it names its own.
        """
        if gain is None:
            return ABSENT
        text = self.difference(gain)
        is_plain = gain.seeds >= seeds and (gain.half is not None or gain.seeds == 1)
        return text if is_plain else f"{text}, {gain.seeds} seeds"


def p_text(p: float | None) -> str:
    """Write a p-value, and small ones as a bound, because they rest on the normal distribution."""
    return ABSENT if p is None else "< 0.001" if p < 0.001 else f"{p:.2g}"


def share_text(share: float | None) -> str:
    """Write a share as whole per cent, and None as a dash."""
    return ABSENT if share is None or share != share else f"{100 * share:.0f} %"
