"""Calibration samples of image models: drawn, read and processed batch by batch."""

import hashlib
from collections.abc import Generator, Iterator
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
    """One task's calibration samples; images are read and processed anew in each iteration.

    The data set is read in the caller's thread, so it may be of any kind; images are decoded and
    processed in others, one batch ahead.
    """

    task: str
    items: ImageItems  # the data set they are drawn from; labels are not read
    indices: list[int]  # the samples' positions in it
    batch_size: int  # samples per batch; the last batch may have fewer
    processor: Processor
    split: str = ""
    workers: int = 0  # threads that decode and process; 0: the caller's alone
    images: ImageCache = field(default_factory=ImageCache)  # keeps processed images

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self.indices)

    @property
    def available(self) -> int:
        """Number of items that they were drawn from."""
        return len(self.items)

    def at(self, number: int) -> str:
        """Name of a sample in messages."""
        return self.items.at(self.indices[number])

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield `{"pixel_values": [batch, channels, height, width]}`, floating point."""
        size: torch.Size | None = None
        with closing(self._pixels()) as images:
            while pixels := list(islice(images, self.batch_size)):
                size = size or pixels[0].shape
                stacked = stack_pixels(pixels, self.items.place, "modelpool.processor", size)
                yield {"pixel_values": stacked}

    def _pixels(self) -> Generator[Tensor, None, None]:
        """All processed images in order."""
        cache = self.images
        described = None if cache.folder is None else describe_processor(self.processor)
        results = in_order(
            self._read,
            partial(self._process, described=described),
            self.indices,
            workers=self.workers,
            ahead=max(self.batch_size, 2 * self.workers),
        )
        with closing(results):
            for index, (pixels, origin) in zip(self.indices, results, strict=True):
                cache.counts[origin] += 1
                cache.keep((self.split, self.task, index), pixels)
                yield pixels

    def _read(self, index: int) -> tuple[int, Any, Tensor | None]:
        """An item as the data set holds it, or its pixels if they are in memory."""
        pixels = self.images.kept((self.split, self.task, index))
        return index, None if pixels is not None else self.items.read(index)[0], pixels

    def _process(
        self, item: tuple[int, Any, Tensor | None], described: str | None
    ) -> tuple[Tensor, str]:
        """An item's pixels, and where they came from."""
        index, image, pixels = item
        if pixels is not None:
            return pixels, MEMORY
        context = self.items.context(index)
        if described is None:
            return to_pixels(image, self.processor, *context), PROCESSED
        image, content = fixed_content(image, *context)
        key = hashlib.sha256(f"{described} {content}".encode()).hexdigest()
        return self.images.from_folder(key, partial(to_pixels, image, self.processor, *context))


def decode_workers(settings: FeatCalSettings, processor: Any) -> int:
    """Threads that process images; 0: the caller's alone."""
    if settings.decode_workers != "auto":
        return int(settings.decode_workers)
    # Nobody knows whether threads may share a plain callable.
    return automatic_workers() if describe_processor(processor) is not None else 0
