"""Calibration samples for language models: texts with targets from the data or the expert."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.data.generation import greedy_answers, padded_left
from fusion_bench_featcal.data.tables import require_numbered
from fusion_bench_featcal.data.text_samples import TextEncoder, pad_samples
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.streams.inputs import check_token_ids


@dataclass(eq=False)
class TextBatches:
    """One task's calibration samples. Texts are read and tokenised again in each iteration."""

    label: str  # the task and its dataset, for messages
    rows: Any  # the dataset that the samples were drawn from
    indices: list[int]  # positions of the samples in it
    settings: FeatCalSettings
    encoder: TextEncoder
    load_expert: Callable[[], nn.Module]  # called if the expert writes the targets
    device: Any = None  # of the expert, by default the one on which it is loaded
    _answers: list[list[int]] = field(default_factory=list, init=False)

    @property
    def batch_size(self) -> int:
        """Samples per batch. The last batch may have fewer."""
        return self.settings.batch_size

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self.indices)

    @property
    def available(self) -> int:
        """Number of items that the samples were drawn from."""
        return len(self.rows)

    def at(self, number: int) -> str:
        """Return the name of a sample in messages."""
        return f"{self.label}, item {self.indices[number]}"

    def checked(self, model: nn.Module) -> list[dict[str, Tensor]]:
        """List the batches for a model.

        Raises:
            CalibrationError: If a token id is not in its vocabulary.
        """
        batches = list(self)
        for number, batch in enumerate(batches):
            self._check(batch, model, number * self.batch_size)
        return batches

    def lengths(self) -> list[int]:
        """Return the number of tokens of each text, with the longest possible answer of the expert.

        Raises:
            CalibrationError: If a row is not a usable text.
        """
        if self._are_generated:
            return [len(prompt) + self.settings.generated_tokens for prompt in self._prompts()]
        return [len(self.encoder.sample(*row).ids) for row in self._read()]

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield `input_ids`, `attention_mask`, `labels`: `[batch, length]`, padded."""
        if self._are_generated:
            prompts = self._prompts()
            self._answers = self._answers or self._generate(prompts)
            names = map(self.at, range(len(prompts)))
            samples = list(map(self.encoder.answered, prompts, self._answers, names))
        else:
            samples = [self.encoder.sample(*row) for row in self._read()]
        for start in range(0, len(samples), self.batch_size):
            yield pad_samples(samples[start : start + self.batch_size], self.encoder)

    @property
    def _are_generated(self) -> bool:
        return self.settings.calibration_targets == "generated"

    def _read(self) -> Iterator[tuple[Mapping[str, Any], str]]:
        """Yield each row and its name."""
        for number, index in enumerate(self.indices):
            name = self.at(number)
            try:
                row = self.rows[index]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise CalibrationError(f"{name} cannot be read ({error})") from error
            if not isinstance(row, Mapping):
                raise CalibrationError(f"{name}: a text is a mapping, got {type(row).__name__}")
            yield row, name

    def _prompts(self) -> list[list[int]]:
        most = self.settings.generated_tokens
        return [self.encoder.prompt(*row, most) for row in self._read()]

    def _generate(self, prompts: list[list[int]]) -> list[list[int]]:
        """Return the expert's greedy answers to all prompts."""
        expert = self.load_expert()
        expert = expert if self.device is None else expert.to(self.device)
        answers: list[list[int]] = []
        for start in range(0, len(prompts), self.batch_size):
            chosen = prompts[start : start + self.batch_size]
            ids = padded_left(chosen, self.encoder.pad_id)[0]
            self._check({"input_ids": ids}, expert, start)
            answers += greedy_answers(expert, chosen, self.encoder, self.settings.generated_tokens)
        return answers

    def _check(self, batch: Mapping[str, Tensor], model: nn.Module, start: int) -> None:
        check_token_ids(batch, model, lambda row: self.at(start + row))


def text_rows(rows: Any, label: str) -> Any:
    """Check a dataset of texts and return its rows as plain values.

    Raises:
        CalibrationError: If it is streamed, or is not one split.
    """
    require_numbered(rows, label)
    plain = getattr(rows, "with_format", None)
    return rows if plain is None else plain(None)
