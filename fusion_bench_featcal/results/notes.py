"""Notes of runs: sentences with a kind, a merger, a model and a task."""

from collections.abc import Iterable
from dataclasses import dataclass

VERDICT = "verdict"  # the conclusion, and the gain of each task on held-out examples
FAILED = "failed"  # a run of a comparison gave no result
WARNING = "warning"  # inputs, values or updates to look at, and tasks below the merged model
NOTE = "note"  # anything else
KINDS = (VERDICT, FAILED, WARNING, NOTE)
"""All kinds, in display order. Another kind in a file counts as a note."""


@dataclass(frozen=True)
class Note:
    """A sentence and its subject. A field that does not apply is "".

    Attributes:
        kind: One of `KINDS`.
        text: The sentence.
        row: Name of the model.
        task: Its task.
        merger: The upstream merger of the run.
        point: Settings of the model that differ between joined runs, as text, set by `join`.
    """

    kind: str
    text: str
    row: str = ""
    task: str = ""
    merger: str = ""
    point: str = ""

    @property
    def is_conclusion(self) -> bool:
        """True for the verdict itself, which concerns no single task."""
        return self.kind == VERDICT and not self.task

    @property
    def sentence(self) -> str:
        """The text after the model's name, for output about one merger."""
        return self.with_names(self.row)

    def with_names(self, *names: str) -> str:
        """Return the text after names, such as those of its merger and model."""
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
    order = {kind: index for index, kind in enumerate(KINDS)}
    chosen = sorted(notes, key=lambda note: order.get(note.kind, len(order)))
    several = len({note.merger for note in chosen if note.merger}) > 1
    texts = (n.with_names(n.merger, n.row) if several else n.sentence for n in chosen)
    return list(dict.fromkeys(texts))
