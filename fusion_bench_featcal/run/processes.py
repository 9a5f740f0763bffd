"""Several processes that work on one calibration, joined by `torch.distributed`.

Every exchange of tensors follows a `gather` or a barrier over gloo, in which a process that has
ended is noticed at once.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fusion_bench_featcal.errors import LostProcessError
from fusion_bench_featcal.errors.words import option

Key = TypeVar("Key")
Value = TypeVar("Value")

PATIENCE = timedelta(days=7)
"""Time that a process waits for the others, one of which may be evaluating models. A closed
connection is noticed at once."""

SMALL_BYTES = 2**20
"""Size up to which tensors are joined for an exchange, because each exchange has a latency."""


class Processes:
    """Processes that share one calibration. This base class is one process alone.

    Attributes:
        rank: This process's number, from 0.
        size: Number of processes.
        exchanged_bytes: Bytes of tensors that this process sent or received to sum or spread them.
        doing: Current work, for messages.
    """

    rank = 0
    size = 1
    exchanged_bytes = 0
    doing = "the start"

    def own_tasks(self, tasks: Iterable[str]) -> list[str]:
        """Return the tasks whose sums over samples are completed in this process."""
        return [*tasks][self.rank :: self.size]

    def divides_batches(self, tasks: Collection[str]) -> bool:
        """Return whether the batches of each task are divided among the processes.

        If the number of tasks is a multiple of the number of processes, each process has all
        batches of its own tasks instead, and sums of one task need no exchange.
        """
        return len(tasks) % self.size > 0

    def sampled_tasks(self, tasks: Collection[str]) -> list[str]:
        """Return the tasks of which this process may have samples."""
        return [*tasks] if self.divides_batches(tasks) else self.own_tasks(tasks)

    def gather(self, value: Value) -> list[Value]:
        """Return every process's value, by rank. A barrier for all processes.

        Raises:
            LostProcessError: If a process has ended.
        """
        return [value]

    def gather_dict(self, items: Mapping[Key, Value]) -> dict[Key, Value]:
        """Return the items of every process's mapping. A barrier for all processes."""
        return {key: value for part in self.gather(items) for key, value in part.items()}

    def value_of_min(self, priority: Any, value: Value) -> Value:
        """Return the value of the process with the least priority. A barrier for all processes."""
        return min(self.gather((priority, value)), key=lambda pair: pair[0])[1]

    def sum_counts(self, counts: Mapping[Key, int]) -> dict[Key, int]:
        """Return the sums of every process's counts, key by key. A barrier for all processes."""
        total = Counter[Key]()
        for process_counts in self.gather(counts):
            total.update(process_counts)
        return dict(total)

    def compute_all(self, count: int, compute: Callable[[int], Value]) -> list[Value]:
        """Return `compute(0), ..., compute(count - 1)`, each computed by one of the processes.

        A barrier for all processes.
        """
        values = self.gather([compute(n) for n in range(self.rank, count, self.size)])
        return [values[n % self.size][n // self.size] for n in range(count)]

    def all_reduce_sum(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors, in place, by their sums over all processes, of equal bits in each."""

    def reduce_sum(self, tensors: Iterable[Tensor], target: int) -> None:
        """Replace tensors of process `target`, in place, by their sums over all processes.

        In other processes their values are undefined afterwards.
        """

    def leave(self) -> None:
        """End the connection of the processes. A barrier for all processes."""

    @property
    def cost(self) -> dict[str, float]:
        """Numbers about several processes for a report. Empty for one process."""
        if self.size == 1:
            return {}
        return {"processes": self.size, "exchanged_bytes": self.exchanged_bytes}

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Fill a contiguous tensor with the content of the tensor in process `source`."""


class TorchProcesses(Processes):
    """The processes of an initialised `torch.distributed`.

    Tensors use its default backend (gloo for CPUs, NCCL for CUDA), everything else gloo.
    """

    def __init__(self, *, patience: timedelta = PATIENCE) -> None:
        """Join the processes. All of them must do so.

        Args:
            patience: Longest wait for another process that is alive.
        """
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._gloo: Any = dist.new_group(backend="gloo", timeout=patience)

    def gather(self, value: Value) -> list[Value]:
        """Exchange values over gloo."""
        values: list[Any] = [None] * self.size
        with self._contact():
            dist.all_gather_object(values, value, group=self._gloo)
        return values

    def all_reduce_sum(self, tensors: Iterable[Tensor]) -> None:
        """Sum tensors over the processes."""
        self._sum(tensors, dist.all_reduce)

    def reduce_sum(self, tensors: Iterable[Tensor], target: int) -> None:
        """Sum tensors over the processes, in one of them."""
        self._sum(tensors, partial(dist.reduce, dst=target))

    def _sum(self, tensors: Iterable[Tensor], collective: Callable[[Tensor], Any]) -> None:
        with self._contact():  # a process that has ended is noticed here, before the collective
            dist.barrier(group=self._gloo)
        for joined in join_small(tensors):
            is_single = len(joined) == 1
            buffer = joined[0].contiguous() if is_single else torch.cat([t.ravel() for t in joined])
            with self._contact():
                collective(buffer)
            if buffer is not joined[0]:
                sizes = [tensor.numel() for tensor in joined]
                for tensor, total in zip(joined, buffer.ravel().split(sizes), strict=True):
                    tensor.copy_(total.view(tensor.shape))
            self.exchanged_bytes += buffer.nbytes

    def leave(self) -> None:
        """Wait for all processes, and end the process group."""
        self.gather(None)
        dist.destroy_process_group()

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Spread a tensor over all processes."""
        with self._contact():
            dist.broadcast(tensor, src=source)
        self.exchanged_bytes += tensor.nbytes

    @contextmanager
    def _contact(self) -> Iterator[None]:
        """Context in which a broken connection ends this process."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # all backends raise it if a connection breaks
            raise LostProcessError(
                f"process {self.rank} of {self.size} has lost contact with another one, which "
                f"failed (see its message), was ended, or has lost its machine ({error}). Start "
                f"all of them again: with {option('checkpoint_dir')} and "
                f"{option('resume', 'true')}, a run continues after its last finished block"
            ) from error


def join_small(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return lists of tensors that are exchanged together: small ones of one dtype, others alone.

    The order depends on shapes and dtypes only, so it is the same in every process.
    """
    large, small = list[list[Tensor]](), defaultdict[torch.dtype, list[Tensor]](list)
    for tensor in tensors:
        if tensor.nbytes > SMALL_BYTES:
            large.append([tensor])
        else:
            small[tensor.dtype].append(tensor)
    return [*large, *small.values()]
