"""Samples of language models: texts with targets from the data or the expert."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from logging import getLogger

import torch
from torch import Tensor, nn

from fusion_bench_featcal.data.batch_sizes import batch_size_of
from fusion_bench_featcal.data.generation import generated_answers, padded_left
from fusion_bench_featcal.data.text_formats import Text
from fusion_bench_featcal.data.text_rows import TextRows
from fusion_bench_featcal.data.text_samples import Sample, TextEncoder, pad_samples
from fusion_bench_featcal.errors.plurals import pluralize
from fusion_bench_featcal.errors.words import option
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.streams.inputs import check_token_ids

_warn_once = cache(getLogger(__name__).warning)  # a run opens its datasets several times


Answers = list[list[int]]
"""Token ids of the answers to a batch of prompts."""


def _compute_here(count: int, compute: Callable[[int], Answers]) -> list[Answers]:
    return [*map(compute, range(count))]


@dataclass(eq=False)
class TextBatches:
    """One task's samples. Texts are read and tokenised once, when they are first needed."""

    rows: TextRows
    indices: list[int]  # of the samples in the rows
    settings: FeatCalSettings
    encoder: TextEncoder
    load_expert: Callable[[], nn.Module]  # called if the expert writes the targets
    device: torch.device | str | None = None  # of the calibration and of experts that write targets
    # Returns a function's values below a count. Several processes may each compute some of them.
    compute_all: Callable[[int, Callable[[int], Answers]], list[Answers]] = _compute_here

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self.indices)

    @property
    def are_generated(self) -> bool:
        """True if the expert generates the targets."""
        return self.settings.calibration_targets == "generated"

    def row_name(self, index: int) -> str:
        """Return the name of a sample in messages."""
        return self.rows.row_name(self.indices[index])

    @cached_property
    def texts(self) -> list[Text]:
        """The samples as texts.

        Raises:
            CalibrationError: If a sample is not a usable text.
        """
        return [self.rows.read(index) for index in self.indices]

    @property
    def columns(self) -> list[str]:
        """Names of the columns that are read in any sample."""
        return list(dict.fromkeys(name for text in self.texts for name in text.columns))

    @property
    def unread(self) -> list[str]:
        """Unread columns with a value, and keys of turns that the template does not show."""
        rows = [*self.texts, *self.inputs]
        return list(dict.fromkeys(name for row in rows for name in row.unread))

    @property
    def inputs(self) -> list[Sample]:
        """The prompts if the expert generates the targets, else prompts with targets."""
        return self.prompts if self.are_generated else self.encoded

    def truncation_note(self, inputs: Sequence[Sample]) -> str | None:
        """Return a sentence on inputs that are cut, or None if none is."""
        cut, texts = sum(sample.is_cut for sample in inputs), pluralize(self.samples, "text")
        limit = option("max_length", self.encoder.max_length)
        return f"{cut} of {texts} are longer than {limit} and are truncated" if cut else None

    def _with_warnings(self, inputs: list[Sample]) -> list[Sample]:
        """Warn once about unread keys and cut inputs. `featcal calibrate` shows notes instead."""
        unread = dict.fromkeys(key for sample in inputs for key in sample.unread)
        for warning in filter(None, (*unread, self.truncation_note(inputs))):
            _warn_once("%s: %s", self.rows.name, warning)
        return inputs

    @cached_property
    def prompts(self) -> list[Sample]:
        """The prompts that the expert answers."""
        reserved = self.settings.generated_tokens
        return self._with_warnings([self.encoder.prompt(text, reserved) for text in self.texts])

    @cached_property
    def encoded(self) -> list[Sample]:
        """The samples in token ids.

        Raises:
            CalibrationError: If a sample is not a usable text, or lacks a required target.
        """
        if not self.are_generated:
            return self._with_warnings([self.encoder.sample(text) for text in self.texts])
        names = [text.name for text in self.texts]
        return list(map(self.encoder.answered, self.prompts, self._generate_answers(), names))

    def by_length(self) -> tuple["TextBatches", list[int]]:
        """Return the samples in order of length, to save padding, and their indices here."""
        lengths = self.lengths()
        order = sorted(range(self.samples), key=lengths.__getitem__)
        return self.select(order), order

    def select(self, indices: Sequence[int]) -> "TextBatches":
        """Return the samples at these indices, in this order, with what is cached of them."""
        batches = replace(self, indices=[self.indices[index] for index in indices])
        for name in {"texts", "prompts", "encoded"} & vars(self).keys():
            vars(batches)[name] = [vars(self)[name][index] for index in indices]
        return batches

    def lengths(self) -> list[int]:
        """Return the number of tokens of each sample, with the expert's longest possible answer.

        Raises:
            CalibrationError: If a sample is not a usable text.
        """
        answer = self.settings.generated_tokens if self.are_generated else 0
        return [len(sample.ids) + answer for sample in self.inputs]

    @cached_property
    def batch_size(self) -> int:
        """Samples per batch, possibly fewer in the last one."""
        chosen = self.settings.batch_size
        longest = max(self.lengths(), default=1) if chosen == "auto" else None
        return batch_size_of(chosen, self.device, longest)

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield `input_ids`, `attention_mask`, `labels`: `[batch, length]`, padded."""
        for start in range(0, self.samples, self.batch_size):
            yield pad_samples(self.encoded[start : start + self.batch_size], self.encoder)

    def checked(self, model: nn.Module) -> list[dict[str, Tensor]]:
        """List the batches for a model.

        Raises:
            CalibrationError: If a token id is not in its vocabulary.
        """
        batches = list(self)
        for index, batch in enumerate(batches):
            self._check_token_ids(batch, model, index * self.batch_size)
        return batches

    def _generate_answers(self) -> Answers:
        """Return the expert's greedy answers to all prompts."""
        expert = self.load_expert()
        expert = expert if self.device is None else expert.to(self.device)

        def answers_to(number: int) -> Answers:
            start = number * self.batch_size
            prompts = [p.ids for p in self.prompts[start : start + self.batch_size]]
            self._check_token_ids(padded_left(prompts, self.encoder.pad_id), expert, start)
            return generated_answers(expert, prompts, self.encoder, self.settings.generated_tokens)

        return [answer for answers in self.compute_all(len(self), answers_to) for answer in answers]

    def _check_token_ids(self, batch: Mapping[str, Tensor], model: nn.Module, start: int) -> None:
        check_token_ids(batch, model, lambda row: self.row_name(start + row))
