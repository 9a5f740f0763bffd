"""Calibration samples for language models: texts, with the data's targets or the expert's own."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.data.tables import require_numbered
from fusion_bench_featcal.data.text_samples import Sample, TextEncoder, pad_samples
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings
from fusion_bench_featcal.streams.inputs import check_token_ids
from fusion_bench_featcal.tasks.text_generation import greedy_answers, padded_left


@dataclass(eq=False)
class TextBatches:
    """One task's calibration samples; texts are read and tokenised anew in each iteration."""

    place: str  # the task and its data set, for messages
    rows: Any  # the data set they are drawn from
    indices: list[int]  # the samples' positions in it
    settings: FeatCalSettings
    encoder: TextEncoder
    load_expert: Callable[[], nn.Module]  # called where the expert writes the targets
    device: Any = None  # of the expert; None: where it is loaded
    _answers: list[list[int]] = field(default_factory=list, init=False)

    @property
    def batch_size(self) -> int:
        """Samples per batch; the last batch may have fewer."""
        return self.settings.batch_size

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self.indices)

    @property
    def available(self) -> int:
        """Number of items that they were drawn from."""
        return len(self.rows)

    def at(self, number: int) -> str:
        """Name of a sample in messages."""
        return f"{self.place}, item {self.indices[number]}"

    def _check(self, batch: Mapping[str, Tensor], model: nn.Module, start: int) -> None:
        check_token_ids(batch, model, lambda row: self.at(start + row))

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
        """Read every text; number of tokens of each, with the longest that an expert may write.

        Raises:
            CalibrationError: If a row is no text that can be used.
        """
        most = self.settings.generated_tokens
        rows = [self._row(number) for number in range(len(self.indices))]
        if self.settings.calibration_targets == "generated":
            return [len(self.encoder.prompt(*row, most)) + most for row in rows]
        return [len(self.encoder.sample(*row).ids) for row in rows]

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield `input_ids`, `attention_mask`, `labels`: `[batch, length]`, padded."""
        if self.settings.calibration_targets == "generated" and not self._answers:
            expert = self.load_expert()
            self._answers = self._generate(
                expert if self.device is None else expert.to(self.device)
            )
        numbers = range(len(self.indices))
        for start in range(0, len(numbers), self.batch_size):
            samples = [self._sample(n) for n in numbers[start : start + self.batch_size]]
            yield pad_samples(samples, self.encoder)

    def _sample(self, number: int) -> Sample:
        row, place = self._row(number)
        if self.settings.calibration_targets != "generated":
            return self.encoder.sample(row, place)
        prompt = self.encoder.prompt(row, place, self.settings.generated_tokens)
        return self.encoder.answered(prompt, self._answers[number], place)

    def _row(self, number: int) -> tuple[Mapping[str, Any], str]:
        place = self.at(number)
        try:
            row = self.rows[self.indices[number]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CalibrationError(f"{place} cannot be read ({error})") from error
        if not isinstance(row, Mapping):
            raise CalibrationError(f"{place}: a text is a mapping, got {type(row).__name__}")
        return row, place

    def _generate(self, expert: nn.Module) -> list[list[int]]:
        """The expert's greedy answers to all prompts, in order."""
        rows = [self._row(number) for number in range(len(self.indices))]
        most = self.settings.generated_tokens
        prompts = [self.encoder.prompt(*row, most) for row in rows]
        answers: list[list[int]] = []
        for start in range(0, len(prompts), self.batch_size):
            chosen = prompts[start : start + self.batch_size]
            ids = padded_left(chosen, self.encoder.pad_id)[0]
            self._check({"input_ids": ids}, expert, start)
            answers += greedy_answers(expert, chosen, self.encoder, most)
        return answers


def text_rows(rows: Any, place: str) -> Any:
    """Check a data set of texts and return its rows, as plain values of a `datasets` table.

    Raises:
        CalibrationError: If it is streamed, or has its splits still together.
    """
    require_numbered(rows, place)
    plain = getattr(rows, "with_format", None)
    return rows if plain is None else plain(None)
