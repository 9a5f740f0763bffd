"""Copies between a device and host memory."""

from typing import Any, Protocol

import torch
from torch import Tensor


class Transfers(Protocol):
    """Copies between a device and host memory."""

    def to_host(self, source: Tensor, buffer: Tensor) -> None:
        """Copy what has been computed on the device by then."""
        ...

    def to_device(self, buffer: Tensor, device: torch.device) -> tuple[Tensor, Any]:
        """Copy back, after all copies before; the tensor, and what `wait` takes."""
        ...

    def wait(self, copied: Any, tensor: Tensor) -> None:
        """Let what is computed next wait for the copy into this tensor."""
        ...


class PlainTransfers:
    """Copies that are made at once."""

    def to_host(self, source: Tensor, buffer: Tensor) -> None:
        """Copy."""
        buffer.copy_(source)

    def to_device(self, buffer: Tensor, device: torch.device) -> tuple[Tensor, Any]:
        """Copy back."""
        return buffer.to(device, copy=True), None

    def wait(self, copied: Any, tensor: Tensor) -> None:
        """The copy is made already."""


class CudaTransfers:
    """Copies on a stream of their own, beside the computation; the host waits for none of them.

    Buffers are pinned: torch's allocator of pinned memory remembers which copies still read one.
    """

    def __init__(self, device: torch.device) -> None:
        """Make the stream."""
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def to_host(self, source: Tensor, buffer: Tensor) -> None:
        """Queue a copy; the source's memory is not used again before it is made."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            buffer.copy_(source, non_blocking=True)
        source.record_stream(self._stream)

    def to_device(self, buffer: Tensor, device: torch.device) -> tuple[Tensor, Any]:
        """Queue a copy into memory of the copying stream."""
        with torch.cuda.stream(self._stream):
            tensor = buffer.to(device, non_blocking=True)
        return tensor, self._stream.record_event()

    def wait(self, copied: Any, tensor: Tensor) -> None:
        """Let the computing stream wait, and the allocator know that it uses the tensor."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(copied)
        tensor.record_stream(current)
