"""Texts as token ids for a language model, one by one and as padded batches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress, takewhile
from operator import index
from typing import Any, ClassVar

import torch
from torch import Tensor

from fusion_bench_featcal.data.templates import (
    Chat,
    answer_end_tokens,
    render_chat,
    special_ids,
    template_prefix_length,
)
from fusion_bench_featcal.data.text_formats import Text
from fusion_bench_featcal.data.text_limits import NO_LIMIT, longest_text
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.place import error_context
from fusion_bench_featcal.errors.words import option, user_term
from fusion_bench_featcal.families.base import NO_TARGET


@dataclass(frozen=True)
class Sample:
    """One text in token ids, without padding.

    Attributes:
        ids: The model's input: the prompt and, for a decoder-only model, the target.
        labels: The target, or None. For a decoder-only model it is aligned with `ids`, -100 on the
            prompt.
        types: 0 and 1 for the first and second text of a pair.
        is_cut: Whether it is only a part of a longer text.
        unread: Keys of a chat's turns that are not shown to the model.
    """

    ids: list[int]
    labels: list[int] | None = None
    types: list[int] | None = None
    is_cut: bool = False
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class _TokenizedText:
    """A text in token ids before truncation.

    Attributes:
        prompt: The prompt, as a sample without labels.
        target: Token ids of the target, or None without one.
        labels: Labels of the target, -100 for tokens that do not count. By default `target`.
        prefix_length: Number of the prompt's first tokens that are preserved if it is cut.
    """

    prompt: Sample
    target: list[int] | None = None
    labels: list[int] | None = None
    prefix_length: int = 0


@dataclass(frozen=True)
class TextEncoder:
    """Converts texts of `read_row` to token ids. Each kind of model has a subclass.

    This class has the common steps, and reads no targets. Texts longer than `max_length` are cut.

    Attributes:
        tokenizer: The tokenizer.
        max_length: Maximum number of tokens. If it is None, a text beyond the limit of the
            tokenizer, or of the model's positions, is an error.
        positions: Result of `positions_of` for the model.
        model_ends: End tokens of the models, from `end_tokens`.
        model_start: First token of answers (`forced_bos_token_id`), or None.
        generates_text: Whether the models generate answers, the targets.
        is_encoder_decoder: Whether the decoder reads the target, apart from the prompt.
    """

    tokenizer: Any
    max_length: int | None = None
    positions: int = NO_LIMIT
    model_ends: frozenset[int] = frozenset()
    model_start: int | None = None
    generates_text: ClassVar[bool] = True
    is_encoder_decoder: ClassVar[bool] = False

    def __post_init__(self) -> None:
        most, limit = longest_text(self.tokenizer, self.positions)
        if self.max_length is not None and self.max_length > most:
            raise CalibrationError(
                f"{option('max_length', self.max_length)} is more than {most} tokens, {limit}. "
                "Lower it"
            )

    def sample(self, text: Text) -> Sample:
        """Return a text with its target.

        Raises:
            CalibrationError: If the text is empty or too long, the target is empty, or a required
                target is missing.
        """
        with error_context(text.name):  # a tokenizer may panic
            tokens = self._tokenize(text)
        self._check_target(tokens, text.name)
        return self._cut(tokens, text.name)

    @cached_property
    def ends(self) -> frozenset[int]:
        """Tokens that end an answer.

        They are those of the tokenizer and of the models, and the first one that the chat template
        writes after an answer.
        """
        ends = {self.tokenizer.eos_token_id, *self.model_ends, *answer_end_tokens(self.tokenizer)}
        return frozenset(ends - {None})

    def prompt(self, text: Text, reserved: int) -> Sample:
        """Return a text's prompt. For a decoder-only model it leaves room for `reserved` tokens.

        Raises:
            CalibrationError: If there is no text, or it is too long.
        """
        return self._cut_prompt(self._tokenize(text), reserved, text.name)

    def answer_length(self, most: int) -> int:
        """Return how many tokens a model can write after a prompt of `prompt`, at most `most`."""
        return min(most, self.positions - self.positions // 2)

    def answered(self, prompt: Sample, answer: list[int], name: str) -> Sample:
        """Return a prompt with a model's answer as its target."""
        return self._cut(_TokenizedText(prompt, answer), name)

    def until_end(self, answer: list[int]) -> list[int]:
        """Return an answer up to and including its first end token."""
        stops = (n + 1 for n, token in enumerate(answer) if token in self.ends)
        return answer[: next(stops, len(answer))]

    @property
    def pad_id(self) -> int:
        """Token for padding. Any token would do, because padding never counts."""
        candidates = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        return next(token for token in candidates if token is not None)

    @property
    def _limit(self) -> int:
        return self.max_length or longest_text(self.tokenizer, self.positions)[0]

    @cached_property
    def _marks(self) -> frozenset[int]:
        """Tokens without content: begin, end, padding, ignored. The unknown token has content."""
        marks = {*self.tokenizer.all_special_ids, NO_TARGET} - {self.tokenizer.unk_token_id}
        return frozenset(marks)

    def _has_words(self, ids: list[int]) -> bool:
        return any(token not in self._marks for token in ids)

    def _tokenize(self, text: Text) -> _TokenizedText:
        """Return prompt and target of a text in token ids, before truncation."""
        if text.pair is not None and self.generates_text:
            raise CalibrationError(f"{text.name}: only classifiers read text_pair. Leave it out")
        steps = {"tokens": self._read_ids, "chat": self._tokenize_chat}
        tokens = steps.get(text.form, self._tokenize_plain)(text)
        is_blank = isinstance(text.prompt, str) and not f"{text.prompt}{text.pair or ''}".strip()
        if is_blank or not self._has_words(tokens.prompt.ids):
            raise CalibrationError(
                f"{text.name}: the text is empty, or consists of padding. Remove the example"
            )
        return tokens

    def _read_ids(self, text: Text) -> _TokenizedText:
        """Return a text that is stored as token ids, without padding. Subclasses add the target."""
        return _TokenizedText(Sample(_unpadded(text, None)[0]))

    def _tokenize_chat(self, text: Text) -> _TokenizedText:
        if self.is_encoder_decoder or not getattr(self.tokenizer, "chat_template", None):
            raise CalibrationError(
                f"{text.name}: messages need a decoder-only model or classifier and a tokenizer "
                "with a chat template; give examples with prompt and target, or "
                f"{user_term('template')}"
            )
        chat = render_chat(self.tokenizer, text)
        ids, target = self._tokenize_rendered(chat)
        is_long = len(ids) > self._limit // 2
        prefix = template_prefix_length(self.tokenizer, text, ids) if is_long else 0
        return _TokenizedText(Sample(ids, unread=chat.unread), target, prefix_length=prefix)

    def _tokenize_rendered(self, chat: Chat) -> tuple[list[int], list[int] | None]:
        """Return prompt and target of a rendered chat. By default the prompt is all of it."""
        return self._token_ids(chat.prompt + (chat.answer or ""), special=False), None

    def _tokenize_plain(self, text: Text) -> _TokenizedText:
        """Let the tokenizer encode and cut a text or pair. Subclasses add the target."""
        encoded = self.tokenizer(text.prompt, text.pair, verbose=False)
        is_cut = self.max_length is not None and len(encoded["input_ids"]) > self.max_length
        if is_cut:
            cut: Any = {"truncation": True, "max_length": self.max_length}
            encoded = self.tokenizer(text.prompt, text.pair, verbose=False, **cut)
        types = encoded.get("token_type_ids") if text.pair is not None else None
        return _TokenizedText(Sample(list(encoded["input_ids"]), None, types, is_cut))

    def _token_ids(self, text: str, *, special: bool) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    def _check_target(self, tokens: _TokenizedText, name: str) -> None:
        """Refuse a target without content."""
        if tokens.target is not None and not self._has_words(tokens.labels or tokens.target):
            raise CalibrationError(
                f"{name}: the target is empty. Add a text, remove the example, or use "
                f"{option('calibration_targets', 'generated')}"
            )

    def _cut(self, tokens: _TokenizedText, name: str) -> Sample:
        """Return prompt and target as model inputs, within the limits."""
        return self._cut_prompt(tokens, 0, name)

    def _cut_prompt(self, tokens: _TokenizedText, reserved: int, name: str) -> Sample:
        """Return a prompt that leaves room for `reserved` tokens, without its oldest part."""
        limit, prompt, ids = self._limit, tokens.prompt, tokens.prompt.ids
        room = max(limit - reserved, limit // 2)
        self._refuse_long(len(ids), room, name)
        if len(ids) <= room:
            return prompt
        prefix = min(tokens.prefix_length, room // 2)
        return replace(prompt, ids=ids[:prefix] + ids[len(ids) - room + prefix :], is_cut=True)

    def _refuse_long(self, length: int, limit: int, name: str) -> None:
        if self.max_length is None and length > limit and limit < NO_LIMIT:
            answer = self._limit - limit
            answer = f", of which {answer} are for the answer" if answer else ""
            raise CalibrationError(
                f"{name}: {length} tokens, but {longest_text(self.tokenizer, self.positions)[1]} "
                f"is {self._limit}{answer}. {option('max_length')} truncates long texts"
            )


class CausalTextEncoder(TextEncoder):
    """Converts texts for a decoder-only language model, which reads prompt and target as one text.

    Both are tokenized as one text, as in the model's training. Chats are rendered by the
    tokenizer's chat template, and the last answer is the target. A target ends at its first end
    token. A long prompt loses its oldest part after the tokens that the template writes before all
    turns, so that the target keeps at least half of `max_length`.
    """

    @cached_property
    def _special(self) -> frozenset[int]:
        return special_ids(self.tokenizer)

    def _read_ids(self, text: Text) -> _TokenizedText:
        ids, labels = _unpadded(text, text.prompt.get("labels"))
        if labels is None:
            return _TokenizedText(Sample(ids))
        start = next((n for n, label in enumerate(labels) if label != NO_TARGET), len(labels))
        return _TokenizedText(Sample(ids[:start]), ids[start:], labels[start:])

    def _tokenize_plain(self, text: Text) -> _TokenizedText:
        prompt, target = self._without_end(text.prompt), None
        if text.target is not None:
            prompt, target = self._split(text.prompt, text.target, special=True)
            end = self.tokenizer.eos_token_id
            target = self.until_end([*target, *([] if end is None else [end])])
        prefix = len([*takewhile(self._special.__contains__, prompt)])
        return _TokenizedText(Sample(prompt), target, prefix_length=prefix)

    def _tokenize_rendered(self, chat: Chat) -> tuple[list[int], list[int] | None]:
        if chat.answer is None:
            return super()._tokenize_rendered(chat)
        ids, target = self._split(chat.prompt, chat.answer, special=False)
        return ids, self.until_end(target)

    def _split(self, prompt: str, target: str, *, special: bool) -> tuple[list[int], list[int]]:
        """Tokenize prompt and target as one text, and split it.

        If a plain text has no blank in between, or a word of both is one token, the target is
        tokenized as a text of its own.
        """
        prompt_ids = self._without_end(prompt, special)
        if not special or any(map(str.isspace, prompt[-1:] + target[:1])):
            ids = self._without_end(prompt + target, special)
            pairs = enumerate(zip(prompt_ids, ids, strict=False))
            start = next((n for n, (a, b) in pairs if a != b), min(len(prompt_ids), len(ids)))
            # a blank at the end of the prompt may be part of the target's first token
            if not self.tokenizer.decode(prompt_ids[start:], skip_special_tokens=True).strip():
                return ids[:start], ids[start:]
        return prompt_ids, self._token_ids(target, special=False)

    def _without_end(self, text: str, special: bool = True) -> list[int]:
        """Return token ids without the end token that some tokenizers add to every text."""
        ids = self._token_ids(text, special=special)
        return ids[:-1] if special and ids[-1:] == [self.tokenizer.eos_token_id] else ids

    def _cut(self, tokens: _TokenizedText, name: str) -> Sample:
        limit, target = self._limit, tokens.target
        if target is None:
            return super()._cut(tokens, name)
        self._refuse_long(len(tokens.prompt.ids) + len(target), limit, name)
        prompt = self._cut_prompt(tokens, len(target), name)
        labels = [NO_TARGET] * len(prompt.ids) + (tokens.labels or target)
        ids = [*prompt.ids, *target]
        is_cut = prompt.is_cut or len(ids) > limit
        return replace(prompt, ids=ids[:limit], labels=labels[:limit], is_cut=is_cut)


class Seq2SeqTextEncoder(TextEncoder):
    """Converts prompts and targets for an encoder-decoder, which reads them apart.

    The tokenizer encodes both, and cuts long prompts.
    """

    is_encoder_decoder = True

    def prompt(self, text: Text, reserved: int) -> Sample:
        """Return a text's prompt. Answers need no room in it, whatever `reserved` is."""
        return super().prompt(text, 0)

    def answer_length(self, most: int) -> int:
        """Return how many tokens a model can write, at most `most`."""
        return min(most, self.positions)

    def answered(self, prompt: Sample, answer: list[int], name: str) -> Sample:
        """Return a prompt with a model's answer as its target."""
        return super().answered(prompt, answer + self._suffix, name)

    @cached_property
    def _suffix(self) -> list[int]:
        """Tokens that the tokenizer writes after the end of targets, such as mBART's language."""
        empty_target = self._target_ids("")
        return empty_target[len(self.until_end(empty_target)) :]

    def _target_ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text_target=text, verbose=False)["input_ids"])

    def _read_ids(self, text: Text) -> _TokenizedText:
        ids, labels = _unpadded(text, text.prompt.get("labels"), are_aligned=False)
        target = None if labels is None else [token for token in labels if token != NO_TARGET]
        return _TokenizedText(Sample(ids), target)

    def _tokenize_plain(self, text: Text) -> _TokenizedText:
        target = None if text.target is None else self._target_ids(text.target)
        return replace(super()._tokenize_plain(text), target=target)

    def _check_target(self, tokens: _TokenizedText, name: str) -> None:
        """Refuse a missing or empty target, or one in another language than the answers."""
        if tokens.target is None:
            raise CalibrationError(
                f"{name}: an encoder-decoder needs a target, but the example has none. Add labels "
                f"(or a target), or use {option('calibration_targets', 'generated')}"
            )
        super()._check_target(tokens, name)
        first = tokens.target[0]
        if self.model_start not in (None, first) and first in self._marks:
            token, forced = self.tokenizer.convert_ids_to_tokens([first, self.model_start])
            raise CalibrationError(
                f"{name}: the target begins with {token}, but the models begin answers with "
                f"{forced} (forced_bos_token_id). Write the target's language as tgt_lang into "
                "tokenizer_config.json"
            )

    def _cut(self, tokens: _TokenizedText, name: str) -> Sample:
        limit, target = self._limit, tokens.target
        if target is not None:
            self._refuse_long(len(target), limit, f"{name}, target")
            target = target[:limit]
        return replace(super()._cut(tokens, name), labels=target)


class ClassifierTextEncoder(TextEncoder):
    """Converts texts or pairs for a classifier, or an encoder without a head.

    The tokenizer encodes a text or pair, and cuts a long one. A chat includes its last turn, and
    loses its oldest part. Targets are not read.
    """

    generates_text = False


def _unpadded(
    text: Text, labels: object, *, are_aligned: bool = True
) -> tuple[list[int], list[int] | None]:
    """Return stored token ids and labels without padding.

    Args:
        text: A text in the form `tokens`.
        labels: Its labels, or None.
        are_aligned: Whether there is a label for each token, so that padding has one as well.
    """
    stored = dict(text.prompt, labels=labels)
    columns = {k: _integers(v, f"{text.name}: {k}") for k, v in stored.items() if v is not None}
    ids, targets = columns["input_ids"], columns.get("labels")
    mask = columns.get("attention_mask", [1] * len(ids))
    is_aligned = targets is None or not are_aligned or len(targets) == len(ids)
    if len(mask) != len(ids) or not is_aligned:
        raise CalibrationError(
            f"{text.name}: {len(ids)} input_ids, but {len(mask)} entries in attention_mask and "
            f"{len(targets or [])} labels"
        )
    if targets is not None and are_aligned:
        targets = [*compress(targets, mask)]
    return [*compress(ids, mask)], targets


def pad_samples(samples: Sequence[Sample], encoder: TextEncoder) -> dict[str, Tensor]:
    """Return samples as one batch, padded to the longest of them.

    Returns:
        `input_ids`, `attention_mask` and, if samples have them, `labels` and `token_type_ids`, each
        `[batch, length]`, int64. Labels are -100 on padding.
    """
    left, ids = encoder.tokenizer.padding_side == "left", [sample.ids for sample in samples]
    batch = {
        "input_ids": pad_rows(ids, encoder.pad_id, left=left),
        "attention_mask": pad_rows([[1] * len(row) for row in ids], 0, left=left),
    }
    if any(sample.labels is not None for sample in samples):
        labels = [sample.labels or [NO_TARGET] * len(sample.ids) for sample in samples]
        batch["labels"] = pad_rows(labels, NO_TARGET, left=left and not encoder.is_encoder_decoder)
    if any(sample.types is not None for sample in samples):
        types = [sample.types or [0] * len(sample.ids) for sample in samples]
        batch["token_type_ids"] = pad_rows(types, 0, left=left)
    return batch


def pad_rows(rows: Sequence[list[int]], fill: int, *, left: bool) -> Tensor:
    """Return rows of unequal length as one int64 tensor, padded on one side."""
    longest = max(map(len, rows))
    pads = ([fill] * (longest - len(row)) for row in rows)
    padded = [[*pad, *row] if left else [*row, *pad] for pad, row in zip(pads, rows, strict=True)]
    return torch.tensor(padded, dtype=torch.long)


def _integers(values: Any, name: str) -> list[int]:
    try:  # bool is allowed for masks
        return [int(index(value)) for value in getattr(values, "tolist", values.__iter__)()]
    except TypeError as error:
        raise CalibrationError(f"{name} must be integers: {error}. Store them as such") from error
