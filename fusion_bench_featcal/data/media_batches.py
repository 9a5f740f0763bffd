"""Samples that combine texts with images or sounds, one per batch."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.data.text_formats import Text
from fusion_bench_featcal.data.text_samples import TextEncoder
from fusion_bench_featcal.streams.inputs import check_token_ids


@dataclass(eq=False)
class MediaBatches(ABC):
    """One task's samples. Images and sounds are read when they are used.

    Attributes:
        rows: The examples.
        processor: The transformers processor of the images or sounds.
        encoder: Converts texts to token ids.
    """

    rows: Sequence[Any]
    processor: Any
    encoder: TextEncoder

    @property
    def texts(self) -> list[Text]:
        """The samples' texts."""
        return [row.text for row in self.rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return map(self.encode, self.rows)

    def checked(self, model: nn.Module) -> Iterator[dict[str, Tensor]]:
        """Yield the batches for a model.

        Raises:
            CalibrationError: If a token id is not in its vocabulary.
        """
        for text, batch in zip(self.texts, self, strict=True):
            check_token_ids(batch, model, lambda _, name=text.name: name)
            yield batch

    def encode_target(self, row: Any) -> Tensor:
        """Return the labels of an example, `[1, tokens]`."""
        return self.encode(row)["labels"]

    @abstractmethod
    def dedup_key(self, row: Any) -> Hashable:
        """Return a key that repeated examples share.

        Raises:
            CalibrationError: If the example cannot be used.
        """

    @abstractmethod
    def encode(self, row: Any) -> dict[str, Tensor]:
        """Return an example as a batch of the model's inputs, with labels of its answer.

        Raises:
            CalibrationError: If the example cannot be used.
        """
