"""Progress of long work: a bar on a terminal; in a file or pipe a log line a minute at most."""

import io
import logging
import sys
from collections.abc import Iterable
from typing import Any

from tqdm.auto import tqdm
from tqdm.std import tqdm as plain_tqdm

log = logging.getLogger(__name__)

_SECONDS = 60.0
"""Least time between two lines."""


def progress_bar(
    items: Iterable[Any] | None = None,
    *,
    total: int | None = None,
    what: str = "",
    unit: str = "it",
    show: bool = True,
) -> plain_tqdm:
    """A bar that goes away when its work is done.

    Args:
        items: Iterated over by the bar; None: the caller updates it.
        total: Number of steps; None: as many as there are items.
        what: The work.
        unit: A step.
        show: Whether to show anything.

    Returns:
        The bar, with tqdm's interface.
    """
    if show and not (sys.stderr.isatty() or "ipykernel" in sys.modules):
        return _Lines(items, desc=what, total=total, unit=unit)
    return tqdm(items, desc=what, total=total, unit=unit, leave=False, disable=not show)


class _Lines(plain_tqdm):
    """A bar that writes to the log, and nothing of what is over within a minute."""

    def __init__(self, items: Iterable[Any] | None, **keys: Any) -> None:
        rate = {"mininterval": _SECONDS, "miniters": 1, "delay": _SECONDS}
        super().__init__(items, file=io.StringIO(), leave=False, disable=False, **rate, **keys)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Log how far it is; an empty message would only clear the bar."""
        if msg is None:
            log.info("%s%s of %s %ss%s", self.desc, self.n, self.total, self.unit, self._left())

    def _left(self) -> str:
        """Return the time that the remaining steps will take at the pace so far."""
        if not self.n or not self.total:
            return ""
        seconds = self.format_dict["elapsed"] / self.n * (self.total - self.n)
        return f", {self.format_interval(seconds)} left"

    def set_description(self, desc: str | None = None, refresh: bool | None = False) -> None:
        """Name the work, without a line of its own."""
        super().set_description(desc, refresh=False)


class Progress:
    """A bar over the visits of tasks to blocks, and the name of the work in hand."""

    def __init__(self, processes: Any, visits: int, *, show: bool) -> None:
        """Start.

        Args:
            processes: The processes, which name the work in hand to one another.
            visits: Number of visits.
            show: Whether to show a bar. Only the first process does.
        """
        self._processes = processes
        self.bar = progress_bar(total=visits, unit="visit", show=show and processes.rank == 0)

    def at(self, place: str) -> None:
        """Name the work in hand."""
        self._processes.doing = place
        self.bar.set_description(f"FeatCal {place}")

    def step(self) -> None:
        """Count a visit."""
        self.bar.update()
