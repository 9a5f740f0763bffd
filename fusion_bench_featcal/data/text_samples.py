"""Texts as token ids for a language model, one by one and as padded batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor

from fusion_bench_featcal.data.text_formats import TARGETS, plain_row
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.block import first_line

TextKind = Literal["seq2seq", "causal", "classification"]
IGNORED = -100  # label without a target, in transformers' losses
_NO_LIMIT = 10**9  # tokenizers without a limit report a huge one
_DATE = "26 Jul 2024"  # by default Llama's chat template inserts the current date


@dataclass(frozen=True)
class Sample:
    """One text in token ids, without padding."""

    ids: list[int]  # the model's input: the prompt and, for a decoder-only model, the target
    # The target, or None. For a decoder-only model it is aligned with `ids`, -100 on the prompt.
    labels: list[int] | None


@dataclass(frozen=True)
class _Text:
    """A row in token ids before truncation. `scored` is the target, -100 for uncounted tokens."""

    prompt: list[int]
    target: list[int] | None = None
    scored: list[int] | None = None


@dataclass(frozen=True)
class TextEncoder:
    """Converts rows of a dataset, in the formats of `plain_row`, to token ids.

    The last turn of a chat is the target. The chat is rendered by the tokenizer's chat template.
    Texts longer than `max_length` are truncated: a prompt at its end, so that the target keeps at
    least half. Without `max_length` a text beyond the tokenizer's limit is an error. For a
    classifier a row is one text, and a chat includes its last turn. Targets and labels are not
    read.
    """

    tokenizer: Any
    kind: TextKind
    max_length: int | None = None

    def __post_init__(self) -> None:
        limit = tokens_allowed(self.tokenizer)
        if self.max_length is not None and self.max_length > limit:
            raise CalibrationError(
                f"method.max_length = {self.max_length} is more than the tokenizer's own limit of "
                f"{limit} tokens (model_max_length): lower it"
            )

    def sample(self, row: Mapping[str, Any], name: str) -> Sample:
        """Return a row with its target.

        Raises:
            CalibrationError: If the text is empty or too long, the target is empty, or a required
                target is missing.
        """
        text = self._read(row, name)
        if self.kind == "seq2seq" and text.target is None:
            raise CalibrationError(
                f"{name}: no target, which an encoder-decoder needs. Give the rows labels (or a "
                "target), or set method.calibration_targets=generated"
            )
        if text.target is not None and not self._has_words(text.scored or text.target):
            raise CalibrationError(
                f"{name}: the target is empty. Give it a text, choose another "
                "method.calibration_split, or set method.calibration_targets=generated"
            )
        return self._cut(text, name)

    def prompt(self, row: Mapping[str, Any], name: str, reserved: int) -> list[int]:
        """Return a row's prompt. For a decoder-only model it leaves room for `reserved` tokens.

        Raises:
            CalibrationError: If there is no text, or it is too long.
        """
        without_target = {key: value for key, value in row.items() if key not in TARGETS}
        prompt, limit = self._read(without_target, name).prompt, self._limit
        room = limit if self.kind == "seq2seq" else max(limit - reserved, limit // 2)
        return self._within(prompt, room, name, len(prompt))

    def answered(self, prompt: list[int], answer: list[int], name: str) -> Sample:
        """Return a prompt with a model's answer as its target."""
        return self._cut(_Text(prompt, answer), name)

    @property
    def pad_id(self) -> int:
        """Token for padding. Any token would do, because padding never counts."""
        candidates = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        return next(token for token in candidates if token is not None)

    @property
    def _limit(self) -> int:
        return self.max_length or tokens_allowed(self.tokenizer)

    @cached_property
    def _marks(self) -> frozenset[int]:
        """Tokens without content: begin, end, padding, ignored. The unknown token has content."""
        marks = {*self.tokenizer.all_special_ids, IGNORED} - {self.tokenizer.unk_token_id}
        return frozenset(marks)

    def _has_words(self, ids: list[int]) -> bool:
        return any(token not in self._marks for token in ids)

    def _cut(self, text: _Text, name: str) -> Sample:
        """Return prompt and target as model inputs, within the limits."""
        limit, prompt, target = self._limit, text.prompt, text.target
        if target is None:
            return Sample(self._within(prompt, limit, name, len(prompt)), None)
        if self.kind == "seq2seq":
            labels = self._within(target, limit, f"{name}, target", len(target))
            return Sample(self._within(prompt, limit, name, len(prompt)), labels)
        length, prompt = len(prompt) + len(target), prompt[: max(limit - len(target), limit // 2)]
        labels = [IGNORED] * len(prompt) + (text.scored or target)
        return Sample(self._within(prompt + target, limit, name, length), labels[:limit])

    def _within(self, ids: list[int], limit: int, name: str, length: int) -> list[int]:
        if self.max_length is None and length > limit and limit < _NO_LIMIT:
            raise CalibrationError(
                f"{name}: {length} tokens, but the tokenizer's limit (model_max_length) is "
                f"{self._limit}. Set method.max_length to cut long texts"
            )
        return ids[:limit]

    def _read(self, row: Mapping[str, Any], name: str) -> _Text:
        """Return prompt and target of a row in token ids, before truncation."""
        row = plain_row(row, name)
        if self.kind == "classification":
            row = {key: value for key, value in row.items() if key not in ("labels", "target")}
        if "input_ids" in row:
            text = self._tokenised(row, name)
        elif "messages" in row:
            text = self._chat(row["messages"], name)
        else:
            for key in ("prompt", "text", "target"):
                if type(row.get(key)) is int:  # tables contain whole numbers without quotes
                    row = {**row, key: str(row[key])}
                if not isinstance(row.get(key), str | None):
                    raise CalibrationError(
                        f"{name}: {key} is {type(row[key]).__name__}, not a text "
                        f"({str(row[key])[:60]!r}). Write it in quotes"
                    )
            text = self._plain(row["prompt"] if "prompt" in row else row["text"], row.get("target"))
        if self.kind == "classification" and text.target is not None:
            text = _Text([*text.prompt, *text.target])
        if not self._has_words(text.prompt):
            raise CalibrationError(f"{name}: the text is empty, or padding alone. Remove the row")
        return text

    def _tokenised(self, row: Mapping[str, Any], name: str) -> _Text:
        columns = {
            key: _integers(row[key], f"{name}: {key}")
            for key in ("input_ids", "attention_mask", "labels")
            if row.get(key) is not None
        }
        ids, labels = columns["input_ids"], columns.get("labels")
        mask = columns.get("attention_mask", [1] * len(ids))
        aligned = labels is None or self.kind == "seq2seq" or len(labels) == len(ids)
        if len(mask) != len(ids) or not aligned:
            raise CalibrationError(
                f"{name}: {len(ids)} input_ids, but {len(mask)} entries in attention_mask and "
                f"{len(labels or [])} labels"
            )
        ids = [token for token, counts in zip(ids, mask, strict=True) if counts]
        if labels is None:
            return _Text(ids)
        if self.kind == "seq2seq":
            return _Text(ids, [token for token in labels if token != IGNORED])
        counted_labels = [label for label, counts in zip(labels, mask, strict=True) if counts]
        start = next(
            (i for i, label in enumerate(counted_labels) if label != IGNORED), len(counted_labels)
        )
        return _Text(ids[:start], ids[start:], counted_labels[start:])

    def _chat(self, messages: Any, name: str) -> _Text:
        if self.kind == "seq2seq" or not getattr(self.tokenizer, "chat_template", None):
            raise CalibrationError(
                f"{name}: messages need a decoder-only model or classifier and a tokenizer with a "
                "chat template; give rows with prompt and target, or set modelpool.tokenizer"
            )
        turns = messages if isinstance(messages, list | tuple) else [messages]
        if not all(isinstance(turn, Mapping) for turn in turns):
            raise CalibrationError(
                f"{name}: messages must be a list of turns, each with role and content, got "
                f"{str(messages)[:60]!r}"
            )
        turns = [dict(turn) for turn in turns]
        is_answered = bool(turns) and turns[-1].get("role") == "assistant"
        question = turns[:-1] if is_answered else turns
        if not question:
            raise CalibrationError(f"{name}: the chat has no turn before the answer")
        prompt = self._rendered(question, name, add_generation_prompt=True)
        if not is_answered:
            return _Text(self._ids(prompt))
        if not str(turns[-1].get("content") or "").strip():
            return _Text(self._ids(prompt), [])
        whole = self._rendered(turns, name, add_generation_prompt=False)
        if not whole.startswith(prompt):
            raise CalibrationError(
                f"{name}: the tokenizer's chat template renders the prompt differently once there "
                "is an answer; give rows with prompt and target"
            )
        return _Text(self._ids(prompt), self._ids(whole[len(prompt) :]))

    def _rendered(self, turns: list[Any], name: str, *, add_generation_prompt: bool) -> str:
        options = {"add_generation_prompt": add_generation_prompt, "date_string": _DATE}
        try:
            return self.tokenizer.apply_chat_template(turns, tokenize=False, **options)
        except Exception as error:  # a template may raise any error
            raise CalibrationError(
                f"{name}: the tokenizer's chat template cannot be used: {first_line(error)}. "
                "Correct the row, or set modelpool.tokenizer"
            ) from error

    def _plain(self, prompt: str, target: str | None) -> _Text:
        if not prompt.strip():
            return _Text([])
        ids = list(self.tokenizer(prompt, verbose=False)["input_ids"])
        if self.kind == "seq2seq" and target is not None:
            return _Text(ids, list(self.tokenizer(text_target=target, verbose=False)["input_ids"]))
        if self.kind != "causal":
            return _Text(ids)
        end = self.tokenizer.eos_token_id
        if ids and ids[-1] == end:  # some tokenizers end every text, but here the target follows
            ids.pop()
        if target is None:
            return _Text(ids)
        return _Text(ids, [*self._ids(target), *([] if end is None else [end])])

    def _ids(self, text: str) -> list[int]:
        """Return token ids of a text without adding special tokens."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def tokens_allowed(tokenizer: Any) -> int:
    """Return a tokenizer's maximum number of tokens.

    Raises:
        CalibrationError: If its files give no number of tokens.
    """
    limit = tokenizer.model_max_length
    if type(limit) not in (int, float) or not limit >= 1 or limit != limit // 1:
        raise CalibrationError(
            f"the tokenizer's limit (model_max_length in tokenizer_config.json) is {limit!r:.40}, "
            "not a number of tokens. Correct the file"
        )
    return int(limit)


def pad_samples(samples: Sequence[Sample], encoder: TextEncoder) -> dict[str, Tensor]:
    """Return samples as one batch, padded to the longest of them.

    Returns:
        `input_ids`, `attention_mask` and, if samples have labels, `labels`, each `[batch, length]`,
        int64. Labels are -100 on padding.
    """
    pads_left = encoder.tokenizer.padding_side == "left"
    batch = {
        "input_ids": pad_rows([sample.ids for sample in samples], encoder.pad_id, left=pads_left),
        "attention_mask": pad_rows(
            [[1] * len(sample.ids) for sample in samples], 0, left=pads_left
        ),
    }
    if any(sample.labels is not None for sample in samples):
        labels = [sample.labels or [IGNORED] * len(sample.ids) for sample in samples]
        batch["labels"] = pad_rows(labels, IGNORED, left=pads_left and encoder.kind == "causal")
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
