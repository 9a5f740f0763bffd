"""Places where tensors wait: where they are, in host memory beside a device, in mapped files."""

import mmap
import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fusion_bench_featcal.engine.transfers import CudaTransfers, PlainTransfers, Transfers
from fusion_bench_featcal.files import PART, owner_mark, register, remove_orphans
from fusion_bench_featcal.settings import CalibrationError

_PREFIX = "featcal-"


@dataclass(frozen=True)
class Layout:
    """Layout of a tensor in memory.

    Attributes:
        sizes: Its shape, with repetitions (expanded dimensions).
        order: Its dimensions by falling stride.
    """

    sizes: tuple[int, ...]
    order: tuple[int, ...]

    def unpacked(self, data: Tensor) -> Tensor:
        """Entries as `packed` gave them, laid out as the tensor was."""
        back = [self.order.index(dimension) for dimension in range(len(self.order))]
        return data.permute(back).expand(self.sizes)


def packed(tensor: Tensor) -> tuple[Tensor, Layout]:
    """A tensor's entries once each, contiguous, and how they lay.

    Nothing is copied where they lie side by side.
    """
    once = tensor.detach()
    for dimension in range(tensor.ndim):
        if tensor.stride(dimension) == 0:
            once = once.narrow(dimension, 0, 1)
    order = tuple(sorted(range(tensor.ndim), key=lambda d: -once.stride(d)))
    return once.permute(order).contiguous(), Layout(tuple(tensor.shape), order)


class Kept(Protocol):
    """A tensor that waits."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes where it waits."""
        ...

    def start(self) -> None:
        """Begin to fetch it."""
        ...

    def tensor(self) -> Tensor:
        """The tensor, as it was, on its device."""
        ...


class Place(Protocol):
    """Somewhere tensors can wait."""

    @property
    def name(self) -> str:
        """Name for logs."""
        ...

    def open(self) -> None:
        """Prepare to take tensors in."""
        ...

    def keep(self, tensor: Tensor) -> Kept:
        """Take a tensor in."""
        ...

    def close(self) -> None:
        """Let everything go."""
        ...


@dataclass(frozen=True)
class _Same:
    value: Tensor
    nbytes: int

    def start(self) -> None:
        pass

    def tensor(self) -> Tensor:
        return self.value


class HostPlace:
    """Host memory beside a device: pinned for CUDA, so that copies run beside the computation."""

    name = "host memory"

    def __init__(self, device: torch.device, transfers: Transfers | None = None) -> None:
        """Prepare.

        Args:
            device: The device.
            transfers: Makes the copies; None: as fits the device.
        """
        self._device = device
        self.pinned = device.type == "cuda"
        self.transfers = transfers or (CudaTransfers(device) if self.pinned else PlainTransfers())

    def open(self) -> None:
        """Nothing is to be done."""

    def keep(self, tensor: Tensor) -> Kept:
        """Copy a tensor of the device; one of another is held as it is."""
        if tensor.device.type != self._device.type:
            return _Same(tensor, tensor.nbytes)
        return _InHost(self, tensor)

    def close(self) -> None:
        """Nothing is to be done: memory goes with what waits in it."""


class _InHost:
    def __init__(self, place: HostPlace, tensor: Tensor) -> None:
        self._transfers, self._device = place.transfers, tensor.device
        data, self._layout = packed(tensor)
        self._buffer = torch.empty(data.shape, dtype=data.dtype, pin_memory=place.pinned)
        self.nbytes = self._buffer.nbytes
        self._transfers.to_host(data, self._buffer)
        self._coming: tuple[Tensor, Any] | None = None

    def start(self) -> None:
        if self._coming is None:
            self._coming = self._transfers.to_device(self._buffer, self._device)

    def tensor(self) -> Tensor:
        self.start()
        assert self._coming is not None
        (data, copied), self._coming = self._coming, None
        self._transfers.wait(copied, data)
        return self._layout.unpacked(data)


class DiskPlace:
    """Files, one a tensor, in a folder of this run's own: raw entries, mapped when they are read.

    They are written by ordinary writes (a full disk is an error then, where a mapping's would end
    the process) and never again: a tensor that replaces another gets a new file. Mappings are
    private: what a block writes into its inputs does not reach the file.
    """

    name = "files"

    def __init__(self, folder: str | None) -> None:
        """Prepare; nothing is made yet.

        Args:
            folder: Where the run's folder is made; None: where the system keeps temporary files.
        """
        self._parent = folder
        self._own: Path | None = None
        self._count = 0

    def open(self) -> None:
        """Make the folder, if there is none yet, and remove those that dead processes left.

        Raises:
            CalibrationError: If it cannot be made.
        """
        if self._own is not None:
            return
        remove_orphans(Path(self._parent or tempfile.gettempdir()), _PREFIX)
        try:
            if self._parent is not None:
                os.makedirs(self._parent, exist_ok=True)
            prefix = f"{_PREFIX}{owner_mark()}-"
            self._own = register(Path(tempfile.mkdtemp(PART, prefix, self._parent)))
        except OSError as error:
            raise CalibrationError(
                f"no folder for activations can be made: {error}. Set method.activations_dir to a "
                "folder that can be written, or method.activations to device"
            ) from error

    def keep(self, tensor: Tensor) -> Kept:
        """Write a tensor to a new file.

        Raises:
            CalibrationError: If it cannot be written: most likely the disk is full.
        """
        self.open()
        assert self._own is not None
        self._count += 1
        path = self._own / f"{self._count}.raw"
        data, layout = packed(tensor)
        try:
            _write(path, data)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise CalibrationError(
                f"activations cannot be written to {self._own}: {error.strerror or error}. Set "
                "method.activations_dir to a folder on another disk, method.activations to device "
                "or host, or lower method.samples_per_task"
            ) from error
        return _OnDisk(path, data.dtype, tuple(data.shape), layout, tensor.device)

    def close(self) -> None:
        """Remove the folder."""
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)
            self._own = None


def _write(path: Path, data: Tensor) -> None:
    entries: Any = data.reshape(-1).cpu().view(torch.uint8).numpy()
    with open(path, "xb") as file:
        file.write(entries)


class _OnDisk:
    """A tensor in a file, which goes with it."""

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        layout: Layout,
        device: torch.device,
    ) -> None:
        self._path, self._dtype, self._shape = path, dtype, shape
        self._layout, self._device = layout, device
        self.nbytes = path.stat().st_size
        self._mapped: np.memmap | None = None

    def __del__(self) -> None:
        with suppress(OSError):  # the whole folder may be gone
            self._path.unlink(missing_ok=True)

    def start(self) -> None:
        """Map the file and have the system read it."""
        if self._mapped is None:
            self._mapped = np.memmap(self._path, np.uint8, mode="c")
            own: Any = getattr(self._mapped, "_mmap", None)
            if hasattr(mmap, "MADV_WILLNEED") and own is not None:
                own.madvise(mmap.MADV_WILLNEED)

    def tensor(self) -> Tensor:
        self.start()
        entries, self._mapped = self._mapped, None
        data = torch.from_numpy(entries).view(self._dtype).reshape(self._shape)
        return self._layout.unpacked(data.to(self._device))


KEPT = (_Same, _InHost, _OnDisk)
"""Whatever waits in one of these places."""
