"""Numbers as text, for tables, sentences and figures."""

from typing import NamedTuple

from .run import ACCURACY
from .statistics import Difference
from .tables import ABSENT


class Unit(NamedTuple):
    """Factor and number of digits of a metric in tables: per cent, or plain with three digits."""

    factor: float
    digits: int

    @classmethod
    def of(cls, metric: str) -> "Unit":
        """Return the unit: per cent for accuracies, plain for others, which have no bounds."""
        return cls(100, 1) if metric == ACCURACY else cls(1, 3)

    def value(self, number: float | None) -> str:
        """Write a value."""
        return ABSENT if number is None else f"{self.factor * number:.{self.digits}f}"

    def difference(self, gain: Difference) -> str:
        """Write a difference ± half of its interval, if it has one."""
        half = "" if gain.half is None else f" ± {self.value(gain.half)}"
        return f"{self.factor * gain.value:+z.{self.digits}f}{half}"

    def gain(self, gain: Difference | None, seeds: int = 1) -> str:
        """Write a difference ± half of its interval, or with the number of seeds without one.

        `seeds` is the number of the row's seeds, which is named where the difference has fewer.
        """
        if gain is None:
            return ABSENT
        text = self.difference(gain)
        is_plain = gain.seeds >= seeds and (gain.half is not None or gain.seeds == 1)
        return text if is_plain else f"{text}, {gain.seeds} seeds"


def share_text(share: float | None) -> str:
    """Write a share as whole per cent, and nothing as a dash."""
    return ABSENT if share is None or share != share else f"{100 * share:.0f} %"
