"""How long a device works on something, without the host waiting for it."""

import time

import torch


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
