"""Notes of runs: sentences with a kind, a merger, a row and a task."""

from collections.abc import Iterable
from dataclasses import dataclass

FAILED = "failed"  # a cell of a comparison gave no result
SAMPLES = "samples"  # calibration samples of the test split, or unlike the expert's data
LOSS = "loss"  # a loss that is not finite
AGREEMENT = "agreement"  # agreement with the experts on held-out samples
DRIFT = "drift"  # a task far from its expert
UPDATE = "update"  # a module with a large update
NOTE = "note"  # anything else
DIAGNOSIS = "diagnosis"  # items of a diagnosis
BELOW = "below"  # a task that ends below the merged model
RECORD = "record"  # differences between the files of runs
GAIN = "gain"  # scores before and after, on held-out rows
VERDICT = "verdict"  # the conclusion from the gains
KINDS = (
    FAILED, SAMPLES, LOSS, AGREEMENT, DRIFT, UPDATE, NOTE, DIAGNOSIS, BELOW, RECORD, GAIN, VERDICT,
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
        merger: The upstream merger of the run. In a summary, all mergers whose runs have the note.
    """

    kind: str
    text: str
    row: str = ""
    task: str = ""
    merger: str = ""

    @property
    def sentence(self) -> str:
        """The text with the row's name, for output about one run."""
        return self._named(self.row)

    @property
    def sentence_of_several(self) -> str:
        """The text with the names of mergers and row, for output about several runs."""
        return self._named(*dict.fromkeys((self.merger, self.row)))

    def _named(self, *names: str) -> str:
        named = [name for name in names if name]
        if self.kind == FAILED:
            return f"{', '.join(named)} failed: {self.text}"
        return ": ".join([*named, self.text])


def chosen(notes: Iterable[Note], *without: str) -> list[Note]:
    """Return notes in the order of their kinds, without excluded kinds."""
    remaining = (note for note in notes if note.kind not in without)
    return sorted(remaining, key=lambda note: KINDS.index(note.kind))
