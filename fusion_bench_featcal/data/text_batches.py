"""Calibration samples for language models: texts with targets from the data or the expert."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from logging import getLogger

import torch
from torch import Tensor, nn

from fusion_bench_featcal.data.batch_sizes import batch_size_of
from fusion_bench_featcal.data.generation import greedy_answers, padded_left
from fusion_bench_featcal.data.text_formats import Text
from fusion_bench_featcal.data.text_rows import TextRows
from fusion_bench_featcal.data.text_samples import Sample, TextEncoder, pad_samples
from fusion_bench_featcal.errors.plurals import pluralize
from fusion_bench_featcal.errors.words import option
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.streams.inputs import check_token_ids

_warn_once = cache(getLogger(__name__).warning)  # a run opens its datasets several times


@dataclass(eq=False)
class TextBatches:
    """One task's samples. Texts are read and tokenised once, when they are first needed."""

    rows: TextRows
    indices: list[int]  # positions of the samples in the rows
    settings: FeatCalSettings
    encoder: TextEncoder
    load_expert: Callable[[], nn.Module]  # called if the expert writes the targets
    device: torch.device | str | None = None  # of the calibration and of experts that write targets

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self.indices)

    @property
    def are_generated(self) -> bool:
        """True if the expert writes the targets."""
        return self.settings.calibration_targets == "generated"

    def row_name(self, number: int) -> str:
        """Return the name of a sample in messages."""
        return self.rows.row_name(self.indices[number])

    @cached_property
    def texts(self) -> list[Text]:
        """The samples' rows.

        Raises:
            CalibrationError: If a row is not a usable text.
        """
        return [self.rows.read(index) for index in self.indices]

    @property
    def columns(self) -> list[str]:
        """Columns of all samples that are read."""
        return list(dict.fromkeys(name for text in self.texts for name in text.columns))

    @property
    def unread(self) -> list[str]:
        """Other columns with a value, and keys of chats' turns that no template shows."""
        rows = [*self.texts, *self.inputs]
        return list(dict.fromkeys(name for row in rows for name in row.unread))

    @property
    def inputs(self) -> list[Sample]:
        """Inputs of models: the prompts if the expert writes the targets, else the samples."""
        return self.prompts if self.are_generated else self.encoded

    def remark_on_length(self, inputs: Sequence[Sample]) -> str:
        """Return a sentence on inputs that are cut, or no text."""
        cut, texts = sum(sample.is_cut for sample in inputs), pluralize(self.samples, "text")
        limit = option("max_length", self.encoder.max_length)
        return f"{cut} of {texts} are longer than {limit}, and cut" if cut else ""

    def _noted(self, inputs: list[Sample]) -> list[Sample]:
        """Warn once of what is left out of samples. `featcal calibrate` has notes instead."""
        unread = dict.fromkeys(key for sample in inputs for key in sample.unread)
        for remark in filter(None, (*unread, self.remark_on_length(inputs))):
            _warn_once("%s: %s", self.rows.name, remark)
        return inputs

    @cached_property
    def prompts(self) -> list[Sample]:
        """The prompts that the expert answers."""
        most = self.settings.generated_tokens
        prompt = partial(self.encoder.prompt, reserved=most)
        return self._noted([prompt(text) for text in self.texts])

    @cached_property
    def encoded(self) -> list[Sample]:
        """The samples in token ids.

        Raises:
            CalibrationError: If a row is not a usable text, or has no target and needs one.
        """
        if not self.are_generated:
            return self._noted([self.encoder.sample(text) for text in self.texts])
        names = [text.name for text in self.texts]
        return list(map(self.encoder.answered, self.prompts, self._answers(), names))

    def by_length(self) -> tuple["TextBatches", list[int]]:
        """Return the samples by their length, which pads batches little, and their numbers here."""
        lengths = self.lengths()
        order = sorted(range(self.samples), key=lengths.__getitem__)
        return self.some(order), order

    def some(self, numbers: Sequence[int]) -> "TextBatches":
        """Return some of the samples, in the given order, with what was read of them."""
        batches = replace(self, indices=[self.indices[number] for number in numbers])
        for name in {"texts", "prompts", "encoded"} & vars(self).keys():
            vars(batches)[name] = [vars(self)[name][number] for number in numbers]
        return batches

    def lengths(self) -> list[int]:
        """Return the number of tokens of each text, with the longest possible answer of the expert.

        Raises:
            CalibrationError: If a row is not a usable text.
        """
        more = self.settings.generated_tokens if self.are_generated else 0
        return [len(sample.ids) + more for sample in self.inputs]

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
        for number, batch in enumerate(batches):
            self._check(batch, model, number * self.batch_size)
        return batches

    def _answers(self) -> list[list[int]]:
        """Return the expert's greedy answers to all prompts."""
        expert = self.load_expert()
        expert = expert if self.device is None else expert.to(self.device)
        answers: list[list[int]] = []
        for start in range(0, self.samples, self.batch_size):
            prompts = [p.ids for p in self.prompts[start : start + self.batch_size]]
            self._check(padded_left(prompts, self.encoder.pad_id), expert, start)
            answers += greedy_answers(expert, prompts, self.encoder, self.settings.generated_tokens)
        return answers

    def _check(self, batch: Mapping[str, Tensor], model: nn.Module, start: int) -> None:
        check_token_ids(batch, model, lambda row: self.row_name(start + row))
