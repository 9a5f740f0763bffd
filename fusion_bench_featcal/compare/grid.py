"""Tables of text, before it is known where they are shown."""

from collections.abc import Sequence
from dataclasses import dataclass

_LONGEST_WORD = 9


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
