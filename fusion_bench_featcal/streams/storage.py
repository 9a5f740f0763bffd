"""Storage of features between visits: on the device, or in host memory beside a GPU.

Values and memory layout are restored exactly, so the storage does not affect the result.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusion_bench_featcal.streams.batch import Batch

STATE = ("calibrated_call", "expert_call", "expert_inputs")
"""Fields of a batch that contain features."""


class DeviceStorage:
    """Features stay on the device."""

    def iter_batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield batches, each with its features on the device until the next one."""
        return iter(batches)

    def kept(self, tensor: Tensor) -> Tensor:
        """Return a contiguous tensor as it waits in this storage."""
        return tensor

    @contextmanager
    def loaded(self, batch: Batch) -> Iterator[None]:
        """Context in which one batch has its features on the device."""
        for _ in self.iter_batches([batch]):
            yield


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in storage.

    Attributes:
        data: Its entries without repetitions, contiguous.
        sizes: Its shape, with repetitions (expanded dimensions).
        order: Its dimensions by decreasing stride.
    """

    data: Tensor
    sizes: torch.Size
    order: tuple[int, ...]


class HostStorage(DeviceStorage):
    """Features wait in pinned host memory while the GPU works on other batches."""

    def __init__(self, device: torch.device) -> None:
        """Create storage for a device."""
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def iter_batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield batches while the next one's features are copied to the device."""
        remaining = iter(batches)
        batch = next(remaining, None)
        upcoming = None if batch is None else self._fetch(batch)
        while batch is not None and upcoming is not None:
            state, stored = upcoming
            self._wait_for(stored)
            following = next(remaining, None)
            upcoming = None if following is None else self._fetch(following)
            vars(batch).update(state)
            try:
                yield batch
            finally:
                for name in STATE:
                    setattr(batch, name, self._put_away(getattr(batch, name), stored))
            batch = following

    def _fetch(self, batch: Batch) -> tuple[dict[str, Any], dict[int, Any]]:
        """Return a batch's features on the device, and stored copies by identity of the tensor."""
        fetched: dict[int, Tensor] = {}  # a tensor that occurs twice is fetched once
        stored: dict[int, Any] = {}

        def get(copy: StoredTensor) -> Tensor:
            if id(copy) not in fetched:
                data = copy.data.to(self._device, non_blocking=True, copy=True)
                back = [copy.order.index(dimension) for dimension in range(len(copy.order))]
                tensor = fetched[id(copy)] = data.permute(back).expand(copy.sizes)
                stored[id(tensor)] = tensor, tensor._version, copy
            return fetched[id(copy)]

        if self._stream is not None:  # copies to the host may still be under way
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            return {n: tree_map(getattr(batch, n), StoredTensor, get) for n in STATE}, stored

    def _wait_for(self, stored: dict[int, Any]) -> None:
        """Let the computation wait for features that are being copied to a GPU."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            for tensor, *_ in stored.values():
                tensor.record_stream(current)

    def _put_away(self, value: Any, stored: dict[int, Any]) -> Any:
        def put(tensor: Tensor) -> Any:
            original, version, copy = stored.get(id(tensor), (None, 0, None))
            if original is tensor and version == tensor._version:
                return copy
            if type(tensor) is not Tensor or not tensor.numel():
                return tensor
            data, order = packed(tensor)
            copy = StoredTensor(self.kept(data), tensor.shape, order)
            stored[id(tensor)] = tensor, tensor._version, copy
            return copy

        return tree_map(value, Tensor, put)

    def kept(self, tensor: Tensor) -> Tensor:
        """Return a copy of a contiguous tensor in this storage."""
        is_pinned = tensor.device.type == "cuda"
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_pinned)
        return host.copy_(tensor, non_blocking=True)


def storage_for(activations: str, device: torch.device) -> DeviceStorage:
    """Return the storage that `activations` names."""
    if activations == "host" and device.type != "cpu":
        return HostStorage(device)
    return DeviceStorage()


def packed(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return a tensor's entries without repetitions, and its dimensions by decreasing stride."""
    once = tensor.detach()
    for dimension in range(tensor.ndim):
        if tensor.stride(dimension) == 0:
            once = once.narrow(dimension, 0, 1)
    order = tuple(sorted(range(tensor.ndim), key=lambda d: -once.stride(d)))
    return once.permute(order).contiguous(), order


def tree_map(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return a nested value with all objects of a type changed.

    Only dicts, lists, tuples and dataclasses are searched. Other objects stay unchanged.
    """
    if isinstance(value, kind):
        return change(value)
    if type(value) is dict:
        return {key: tree_map(part, kind, change) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(tree_map(part, kind, change) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        values = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        return replace(value, **{name: tree_map(v, kind, change) for name, v in values.items()})
    return value
