"""Progress of long work: a bar on a terminal; in a file or pipe a line a minute at most."""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm.auto import tqdm
from tqdm.std import tqdm as plain_tqdm

_SECONDS = 60.0
"""Least time between two lines in a file or pipe."""


def progress_bar(
    items: Iterable[Any] | None = None,
    *,
    total: int | None = None,
    what: str = "",
    unit: str = "it",
    show: bool = True,
) -> plain_tqdm:
    """Return a bar of tqdm that goes away when its work is done.

    Args:
        items: Iterated over by the bar; None: the caller updates it.
        total: Number of steps; None: as many as there are items.
        what: The work.
        unit: A step.
        show: Whether to show anything.
    """
    is_live = sys.stderr.isatty() or "ipykernel" in sys.modules
    rate = {} if is_live else {"mininterval": _SECONDS, "miniters": 1, "delay": _SECONDS}
    return tqdm(items, desc=what, total=total, unit=unit, leave=False, disable=not show, **rate)


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
        self.bar.set_description(f"FeatCal {place}", refresh=sys.stderr.isatty())

    def step(self) -> None:
        """Count a visit."""
        self.bar.update()
