"""Texts as token ids for a language model, one by one and as padded batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor

from fusion_bench_featcal.data.chats import bounded_templates
from fusion_bench_featcal.data.text_formats import Text
from fusion_bench_featcal.data.text_limits import NO_LIMIT, longest_text
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.block import first_line
from fusion_bench_featcal.families.base import NO_TARGET

TextKind = Literal["seq2seq", "causal", "classification"]
_DATE = "26 Jul 2024"  # by default Llama's chat template inserts the current date


@dataclass(frozen=True)
class Sample:
    """One text in token ids, without padding."""

    ids: list[int]  # the model's input: the prompt and, for a decoder-only model, the target
    # The target, or None. For a decoder-only model it is aligned with `ids`, -100 on the prompt.
    labels: list[int] | None = None
    types: list[int] | None = None  # 0 and 1 for the first and second text of a pair


@dataclass(frozen=True)
class _Ids:
    """A row in token ids before truncation. `scored` is the target, -100 for uncounted tokens."""

    prompt: list[int]
    target: list[int] | None = None
    scored: list[int] | None = None


@dataclass(frozen=True)
class TextEncoder:
    """Converts texts of `read_row` to token ids.

    For a decoder-only model prompt and target are tokenised as one text, as in its training. Chats
    are rendered by the tokenizer's chat template, and the last answer is the target. Texts longer
    than `max_length` are truncated: a prompt at its end, so that the target keeps at least half.
    Without `max_length` a text beyond the limit of the tokenizer, or of the model's `positions`, is
    an error. For a classifier a row is one text or pair, and a chat includes its last turn. Targets
    are not read.
    """

    tokenizer: Any
    kind: TextKind
    max_length: int | None = None
    positions: int = NO_LIMIT

    def __post_init__(self) -> None:
        most, limit = longest_text(self.tokenizer, self.positions)
        if self.max_length is not None and self.max_length > most:
            raise CalibrationError(
                f"max_length = {self.max_length} is more than {most} tokens, {limit}: lower it"
            )

    def sample(self, text: Text) -> Sample:
        """Return a text with its target.

        Raises:
            CalibrationError: If the text is empty or too long, the target is empty, or a required
                target is missing.
        """
        if self.kind == "classification":
            return self._classified(text)
        ids, name = self._ids(text), text.name
        if self.kind == "seq2seq" and ids.target is None:
            raise CalibrationError(
                f"{name}: no target, which an encoder-decoder needs. Give the rows labels (or a "
                "target), or set calibration_targets=generated"
            )
        if ids.target is not None and not self._has_words(ids.scored or ids.target):
            raise CalibrationError(
                f"{name}: the target is empty. Give it a text, leave the row out, or set "
                "calibration_targets=generated"
            )
        return self._cut(ids, name)

    def prompt(self, text: Text, reserved: int) -> list[int]:
        """Return a text's prompt. For a decoder-only model it leaves room for `reserved` tokens.

        Raises:
            CalibrationError: If there is no text, or it is too long.
        """
        prompt, limit = self._ids(text).prompt, self._limit
        room = limit if self.kind == "seq2seq" else max(limit - reserved, limit // 2)
        return self._within(prompt, room, text.name, len(prompt))

    def answer_length(self, most: int) -> int:
        """Return how many tokens a model can write behind a prompt of `prompt`, at most `most`."""
        if self.kind == "seq2seq":
            return min(most, self.positions)
        return min(most, self.positions - self.positions // 2)

    def answered(self, prompt: list[int], answer: list[int], name: str) -> Sample:
        """Return a prompt with a model's answer as its target."""
        return self._cut(_Ids(prompt, answer), name)

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

    def _classified(self, text: Text) -> Sample:
        """Return the text of a classifier, or a pair of texts."""
        if text.form == "tokens":
            ids, types = _tokenised(text, "causal", labels=None).prompt, None
        elif text.form == "chat":
            prompt, target = self._rendered(text)
            ids, types = self._tokens(prompt + (target or ""), special=False), None
        else:
            cut = {"truncation": True, "max_length": self.max_length} if self.max_length else {}
            encoded = self.tokenizer(text.prompt, text.pair, verbose=False, **cut)
            ids = list(encoded["input_ids"])
            types = encoded.get("token_type_ids") if text.pair is not None else None
        self._refuse_empty(ids, text.name)
        return Sample(self._within(ids, self._limit, text.name, len(ids)), types=types)

    def _ids(self, text: Text) -> _Ids:
        """Return prompt and target of a text in token ids, before truncation."""
        if text.pair is not None:
            raise CalibrationError(f"{text.name}: text_pair is for classifiers. Leave it out")
        if text.form == "tokens":
            ids = _tokenised(text, self.kind, text.prompt.get("labels"))
        elif text.form == "chat":
            prompt, target = self._rendered(text)
            ids = _Ids(self._tokens(prompt, special=False))
            if target is not None:
                ids = _Ids(*self._pair(prompt, target, special=False))
        else:
            ids = self._plain(text.prompt, text.target)
        self._refuse_empty(ids.prompt, text.name)
        return ids

    def _refuse_empty(self, ids: list[int], name: str) -> None:
        if not self._has_words(ids):
            raise CalibrationError(f"{name}: the text is empty, or padding alone. Remove the row")

    def _plain(self, prompt: str, target: str | None) -> _Ids:
        if not prompt.strip():
            return _Ids([])
        if self.kind == "seq2seq":
            ids = self._tokens(prompt)
            if target is None:
                return _Ids(ids)
            return _Ids(ids, list(self.tokenizer(text_target=target, verbose=False)["input_ids"]))
        if target is None:
            return _Ids(self._alone(prompt))
        before, after = self._pair(prompt, target, special=True)
        end = self.tokenizer.eos_token_id
        return _Ids(before, [*after, *([] if end is None else [end])])

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

    def _rendered(self, text: Text) -> tuple[str, str | None]:
        """Return a chat as texts: what comes before the answer, and the answer."""
        if self.kind == "seq2seq" or not getattr(self.tokenizer, "chat_template", None):
            raise CalibrationError(
                f"{text.name}: messages need a decoder-only model or classifier and a tokenizer "
                "with a chat template; give rows with prompt and target, or "
                "a tokenizer that has one"
            )
        prompt = self._render(text.name, text.prompt, add_generation_prompt=True)
        if text.target is None:
            return prompt, None
        if not text.target["content"].strip():
            return prompt, ""
        turns = [*text.prompt, text.target]
        whole = self._render(text.name, turns, add_generation_prompt=False)
        if not whole.startswith(prompt):
            raise CalibrationError(
                f"{text.name}: the tokenizer's chat template renders the prompt differently once "
                "there is an answer; give rows with prompt and target"
            )
        return prompt, whole[len(prompt) :]

    def _render(self, name: str, turns: list[Any], **options: Any) -> str:
        try:
            with bounded_templates():
                return self.tokenizer.apply_chat_template(
                    turns, tokenize=False, date_string=_DATE, **options
                )
        except Exception as error:  # a template may raise any error
            raise CalibrationError(
                f"{name}: the tokenizer's chat template cannot be used: {first_line(error)}. "
                "Correct the row, or give a tokenizer with another template"
            ) from error

    def _cut(self, text: _Ids, name: str) -> Sample:
        """Return prompt and target as model inputs, within the limits."""
        limit, prompt, target = self._limit, text.prompt, text.target
        if target is None:
            return Sample(self._within(prompt, limit, name, len(prompt)))
        if self.kind == "seq2seq":
            labels = self._within(target, limit, f"{name}, target", len(target))
            return Sample(self._within(prompt, limit, name, len(prompt)), labels)
        length, prompt = len(prompt) + len(target), prompt[: max(limit - len(target), limit // 2)]
        labels = [NO_TARGET] * len(prompt) + (text.scored or target)
        return Sample(self._within(prompt + target, limit, name, length), labels[:limit])

    def _within(self, ids: list[int], limit: int, name: str, length: int) -> list[int]:
        if self.max_length is None and length > limit and limit < NO_LIMIT:
            of_answer = self._limit - limit
            raise CalibrationError(
                f"{name}: {length} tokens, but {longest_text(self.tokenizer, self.positions)[1]} "
                f"is {self._limit}{f', with {of_answer} for the answer' if of_answer else ''}. Set "
                "max_length to cut long texts"
            )
        return ids[:limit]


def _tokenised(text: Text, kind: TextKind, labels: Any) -> _Ids:
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
    padded = torch.full((len(rows), max(map(len, rows))), fill, dtype=torch.long)
    for row, ids in zip(padded, rows, strict=True):
        target = slice(len(row) - len(ids), None) if left else slice(len(ids))
        row[target] = torch.tensor(ids, dtype=torch.long)
    return padded


def _integers(values: Any, name: str) -> list[int]:
    plain = values.tolist() if hasattr(values, "tolist") else list(values)
    for value in plain:
        if not isinstance(value, Integral):  # bool is integral, and allowed for masks
            raise CalibrationError(
                f"{name} must be integers, got {value!r} ({type(value).__name__}). Store them as "
                "integers"
            )
    return [int(value) for value in plain]
