"""Several processes that work on one calibration, joined by `torch.distributed`.

Every exchange of tensors follows a `gather`, in which each process reports that it is well. A
process that fails announces it in its next one, so that all end with the same error and none waits
for ever.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fusion_bench_featcal.settings import CalibrationError

Value = TypeVar("Value")

PATIENCE = timedelta(days=7)
"""Time that a process waits for the others: one of them may be evaluating models. A process that
ended is noticed at once, by its closed connections."""


class OtherProcessError(CalibrationError):
    """Another process failed, and all know of it."""


class LostProcessError(OtherProcessError):
    """Another process does not answer."""


class Processes:
    """Processes that work on one calibration. This base is one process alone.

    Attributes:
        rank: This process's number, from 0.
        size: Number of processes.
        exchanged_bytes: Bytes of the tensors that this process helped to add up or to spread.
        doing: Current work, for messages.
    """

    rank = 0
    size = 1
    exchanged_bytes = 0
    doing = "the start"

    def prepare(self, groups: Iterable[Sequence[int]]) -> None:
        """Make ready to add up tensors within groups of processes. All call it alike."""

    def gather(self, value: Value) -> list[Value]:
        """Return every process's value, by rank. All processes wait for each other here.

        Raises:
            OtherProcessError: If a process announces an error, or is lost.
        """
        return [value]

    def announce(self, error: BaseException) -> None:
        """Tell the others, in place of the next `gather`, that this process fails.

        An error is announced once, and never to the process that it came from.
        """

    def reduce(self, tensor: Tensor, to: int, ranks: Sequence[int]) -> None:
        """Add up a tensor over some processes, in place in process `to`; spent in the others."""

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Fill a contiguous tensor with its content in process `source`."""


class TorchProcesses(Processes):
    """The processes of an initialised `torch.distributed`.

    Tensors go over its default backend (gloo for CPUs, NCCL for CUDA), all else over gloo.
    """

    def __init__(self, *, patience: timedelta = PATIENCE) -> None:
        """Join; all processes do.

        Args:
            patience: How long a process waits for another one that is alive.
        """
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._patience = patience
        self._announced: BaseException | None = None
        self._gloo: Any = dist.new_group(backend="gloo", timeout=patience)
        self._groups: dict[tuple[int, ...], Any] = {tuple(range(self.size)): None}

    def prepare(self, groups: Iterable[Sequence[int]]) -> None:
        """Make the groups."""
        with self._contact():
            for ranks in map(tuple, groups):
                if len(ranks) > 1 and ranks not in self._groups:
                    self._groups[ranks] = dist.new_group(list(ranks), timeout=self._patience)

    def gather(self, value: Value) -> list[Value]:
        """Exchange values over gloo."""
        return self._exchange(None, value)

    def _exchange(self, failure: str | None, value: Any) -> list[Any]:
        answers: list[Any] = [None] * self.size
        with self._contact():
            dist.all_gather_object(answers, (failure, value), group=self._gloo)
        for rank, (error, _) in enumerate(answers):
            if error is not None:
                raise OtherProcessError(f"{error} (process {rank} of {self.size} ended with this)")
        return [value for _, value in answers]

    def announce(self, error: BaseException) -> None:
        """Tell the others an error that did not come from them."""
        if isinstance(error, OtherProcessError) or error is self._announced:
            return
        self._announced = error
        is_plain = isinstance(error, CalibrationError)
        try:
            self._exchange(str(error) if is_plain else f"{type(error).__name__}: {error}", None)
        except OtherProcessError:  # that is this one, or one that failed at the same time
            return

    def reduce(self, tensor: Tensor, to: int, ranks: Sequence[int]) -> None:
        """Add up a tensor within a prepared group."""
        if len(ranks) == 1:
            return
        buffer = tensor.contiguous()
        with self._contact():
            dist.reduce(buffer, dst=to, group=self._groups[tuple(ranks)])
        if self.rank == to and buffer is not tensor:
            tensor.copy_(buffer)
        self.exchanged_bytes += buffer.numel() * buffer.element_size()

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Spread a tensor over all processes."""
        with self._contact():
            dist.broadcast(tensor, src=source)
        self.exchanged_bytes += tensor.numel() * tensor.element_size()

    @contextmanager
    def _contact(self) -> Iterator[None]:
        """Context whose broken connections end this process."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # what all backends raise when a connection breaks
            raise LostProcessError(
                f"process {self.rank} of {self.size} has lost contact with another one, which "
                f"was ended, hangs, or has lost its machine ({error}). Start all of them again: "
                "with method.checkpoint_dir and method.resume=true a run goes on after its last "
                "whole block"
            ) from error


@contextmanager
def announcing(processes: Processes) -> Iterator[None]:
    """Context whose errors end the other processes, too."""
    try:
        yield
    except Exception as error:
        processes.announce(error)
        raise


def check_agreement(processes: Processes, **facts: Any) -> None:
    """Refuse processes that were not started alike.

    Args:
        processes: The processes.
        **facts: What must be the same in all of them, under its name in the message.

    Raises:
        CalibrationError: If one differs, naming the process and the difference.
    """
    gathered = processes.gather(facts)
    for rank, other in enumerate(gathered):
        names = [name for name, value in other.items() if value != gathered[0][name]]
        if names:
            raise CalibrationError(
                f"process {rank} was started with other {' and '.join(names)} than process 0. "
                "Give all processes the same command, configuration and files"
            )
