"""Peak host memory of this process and its children while something runs."""

import sys
import threading
import time
from types import ModuleType, TracebackType
from typing import Any

from .names import UNAVAILABLE

SAMPLING_SECONDS = 0.02
# Finding children reads the whole process table, and a large child takes long to examine: that is
# done as often as this, or less often, so that it takes a twentieth of the time.
CHILDREN_EVERY_SECONDS = 0.2
_CHILDREN_SHARE = 0.05


class HostMemory:
    """Watches the process tree between `with` and its end.

    What is counted: the resident set of this process, and of each child what it shares with no
    other process (its unique set). So pages that a forked data loader worker still shares with
    this process count once; pages that children share with each other alone do not count.

    Attributes:
        peak: Largest value in bytes; "unavailable" where the system does not say.
        method: "kernel": exact, from the kernel's own record, there were no children; "sampled":
            short peaks are missed; "process lifetime": an upper bound for this process, without
            children; or "unavailable".
    """

    def __init__(self) -> None:
        """Prepare; psutil is looked for now, and sampling left out where it is missing."""
        self.peak: int | str = UNAVAILABLE
        self.method = UNAVAILABLE
        self._sampler = _Sampler()

    def __enter__(self) -> "HostMemory":
        self._before, self._reaped_before = _kernel_peak(), _faults_of_ended_children()
        self._sampler.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        sampled = self._sampler.stop()
        # Children that lived between two samples are seen here.
        had_children = (
            self._sampler.saw_children or _faults_of_ended_children() != self._reaped_before
        )
        self.peak, self.method = best_reading(self._before, _kernel_peak(), sampled, had_children)


def best_reading(
    before: int | None, after: int | None, sampled: int | None, had_children: bool
) -> tuple[int | str, str]:
    """Choose the best statement that the readings allow.

    Args:
        before: This process's record of the kernel before the block, in bytes; None: not known.
        after: The same after it.
        sampled: Largest sample of the process tree; None: not sampled.
        had_children: Whether there were child processes meanwhile.

    Returns:
        Peak in bytes, or "unavailable", and the method.
    """
    # A record that was set inside the block is the block's own peak.
    record = after if before is not None and after is not None and after > before else None
    if record is not None and not had_children:
        return record, "kernel"
    if sampled is not None:
        return max(sampled, record or 0), "sampled"
    if after is not None:
        return after, "process lifetime"
    return UNAVAILABLE, UNAVAILABLE


class _Sampler:
    """Reads the tree's memory from a thread; does nothing where psutil is missing."""

    def __init__(self) -> None:
        try:
            import psutil
        except ImportError:
            self._tree = None
        else:
            self._tree = _ProcessTree(psutil)
        self._peak = 0
        self._children = 0
        self._next_look = 0.0
        self.saw_children = False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="memory-sampler", daemon=True)

    def start(self) -> None:
        if self._tree is not None:
            self._thread.start()

    def stop(self) -> int | None:
        if self._tree is None:
            return None
        self._done.set()
        self._thread.join()
        self._sample(self._tree)
        return self._peak

    def _loop(self) -> None:
        while self._tree is not None and not self._done.is_set():
            self._sample(self._tree)
            self._done.wait(SAMPLING_SECONDS)

    def _sample(self, tree: "_ProcessTree") -> None:
        now = time.monotonic()
        if now >= self._next_look:
            self._children, found = tree.children()
            self.saw_children = self.saw_children or found > 0
            took = time.monotonic() - now
            self._next_look = now + max(CHILDREN_EVERY_SECONDS, took / _CHILDREN_SHARE)
        self._peak = max(self._peak, tree.own() + self._children)


class _ProcessTree:
    def __init__(self, psutil: ModuleType) -> None:
        self._psutil = psutil
        self._process: Any = psutil.Process()

    def own(self) -> int:
        """Resident set of this process."""
        return self._process.memory_info().rss

    def children(self) -> tuple[int, int]:
        """Sum of what each descendant shares with no other process, and how many there are."""
        total = found = 0
        for child in self._process.children(recursive=True):
            try:
                total += child.memory_full_info().uss
            except self._psutil.Error:  # it has ended meanwhile
                continue
            found += 1
        return total, found


def _kernel_peak() -> int | None:
    """Largest resident set of this process so far, in bytes; None where the system is silent."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts kibibytes, macOS bytes.
    return peak if sys.platform == "darwin" else peak * 1024


def _faults_of_ended_children() -> int | None:
    """Page faults of all children that have ended: every child adds some."""
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt
