"""Samples of image models, which are read and processed batch by batch."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from fusion_bench_featcal.data.images import ImageItems
from fusion_bench_featcal.data.pictures import (
    Processor,
    is_transformers_processor,
    stack_pixels,
    to_pixels,
)

_MAX_THREADS = 8  # more threads only contend for Python's lock and the memory bus


@dataclass(frozen=True, eq=False)
class ImageBatches:
    """One task's samples. Each iteration reads and processes them again.

    Attributes:
        items: The dataset.
        indices: Indices of the samples in the dataset.
        batch_size: Samples per batch. The last batch may have fewer.
        processor: Converts a picture to pixels.
    """

    items: ImageItems
    indices: Sequence[int]
    batch_size: int
    processor: Processor

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self.indices)

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield `{"pixel_values": [batch, channels, height, width]}`, floating point."""
        with ThreadPoolExecutor(min(os.cpu_count() or 1, _MAX_THREADS)) as threads:
            # a user's function may not be thread-safe
            apply = threads.map if is_transformers_processor(self.processor) else map
            for start in range(0, len(self.indices), self.batch_size):
                indices = self.indices[start : start + self.batch_size]
                stored = [self.items.read(index)[0] for index in indices]
                pixels = list(apply(self._pixels, stored, indices))
                yield {"pixel_values": stack_pixels(pixels, self.items.name)}

    def _pixels(self, stored: object, index: int) -> Tensor:
        picture = self.items.picture(stored, index)
        return to_pixels(picture, self.processor, self.items.row_name(index))
