"""Several processes that work on one calibration, joined by `torch.distributed`.

Every exchange of tensors follows a `gather` over gloo, in which a process that has ended is noticed
at once.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fusion_bench_featcal.errors import CalibrationError, LostProcessError
from fusion_bench_featcal.errors.words import option, user_term

Key = TypeVar("Key")
Value = TypeVar("Value")

PATIENCE = timedelta(days=7)
"""Time that a process waits for the others, one of which may be evaluating models. A closed
connection is noticed at once."""


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
        """Return the tasks of this process.

        Raises:
            CalibrationError: If there are more processes than tasks.
        """
        tasks = list(tasks)
        if self.size > len(tasks):
            raise CalibrationError(
                f"{self.size} processes cannot share {len(tasks)} tasks, as each works on whole "
                f"tasks. Start at most {len(tasks)}{user_term('processes')}"
            )
        return tasks[self.rank :: self.size]

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

    def all_reduce_sum(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors, in place, by their sums over all processes, of equal bits in each."""

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
        self._gloo: object = dist.new_group(backend="gloo", timeout=patience)

    def gather(self, value: Value) -> list[Value]:
        """Exchange values over gloo."""
        values: list[Any] = [None] * self.size
        with self._contact():
            dist.all_gather_object(values, value, group=self._gloo)
        return values

    def all_reduce_sum(self, tensors: Iterable[Tensor]) -> None:
        """Sum tensors over the processes."""
        self.gather(None)  # a process that has ended is noticed here, before a collective call
        for tensor in tensors:
            buffer = tensor.contiguous()
            with self._contact():
                dist.all_reduce(buffer)
            if buffer is not tensor:
                tensor.copy_(buffer)
            self.exchanged_bytes += buffer.nbytes

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
                f"{option('resume', 'true')} a run goes on after its last whole block"
            ) from error
