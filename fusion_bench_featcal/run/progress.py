"""Progress of long work: a bar on a terminal, or at most one line per minute in a file or pipe."""

import logging
import sys
import time
from collections.abc import Iterable
from typing import Any

import torch
from tqdm.auto import tqdm
from tqdm.std import tqdm as plain_tqdm

from fusion_bench_featcal.plurals import bytes_text
from fusion_bench_featcal.run.memory import peak_bytes

logger = logging.getLogger(__name__)

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

    def __init__(
        self, processes: Any, device: torch.device, blocks: int, tasks: int, *, show: bool
    ) -> None:
        """Start the bar.

        Args:
            processes: The processes, which name their current work in messages.
            device: Device of the calculation.
            blocks: Number of blocks.
            tasks: Number of tasks of this process.
            show: Whether to show a bar. Only the first process does.
        """
        self._processes, self._device, self._blocks = processes, device, blocks
        show = show and processes.rank == 0
        self.bar = progress_bar(total=blocks * tasks, unit="visit", show=show)
        self._first = show

    def at(self, work: str) -> None:
        """Set the name of the current work."""
        self._processes.doing = work
        self.bar.set_description(f"FeatCal {work}", refresh=sys.stderr.isatty())

    def step(self) -> None:
        """Count a visit."""
        self.bar.update()

    def finished(self, seconds: float) -> None:
        """Log time and memory of the first block that was calibrated, and the time for all.

        Args:
            seconds: Wall-clock seconds of a block.
        """
        if self._first:
            memory = bytes_text(peak_bytes(self._device))
            estimate = time.strftime("%H:%M:%S", time.gmtime(seconds * self._blocks))
            logger.info(
                "the first block took %.1f s, with at most %s of %s memory so far; all %d take "
                "about %s (h:m:s)",
                *(seconds, memory, self._device.type, self._blocks, estimate),
            )
            self._first = False
