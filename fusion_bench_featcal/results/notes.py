"""Notes of runs: sentences with a kind, a merger, a row and a task."""

from collections.abc import Iterable
from dataclasses import dataclass

VERDICT = "verdict"  # the conclusion, and the gain of each task on held-out rows
FAILED = "failed"  # a cell of a comparison gave no result
WARNING = "warning"  # inputs, values or updates to look at, and tasks below the merged model
NOTE = "note"  # anything else
KINDS = (VERDICT, FAILED, WARNING, NOTE)
"""All kinds, in display order. Another kind in a file counts as a note."""


@dataclass(frozen=True)
class Note:
    """A sentence and its subject. A field that does not apply is empty.

    Attributes:
        kind: One of `KINDS`.
        text: The sentence.
        row: Its row.
        task: Its task.
        merger: The upstream merger of the run.
        point: Settings of its rows that differ between joined runs, as text, set by `join`.
    """

    kind: str
    text: str
    row: str = ""
    task: str = ""
    merger: str = ""
    point: str = ""

    @property
    def is_conclusion(self) -> bool:
        """True for the verdict itself, which is on no single task."""
        return self.kind == VERDICT and not self.task

    @property
    def sentence(self) -> str:
        """The text with the row's name, for output about one merger."""
        return self.after(self.row)

    def after(self, *names: str) -> str:
        """Return the text behind names, such as those of its merger and row."""
        texts = [name for name in dict.fromkeys(names) if name]
        if self.point:
            texts = [*texts[:-1], f"{texts[-1]} ({self.point})"] if texts else [self.point]
        if self.kind == FAILED:
            return f"{', '.join(texts)} failed: {self.text}"
        return ": ".join([*texts, self.text])


def notes_of(texts: Iterable[str], kind: str = NOTE) -> list[Note]:
    """Return texts as notes of one kind."""
    return [Note(kind, text) for text in texts]


def sentences_of(notes: Iterable[Note]) -> list[str]:
    """Return notes as sentences in the order of their kinds, each with its mergers."""
    order = {kind: number for number, kind in enumerate(KINDS)}
    chosen = sorted(notes, key=lambda note: order.get(note.kind, len(order)))
    several = len({note.merger for note in chosen if note.merger}) > 1
    texts = (note.after(note.merger, note.row) if several else note.sentence for note in chosen)
    return list(dict.fromkeys(texts))
