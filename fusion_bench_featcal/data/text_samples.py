"""Texts as token ids for a language model, one by one and as padded batches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from operator import index
from typing import Any, Literal

import torch
from torch import Tensor

from fusion_bench_featcal.data.templates import (
    end_of_answers,
    head_length,
    rendered_chat,
    special_ids,
)
from fusion_bench_featcal.data.text_formats import Text
from fusion_bench_featcal.data.text_limits import NO_LIMIT, longest_text
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.place import error_context
from fusion_bench_featcal.errors.words import option, user_term
from fusion_bench_featcal.families.base import NO_TARGET

TextKind = Literal["seq2seq", "causal", "classification"]


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
class _Ids:
    """A row in token ids before truncation.

    Attributes:
        prompt: The prompt.
        target: The target, or None.
        scored: The target, -100 for tokens that do not count.
        head: Number of the prompt's first tokens that stay if it is cut.
        types: As in `Sample`.
        is_cut: Whether the tokenizer cut it.
        unread: As in `Sample`.
    """

    prompt: list[int]
    target: list[int] | None = None
    scored: list[int] | None = None
    head: int = 0
    types: list[int] | None = None
    is_cut: bool = False
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class TextEncoder:
    """Converts texts of `read_row` to token ids.

    For a decoder-only model prompt and target are tokenised as one text, as in its training. Chats
    are rendered by the tokenizer's chat template, and the last answer is the target. A target ends
    at its first end token. For a classifier a row is one text or pair, and a chat includes its last
    turn. Targets are not read.

    Texts longer than `max_length` are cut. A decoder's prompt, or a chat, loses its oldest part,
    behind what a template writes in front of all, so that the target keeps at least half. Other
    texts are cut as the tokenizer cuts them.

    Attributes:
        tokenizer: The tokenizer.
        kind: The kind of model.
        max_length: Maximum number of tokens. If it is None, a text beyond the limit of the
            tokenizer, or of the model's positions, is an error.
        positions: Positions of the model, as of `positions_of`.
        model_ends: End tokens of the models, as of `end_tokens`.
        model_start: First token of answers, their `forced_bos_token_id`, or None.
    """

    tokenizer: Any
    kind: TextKind
    max_length: int | None = None
    positions: int = NO_LIMIT
    model_ends: frozenset[int] = frozenset()
    model_start: int | None = None

    def __post_init__(self) -> None:
        most, limit = longest_text(self.tokenizer, self.positions)
        if self.max_length is not None and self.max_length > most:
            raise CalibrationError(
                f"{option('max_length', self.max_length)} is more than {most} tokens, {limit}: "
                "lower it"
            )

    def sample(self, text: Text) -> Sample:
        """Return a text with its target.

        Raises:
            CalibrationError: If the text is empty or too long, the target is empty, or a required
                target is missing.
        """
        name = text.name
        with error_context(name):  # a tokenizer may panic
            ids = self._ids(text)
        if self.kind == "seq2seq" and ids.target is None:
            raise CalibrationError(
                f"{name}: no target, which an encoder-decoder needs. Give the rows labels (or a "
                f"target), or use {option('calibration_targets', 'generated')}"
            )
        if ids.target is not None and not self._has_words(ids.scored or ids.target):
            raise CalibrationError(
                f"{name}: the target is empty. Give it a text, leave the row out, or use "
                f"{option('calibration_targets', 'generated')}"
            )
        if self.kind == "seq2seq" and ids.target:
            self._refuse_language(ids.target[0], name)
        return self._cut(ids, name)

    @cached_property
    def ends(self) -> frozenset[int]:
        """Tokens that end an answer.

        They are those of the tokenizer and of the models, and the first one that the chat template
        writes behind an answer.
        """
        ends = {self.tokenizer.eos_token_id, *self.model_ends, *end_of_answers(self.tokenizer)}
        return frozenset(ends - {None})

    def prompt(self, text: Text, reserved: int) -> Sample:
        """Return a text's prompt. For a decoder-only model it leaves room for `reserved` tokens.

        Raises:
            CalibrationError: If there is no text, or it is too long.
        """
        return self._cut_prompt(self._ids(text), reserved, text.name)

    def answer_length(self, most: int) -> int:
        """Return how many tokens a model can write behind a prompt of `prompt`, at most `most`."""
        if self.kind == "seq2seq":
            return min(most, self.positions)
        return min(most, self.positions - self.positions // 2)

    def answered(self, prompt: Sample, answer: list[int], name: str) -> Sample:
        """Return a prompt with a model's answer as its target."""
        ids = _Ids(
            prompt.ids, answer + self._behind_end, is_cut=prompt.is_cut, unread=prompt.unread
        )
        return self._cut(ids, name)

    @property
    def pad_id(self) -> int:
        """Token for padding. Any token would do, because padding never counts."""
        candidates = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        return next(token for token in candidates if token is not None)

    @property
    def _limit(self) -> int:
        return self.max_length or longest_text(self.tokenizer, self.positions)[0]

    @cached_property
    def _special(self) -> frozenset[int]:
        return special_ids(self.tokenizer)

    @cached_property
    def _marks(self) -> frozenset[int]:
        """Tokens without content: begin, end, padding, ignored. The unknown token has content."""
        marks = {*self.tokenizer.all_special_ids, NO_TARGET} - {self.tokenizer.unk_token_id}
        return frozenset(marks)

    def _has_words(self, ids: list[int]) -> bool:
        return any(token not in self._marks for token in ids)

    def _ids(self, text: Text) -> _Ids:
        """Return prompt and target of a text in token ids, before truncation."""
        is_classified = self.kind == "classification"
        if text.pair is not None and not is_classified:
            raise CalibrationError(f"{text.name}: text_pair is for classifiers. Leave it out")
        if text.form == "tokens":
            labels = None if is_classified else text.prompt.get("labels")
            ids = _tokenised(text, self.kind, labels)
        elif text.form == "chat":
            ids = self._chat(text)
        elif self.kind == "causal":
            ids = self._plain(text.prompt, text.target)
        else:
            ids = self._encoded(text)
        is_blank = isinstance(text.prompt, str) and not f"{text.prompt}{text.pair or ''}".strip()
        if is_blank or not self._has_words(ids.prompt):
            raise CalibrationError(
                f"{text.name}: the text is empty, or padding alone. Remove the row"
            )
        return ids

    def _chat(self, text: Text) -> _Ids:
        if self.kind == "seq2seq" or not getattr(self.tokenizer, "chat_template", None):
            raise CalibrationError(
                f"{text.name}: messages need a decoder-only model or classifier and a tokenizer "
                "with a chat template; give rows with prompt and target, or "
                f"{user_term('template')}"
            )
        chat = rendered_chat(self.tokenizer, text)
        read = chat.answer if self.kind == "classification" else None
        ids, target = self._tokens(chat.prompt + (read or ""), special=False), None
        if chat.answer is not None and read is None:
            ids, target = self._pair(chat.prompt, chat.answer, special=False)
            target = self.until_end(target)
        is_long = len(ids) > self._limit // 2
        head = head_length(self.tokenizer, text, ids) if is_long else 0
        return _Ids(ids, target, head=head, unread=chat.unread)

    def until_end(self, answer: list[int]) -> list[int]:
        """Return an answer up to and including its first end token."""
        stops = (n + 1 for n, token in enumerate(answer) if token in self.ends)
        return answer[: next(stops, len(answer))]

    def _plain(self, prompt: str, target: str | None) -> _Ids:
        before, after = self._alone(prompt), None
        if target is not None:
            before, after = self._pair(prompt, target, special=True)
            end = self.tokenizer.eos_token_id
            after = self.until_end([*after, *([] if end is None else [end])])
        return _Ids(before, after, head=len([*takewhile(self._special.__contains__, before)]))

    def _encoded(self, text: Text) -> _Ids:
        """Return a text or pair for an encoder as the tokenizer encodes, cuts and labels it."""
        encoded, target = self.tokenizer(text.prompt, text.pair, verbose=False), None
        is_cut = self.max_length is not None and len(encoded["input_ids"]) > self.max_length
        if is_cut:
            cut: Any = {"truncation": True, "max_length": self.max_length}
            encoded = self.tokenizer(text.prompt, text.pair, verbose=False, **cut)
        if self.kind == "seq2seq" and text.target is not None:
            target = self._target(text.target)
        types = encoded.get("token_type_ids") if text.pair is not None else None
        return _Ids(list(encoded["input_ids"]), target, types=types, is_cut=is_cut)

    def _target(self, text: str) -> list[int]:
        """Return a target for an encoder-decoder as the tokenizer encodes it."""
        return list(self.tokenizer(text_target=text, verbose=False)["input_ids"])

    @cached_property
    def _behind_end(self) -> list[int]:
        """Tokens that the tokenizer writes behind the end of targets, such as mBART's language."""
        nothing = self._target("") if self.kind == "seq2seq" else []
        return nothing[len(self.until_end(nothing)) :]

    def _refuse_language(self, first: int, name: str) -> None:
        """Refuse a target in another language than the models are told to answer in."""
        if self.model_start not in (None, first) and first in self._marks:
            token, forced = self.tokenizer.convert_ids_to_tokens([first, self.model_start])
            raise CalibrationError(
                f"{name}: the target begins with {token}, but the models begin answers with "
                f"{forced} (forced_bos_token_id). Write the target's language as tgt_lang into "
                "tokenizer_config.json"
            )

    def _pair(self, prompt: str, target: str, *, special: bool) -> tuple[list[int], list[int]]:
        """Tokenise prompt and target as one text, and split it.

        If a plain text has no blank in between, or a word of both is one token, the target is
        tokenised as a text of its own.
        """
        alone = self._alone(prompt, special)
        if not special or any(map(str.isspace, prompt[-1:] + target[:1])):
            whole = self._alone(prompt + target, special)
            pairs = enumerate(zip(alone, whole, strict=False))
            start = next((n for n, (a, b) in pairs if a != b), min(len(alone), len(whole)))
            # a blank at the end of the prompt may be part of the target's first token
            if not self.tokenizer.decode(alone[start:], skip_special_tokens=True).strip():
                return whole[:start], whole[start:]
        return alone, self._tokens(target, special=False)

    def _alone(self, text: str, special: bool = True) -> list[int]:
        """Return token ids without the end token that some tokenizers add to every text."""
        ids = self._tokens(text, special=special)
        return ids[:-1] if special and ids[-1:] == [self.tokenizer.eos_token_id] else ids

    def _tokens(self, text: str, *, special: bool = True) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    def _cut(self, ids: _Ids, name: str) -> Sample:
        """Return prompt and target as model inputs, within the limits."""
        limit, target = self._limit, ids.target
        if target is None:
            return self._cut_prompt(ids, 0, name)
        if self.kind == "seq2seq":
            self._refuse_long(len(target), limit, f"{name}, target")
            return replace(self._cut_prompt(ids, 0, name), labels=target[:limit])
        self._refuse_long(len(ids.prompt) + len(target), limit, name)
        sample = self._cut_prompt(ids, len(target), name)
        labels = [NO_TARGET] * len(sample.ids) + (ids.scored or target)
        whole = [*sample.ids, *target]
        is_cut = sample.is_cut or len(whole) > limit
        return replace(sample, ids=whole[:limit], labels=labels[:limit], is_cut=is_cut)

    def _cut_prompt(self, ids: _Ids, reserved: int, name: str) -> Sample:
        """Return a prompt that leaves room for `reserved` tokens, without its oldest part."""
        limit, prompt = self._limit, ids.prompt
        room = limit if self.kind == "seq2seq" else max(limit - reserved, limit // 2)
        self._refuse_long(len(prompt), room, name)
        if is_long := len(prompt) > room:
            head = min(ids.head, room // 2)
            prompt = prompt[:head] + prompt[len(prompt) - room + head :]
        return Sample(prompt, None, ids.types, is_long or ids.is_cut, ids.unread)

    def _refuse_long(self, length: int, limit: int, name: str) -> None:
        if self.max_length is None and length > limit and limit < NO_LIMIT:
            answer = self._limit - limit
            answer = f", with {answer} for the answer" if answer else ""
            raise CalibrationError(
                f"{name}: {length} tokens, but {longest_text(self.tokenizer, self.positions)[1]} "
                f"is {self._limit}{answer}. {option('max_length')} cuts long texts"
            )


def _tokenised(text: Text, kind: TextKind, labels: object) -> _Ids:
    """Return a row of token ids without padding."""
    name, columns = text.name, dict(text.prompt, labels=labels)
    values = {k: _integers(v, f"{name}: {k}") for k, v in columns.items() if v is not None}
    ids, labels = values["input_ids"], values.get("labels")
    mask = values.get("attention_mask", [1] * len(ids))
    is_aligned = labels is None or kind == "seq2seq" or len(labels) == len(ids)
    if len(mask) != len(ids) or not is_aligned:
        raise CalibrationError(
            f"{name}: {len(ids)} input_ids, but {len(mask)} entries in attention_mask and "
            f"{len(labels or [])} labels"
        )
    ids = [token for token, counts in zip(ids, mask, strict=True) if counts]
    if labels is None:
        return _Ids(ids)
    if kind == "seq2seq":
        return _Ids(ids, [token for token in labels if token != NO_TARGET])
    labels = [label for label, counts in zip(labels, mask, strict=True) if counts]
    start = next((n for n, label in enumerate(labels) if label != NO_TARGET), len(labels))
    return _Ids(ids[:start], ids[start:], labels[start:])


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
        batch["labels"] = pad_rows(labels, NO_TARGET, left=left and encoder.kind == "causal")
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
