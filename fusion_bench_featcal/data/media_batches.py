"""Samples with images or sounds beside their texts, one in a batch."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.data.generation import targets_of
from fusion_bench_featcal.data.text_formats import Text
from fusion_bench_featcal.data.text_samples import TextEncoder
from fusion_bench_featcal.streams.inputs import check_token_ids


@dataclass(eq=False)
class MediaBatches(ABC):
    """One task's samples. Images and sounds are read when they are used.

    Attributes:
        rows: The samples.
        processor: A processor of transformers for the images or sounds.
        encoder: The tokenizer, with end tokens.
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
        return map(self.inputs_of, self.rows)

    def checked(self, model: nn.Module) -> Iterator[dict[str, Tensor]]:
        """Yield the batches for a model.

        Raises:
            CalibrationError: If a token id is not in its vocabulary.
        """
        for text, batch in zip(self.texts, self, strict=True):
            check_token_ids(batch, model, lambda _, name=text.name: name)
            yield batch

    def targets_of(self, model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return logits and targets of a batch, as the function of this name."""
        return targets_of(model, batch)

    def labels_of(self, row: Any) -> Tensor:
        """Return a row's labels, `[1, tokens]`."""
        return self.inputs_of(row)["labels"]

    @abstractmethod
    def content(self, row: Any) -> Hashable:
        """Return what tells repeated rows.

        Raises:
            CalibrationError: If the row cannot be used.
        """

    @abstractmethod
    def inputs_of(self, row: Any) -> dict[str, Tensor]:
        """Return a row as a batch of the model's inputs, with labels of its answer.

        Raises:
            CalibrationError: If the row cannot be used.
        """
