"""Progress of long work: a bar on a terminal, or at most one line per minute in a file or pipe."""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm.auto import tqdm
from tqdm.std import tqdm as plain_tqdm

_SECONDS = 60.0
"""Shortest time between two lines in a file or pipe."""


def progress_bar(
    items: Iterable[Any] | None = None,
    *,
    total: int | None = None,
    what: str = "",
    unit: str = "it",
    show: bool = True,
) -> plain_tqdm:
    """Return a tqdm bar that disappears when its work is done.

    Args:
        items: Iterated over by the bar. Without them the caller updates it.
        total: Number of steps, by default the number of items.
        what: Name of the work.
        unit: Name of a step.
        show: Whether to show anything.
    """
    is_live = sys.stderr.isatty() or "ipykernel" in sys.modules
    rate = {} if is_live else {"mininterval": _SECONDS, "miniters": 1, "delay": _SECONDS}
    return tqdm(items, desc=what, total=total, unit=unit, leave=False, disable=not show, **rate)


class Progress:
    """A bar over the visits of tasks to blocks, with the name of the current work."""

    def __init__(self, processes: Any, visits: int, *, show: bool) -> None:
        """Start the bar.

        Args:
            processes: The processes, which report their current work to one another.
            visits: Number of visits.
            show: Whether to show a bar. Only the first process does.
        """
        self._processes = processes
        self.bar = progress_bar(total=visits, unit="visit", show=show and processes.rank == 0)

    def at(self, work: str) -> None:
        """Set the name of the current work."""
        self._processes.doing = work
        self.bar.set_description(f"FeatCal {work}", refresh=sys.stderr.isatty())

    def step(self) -> None:
        """Count a visit."""
        self.bar.update()
