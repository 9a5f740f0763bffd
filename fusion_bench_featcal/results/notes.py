"""Notes of runs: sentences with a kind, a merger, a row and a task."""

from collections.abc import Iterable
from dataclasses import dataclass

FAILED = "failed"  # a cell of a comparison gave no result
SAMPLES = "samples"  # calibration samples of the test split, or unlike the expert's data
LOSS = "loss"  # a value that is not finite
UPDATE = "update"  # a module with a large update
NOTE = "note"  # anything else
DIAGNOSIS = "diagnosis"  # items of a diagnosis
BELOW = "below"  # a task that ends below the merged model
RECORD = "record"  # differences between runs
GAIN = "gain"  # scores before and after, on held-out rows
VERDICT = "verdict"  # the conclusion from the gains
KINDS = (
    FAILED, SAMPLES, LOSS, UPDATE, NOTE, DIAGNOSIS, BELOW, RECORD, GAIN, VERDICT,
)  # fmt: skip
"""All kinds, in display order."""


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
    def sentence(self) -> str:
        """The text with the row's name, for output about one merger."""
        return self._after(self.row)

    @property
    def sentence_of_several(self) -> str:
        """The text with the names of merger and row, for output about several mergers."""
        return self._after(*dict.fromkeys((self.merger, self.row)))

    def _after(self, *names: str) -> str:
        texts = [name for name in names if name]
        if self.point:
            texts = [*texts[:-1], f"{texts[-1]} ({self.point})"] if texts else [self.point]
        if self.kind == FAILED:
            return f"{', '.join(texts)} failed: {self.text}"
        return ": ".join([*texts, self.text])


def sentences_of(notes: Iterable[Note], *without: str) -> list[str]:
    """Return notes as sentences in the order of their kinds, each with its mergers.

    Args:
        notes: The notes.
        *without: Kinds that are left out.
    """
    chosen = sorted(
        (note for note in notes if note.kind not in without), key=lambda n: KINDS.index(n.kind)
    )
    several = len({note.merger for note in chosen if note.merger}) > 1
    texts = (note.sentence_of_several if several else note.sentence for note in chosen)
    return list(dict.fromkeys(texts))
