"""Progress of long work: a bar on a terminal or in a notebook, nothing in a file or pipe."""

import logging
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from tqdm.auto import tqdm
from tqdm.std import tqdm as plain_tqdm

from fusion_bench_featcal.errors.plurals import bytes_text
from fusion_bench_featcal.run.devices import peak_bytes
from fusion_bench_featcal.run.processes import Processes

logger = logging.getLogger(__name__)


def progress_bar(
    items: Iterable[object] | None = None,
    *,
    total: int | None = None,
    what: str = "",
    unit: str = "it",
    show: bool = True,
) -> plain_tqdm:
    """Return a tqdm bar that disappears when its work is done. In a file or pipe it shows nothing.

    Args:
        items: Iterated over by the bar. Without them the caller updates it.
        total: Number of steps, by default the number of items.
        what: Name of the work.
        unit: Name of a step.
        show: Whether to show anything.
    """
    is_live = sys.stderr.isatty() or "ipykernel" in sys.modules
    disable = not (show and is_live)
    return tqdm(items, desc=what, total=total, unit=unit, leave=False, disable=disable)


class Progress:
    """A bar over the visits of tasks to blocks, with the name of the current work."""

    def __init__(
        self,
        processes: Processes,
        device: torch.device,
        blocks: list[str],
        tasks: int,
        *,
        show: bool,
        passes: int = 1,
    ) -> None:
        """Start the bar.

        Args:
            processes: The processes, which name their current work in messages.
            device: Device of the calculation.
            blocks: All blocks.
            tasks: Number of tasks of this process.
            show: Whether to show a bar. Only the first process does.
            passes: Number of calibrations.
        """
        self._processes, self._device, self._blocks = processes, device, blocks
        self._visits = len(blocks) * passes
        show = show and processes.rank == 0
        self.bar = progress_bar(total=self._visits * tasks, unit="visit", show=show)
        self._first = processes.rank == 0

    def resumed(self, finished: int, folder: Path) -> None:
        """Log the number of blocks that an earlier run has finished."""
        if self._first:
            logger.info("resumed: %d of %d blocks from %s", finished, len(self._blocks), folder)

    def set_description(self, work: str) -> None:
        """Set the name of the current work."""
        self._processes.doing = work
        self.bar.set_description(f"FeatCal {work}")

    def step(self) -> None:
        """Count a visit."""
        self.bar.update()

    def finished(self, block: str, seconds: float) -> None:
        """Log time and memory of the first block that was calibrated, and the time left.

        Args:
            block: The block.
            seconds: Its wall-clock seconds.
        """
        if self._first:
            memory = bytes_text(peak_bytes(self._device))
            remaining = seconds * (self._visits - 1 - self._blocks.index(block))
            logger.info(
                "the first block took %s, with at most %s of memory so far; about %s left",
                *(duration(seconds), memory, duration(remaining)),
            )
            self._first = False


def duration(seconds: float) -> str:
    """Return a time in seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
