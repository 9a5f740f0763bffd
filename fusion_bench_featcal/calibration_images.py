"""Calibration samples of image models, read and processed batch by batch."""

import hashlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from fusion_bench_featcal.data.image_cache import MEMORY, PROCESSED, ImageCache, describe_processor
from fusion_bench_featcal.data.images import ImageItems
from fusion_bench_featcal.data.pictures import Processor, fixed_content, stack_pixels, to_pixels
from fusion_bench_featcal.data.read_ahead import automatic_workers, in_order
from fusion_bench_featcal.settings import FeatCalSettings


@dataclass(frozen=True, eq=False)
class TaskBatches:
    """One task's calibration samples. Each iteration reads and processes them again.

    The data set is read in the caller's thread. Worker threads decode and process images, one batch
    ahead.
    """

    task: str
    items: ImageItems  # the data set; labels are not read
    indices: list[int]  # positions of the samples in it
    batch_size: int  # samples per batch; the last batch may have fewer
    processor: Processor
    split: str = ""
    workers: int = 0  # threads; 0: everything runs in the caller's thread
    images: ImageCache = field(default_factory=ImageCache)

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
        uses_folder = self.images.folder is not None
        results = in_order(
            self._read,
            partial(self._process, describe_processor(self.processor) if uses_folder else None),
            self.indices,
            workers=self.workers,
            ahead=max(self.batch_size, 2 * self.workers),
        )
        size: torch.Size | None = None
        with closing(results):
            while batch := list(islice(results, self.batch_size)):
                for index, pixels, origin in batch:
                    self.images.counts[origin] += 1
                    self.images.put((self.split, self.task, index), pixels)
                images = [pixels for _, pixels, _ in batch]
                size = size or images[0].shape
                stacked = stack_pixels(images, self.items.name, "modelpool.processor", size)
                yield {"pixel_values": stacked}

    def _read(self, index: int) -> tuple[int, Any, Tensor | None]:
        """Return an item as the data set has it, or its pixels if they are in memory."""
        pixels = self.images.get((self.split, self.task, index))
        return index, None if pixels is not None else self.items.read(index)[0], pixels

    def _process(
        self, processor_digest: str | None, item: tuple[int, Any, Tensor | None]
    ) -> tuple[int, Tensor, str]:
        """Return an item's index, its pixels and their origin."""
        index, image, pixels = item
        if pixels is not None:
            return index, pixels, MEMORY
        context = self.items.context(index)
        if processor_digest is None:
            return index, to_pixels(image, self.processor, *context), PROCESSED
        image, content = fixed_content(image, *context)
        name = hashlib.sha256(f"{processor_digest} {content}".encode()).hexdigest()
        make = partial(to_pixels, image, self.processor, *context)
        return index, *self.images.load_or_make(name, make)


def decode_workers(settings: FeatCalSettings, processor: Any) -> int:
    """Return the number of threads that process images; 0: the caller's thread does."""
    if settings.decode_workers != "auto":
        return int(settings.decode_workers)
    # A plain callable may not be safe to share between threads.
    return automatic_workers() if describe_processor(processor) is not None else 0
