"""Calibration samples of image models, read and processed batch by batch."""

import os
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers import BaseImageProcessor, ProcessorMixin

from fusion_bench_featcal.data.images import ImageItems
from fusion_bench_featcal.data.pictures import Processor, stack_pixels, to_pixels

_MAX_WORKERS = 8  # more threads only contend for Python's lock and the memory bus


@dataclass(frozen=True, eq=False)
class TaskBatches:
    """One task's calibration samples. Each iteration reads and processes them again."""

    task: str
    items: ImageItems  # the dataset, whose labels are not read
    indices: list[int]  # positions of the samples in it
    batch_size: int  # samples per batch, possibly fewer in the last one
    processor: Processor
    split: str = ""
    workers: int = 0  # number of threads, or 0 for the caller's thread

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self.indices)

    @property
    def available(self) -> int:
        """Number of items that the samples were drawn from."""
        return len(self.items)

    def at(self, number: int) -> str:
        """Return the name of a sample in messages."""
        return self.items.at(self.indices[number])

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield `{"pixel_values": [batch, channels, height, width]}`, floating point."""
        size: torch.Size | None = None
        with closing(self._processed()) as images:
            while batch := list(islice(images, self.batch_size)):
                size = size or batch[0].shape
                stacked = stack_pixels(batch, self.items.name, "modelpool.processor", size)
                yield {"pixel_values": stacked}

    def _processed(self) -> Generator[Tensor, None, None]:
        """Yield the pixels of each sample. Threads decode and process one batch ahead.

        Items are read in the caller's thread, because datasets need not be thread-safe.
        """
        items = ((self.items.read(index)[0], index) for index in self.indices)
        if self.workers == 0:
            yield from (self._process(image, index) for image, index in items)
            return
        ahead = max(self.batch_size, 2 * self.workers)
        pending: deque[Future[Tensor]] = deque()
        executor = ThreadPoolExecutor(self.workers, thread_name_prefix="featcal-images")
        try:
            for image, index in items:
                pending.append(executor.submit(self._process, image, index))
                if len(pending) > ahead:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            executor.shutdown(cancel_futures=True)

    def _process(self, image: Any, index: int) -> Tensor:
        return to_pixels(image, self.processor, self.items.at(index))


def decode_workers(processor: Any) -> int:
    """Return the number of threads that process images, or 0 for the caller's thread."""
    # A plain callable may not be safe to share between threads.
    if not isinstance(processor, ProcessorMixin | BaseImageProcessor):
        return 0
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return 0 if cores == 1 else min(cores, _MAX_WORKERS)
