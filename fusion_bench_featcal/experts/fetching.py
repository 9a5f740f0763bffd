"""Fetching tensors ahead: from files what will be read next, to a GPU without waiting for it."""

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

Range = tuple[int, int]
"""First byte and number of bytes."""

# A system fetches no more for one request than the device's own read-ahead, often 128 KiB.
_REQUEST = 128 * 1024


MOST_PINNED = 256 * 2**20
"""Bytes of the largest tensor that goes to a GPU through pinned memory."""


class TensorRanges:
    """Places of tensors in their files; headers are read when first asked for."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._ranges: dict[Path, dict[str, Range]] = {}

    def fetch(self, tensors: Iterable[tuple[str, Path]]) -> None:
        """Have the system read tensors into its page cache; returns before they are there.

        Nothing is copied into the process, and nothing is raised: whoever reads a damaged file
        will say what is wrong with it.

        Args:
            tensors: Names and the files they are in.
        """
        wanted: dict[Path, list[str]] = {}
        for name, file in tensors:
            wanted.setdefault(file, []).append(name)
        for file, names in wanted.items():
            if file not in self._ranges:
                self._ranges[file] = {}
                with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                    self._ranges[file] = read_ranges(file)
            ranges = self._ranges[file]
            fetch(file, [ranges[name] for name in names if name in ranges])


def read_ranges(file: Path) -> dict[str, Range]:
    """Read the place of each tensor in a file.

    A safetensors file begins with the length of its header in 8 bytes and the header, which gives
    places counted from its own end.
    """
    with open(file, "rb") as stream:
        # a damaged file may name any length
        length = min(int.from_bytes(stream.read(8), "little"), os.fstat(stream.fileno()).st_size)
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    places = {name: entry["data_offsets"] for name, entry in header.items()}
    return {name: (8 + length + first, end - first) for name, (first, end) in places.items()}


def fetch(file: Path, ranges: Iterable[Range]) -> None:
    """Have the system read parts of a file into its page cache, where it can be asked to."""
    if not hasattr(os, "posix_fadvise"):
        return
    with suppress(OSError, OverflowError):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            for first, size in joined(ranges):
                for begin in range(first, first + size, _REQUEST):
                    part = min(_REQUEST, first + size - begin)
                    os.posix_fadvise(descriptor, begin, part, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)


def joined(ranges: Iterable[Range]) -> list[Range]:
    """The same bytes in as few ranges as possible, in order; empty ones left out."""
    whole: list[Range] = []
    for first, size in sorted(ranges):
        if whole and sum(whole[-1]) == first:
            whole[-1] = (whole[-1][0], whole[-1][1] + size)
        elif size:
            whole.append((first, size))
    return whole


def copied_to(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A tensor on a device and in a dtype; it itself if it is so already.

    To a GPU it goes through pinned memory, so that the copy is only queued: while the GPU is busy
    the host reads the next one. Torch's allocator of pinned memory remembers which copies wait.
    It never gives memory back, so the largest tensors (embeddings) go without, and are waited for.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        if tensor.dtype.itemsize > dtype.itemsize:
            tensor = tensor.to(dtype)
        if tensor.nbytes <= MOST_PINNED:
            return tensor.pin_memory().to(device, non_blocking=True).to(dtype)
    return tensor.to(device=device, dtype=dtype)
