"""The end of a Hydra job, when FusionBench has printed all it prints and results are shown."""

import sys
from collections.abc import Callable

Show = Callable[[], object]
"""Prints results."""

_waiting: list[Show] = []
_jobs: list[bool] = []


def begin_job() -> None:
    """Collect what is to be shown at the end of the job that begins."""
    _waiting.clear()
    _jobs[:] = [True]


def end_job() -> None:
    """Show what waits, in order."""
    _jobs.clear()
    shows = _waiting.copy()
    _waiting.clear()
    sys.stderr.flush()
    for show in shows:
        show()
    sys.stdout.flush()


def at_the_end(show: Show) -> bool:
    """Show something at the end of the job.

    Args:
        show: Shows it.

    Returns:
        False, and nothing is kept, where no job with our Hydra callback is under way.
    """
    if _jobs:
        _waiting.append(show)
    return bool(_jobs)
