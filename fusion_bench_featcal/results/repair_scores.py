"""Scores of a repaired model beside those of its experts and of the merged model."""

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

from .advice import REJECT, Advice, Averages, Comparison, advise, task_verdicts
from .columns import AVERAGE
from .frame import is_lower_better
from .joining import grouped
from .notes import NOTE, Note
from .statistics import Difference
from .tables import ABSENT, Table, Unit, print_lines


class RepairScores(NamedTuple):
    """Scores of a repair on test examples.

    Attributes:
        advice: What to do.
        comparisons: Scores of expert, merged and repaired model for each task with an expert.
        gain: Average of the gains over these tasks, or None if their metrics differ.
        further: The same as `comparisons` for tasks without an expert, which the advice does not
            count. The score of the base, if there is one, stands in place of the expert's.
    """

    advice: Advice
    comparisons: Sequence[Comparison] = ()
    gain: Difference | None = None
    further: Sequence[Comparison] = ()

    @classmethod
    def advised(
        cls,
        comparisons: Sequence[Comparison],
        averages: Averages,
        further: Sequence[Comparison] = (),
        **options: object,
    ) -> "RepairScores":
        """Return scores with their advice. The options are those of `advise`."""
        advice = advise(comparisons, averages, further=further, **options)  # type: ignore[arg-type]
        return cls(advice, comparisons, averages.gain, further)

    def without_needless(self, notes: Iterable[Note]) -> list[Note]:
        """Return notes without those on tasks that are as good as their experts.

        If the model should not be used, notes on how to serve a task better are left out, too.
        """
        needless = {
            c.task
            for c in self.comparisons
            if self.advice.kind == REJECT or (c.rest and not c.rest.is_above())
        }
        return [note for note in notes if note.kind != NOTE or note.task not in needless]

    def tables(self) -> list[Table]:
        """Return a table for each metric, with a line per task, and tables of further tasks."""
        return [
            *_make_tables(self.comparisons, self.gain),
            *_make_tables(self.further, None, "base", "not calibrated on: "),
        ]

    def show(self) -> None:
        """Print the advice and the tables."""
        print_lines([self.advice.sentence])
        for table in self.tables():
            table.show()


def _make_tables(
    comparisons: Sequence[Comparison],
    gain: Difference | None,
    reference: str = "expert",
    title: str = "",
) -> list[Table]:
    verdicts, tables = task_verdicts(comparisons), list[Table]()
    heads = ["test\nexamples", reference, "merged", "repaired", "gain", "verdict"]
    for metric, group in grouped(comparisons, lambda comparison: comparison.metric).items():
        unit = Unit.of(metric)
        lines = [
            (c.task, [str(c.examples or ABSENT), *map(unit.value, (c.expert, c.merged, c.repaired)),
                      unit.difference(c.gain), verdicts[c.task]])
            for c in group
        ]  # fmt: skip
        if len(group) > 1 and gain is not None:
            columns = zip(*((c.expert, c.merged, c.repaired) for c in group), strict=True)
            means = [None if None in column else fmean(column) for column in columns]
            lines.append((AVERAGE, [ABSENT, *map(unit.value, means), unit.difference(gain), ""]))
        name = f"{title}{metric}{', %' if unit.factor == 100 else ''}"
        name += " (lower is better)" * is_lower_better(metric)
        tables.append(Table(name, heads, lines))
    return tables
