"""Accounts of one task's visit to one block."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fusion_bench_featcal.core.drift import DriftSums
from fusion_bench_featcal.core.finite import read_back
from fusion_bench_featcal.engine.shares import interleaved

RowSums = tuple[Tensor, int]
"""Sums of drift over rows, as `sum_drift` gives them, and the number of rows."""


class Stopwatch:
    """Runs from its making to `stop`.

    What is given to a GPU is only queued: marks in its queue tell when the work was done.
    """

    def __init__(self, device: torch.device) -> None:
        """Start.

        Args:
            device: Where is computed.
        """
        self._queue = _Queue(device) if device.type == "cuda" else None
        self._start = time.perf_counter()
        self._taken = 0.0

    def stop(self) -> None:
        """Stop; on a GPU, when it has come so far."""
        self._taken = time.perf_counter() - self._start
        if self._queue is not None:
            self._queue.stop()

    @property
    def seconds(self) -> float:
        """Seconds between start and stop. On a GPU the host waits for the stop."""
        return self._taken if self._queue is None else self._queue.seconds()


class _Queue:
    """Two marks in a GPU's queue of work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start, self._stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._start.record(torch.cuda.current_stream(device))

    def stop(self) -> None:
        self._stop.record(torch.cuda.current_stream(self._device))

    def seconds(self) -> float:
        self._stop.synchronize()
        return self._start.elapsed_time(self._stop) / 1000


@dataclass(kw_only=True)
class Visit:
    """One process's work on its batches of a task, as it stands on the device.

    Attributes:
        samples: Number of samples.
        rows: Number of positions that count.
        watch: How long they took.
        expert_bytes: Bytes of the expert that were read.
        before: Drift before the update, batch by batch; empty where it is not logged.
        after: Drift after it.
    """

    samples: int
    rows: int
    watch: Stopwatch
    expert_bytes: int
    before: list[RowSums]
    after: list[RowSums] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Account:
    """A process's account of a visit: numbers, as in `Visit`."""

    samples: int
    rows: int
    seconds: float
    expert_bytes: int
    before: list[DriftSums]
    after: list[DriftSums]


def accounts_of(visits: Mapping[str, Visit]) -> dict[str, Account]:
    """Make the accounts of a block's visits, by task; the host looks at the drift here."""
    parts = [part for v in visits.values() for part in (*v.before, *v.after)]
    told = iter(read_back([sums for sums, _ in parts]))

    def drift(parts: Sequence[RowSums]) -> list[DriftSums]:
        return [DriftSums(next(told), next(told), next(told), float(rows)) for _, rows in parts]

    return {
        task: Account(
            samples=visit.samples,
            rows=visit.rows,
            seconds=visit.watch.seconds,
            expert_bytes=visit.expert_bytes,
            before=drift(visit.before),
            after=drift(visit.after),
        )
        for task, visit in visits.items()
    }


def task_record(block: str, task: str, parts: Sequence[Account]) -> dict[str, Any]:
    """The log record of a task in a block.

    Args:
        block: The block.
        task: The task.
        parts: What each of its processes has to tell; the first is the leader, whose time and
            bytes stand for all.
    """
    return {
        "block": block,
        "task": task,
        "samples": sum(part.samples for part in parts),
        "rows": sum(part.rows for part in parts),
        **_drift_record("before", interleaved([part.before for part in parts])),
        "seconds": parts[0].seconds,
        "expert_bytes": parts[0].expert_bytes,
        **_drift_record("after", interleaved([part.after for part in parts])),
    }


def _drift_record(when: str, drift: Sequence[DriftSums]) -> dict[str, float | None]:
    """Mean L2 drift over rows, and root mean square drift relative to the expert's features."""
    if not drift:
        return {f"drift_{when}": None, f"relative_drift_{when}": None}
    norms, squares, expert_squares, rows = (sum(column) for column in zip(*drift, strict=True))
    relative = (squares / expert_squares) ** 0.5 if expert_squares > 0 else None
    return {f"drift_{when}": norms / rows, f"relative_drift_{when}": relative}
