"""Texts as token ids for a language model, one by one and as padded batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor

from fusion_bench_featcal.data.text_formats import TARGETS, plain_row
from fusion_bench_featcal.error_block import first_line
from fusion_bench_featcal.settings import CalibrationError

TextKind = Literal["seq2seq", "causal", "classification"]
IGNORED = -100  # label without a target, in transformers' losses
_NO_LIMIT = 10**9  # tokenizers without a limit of their own report a huge one
_DATE = "26 Jul 2024"  # Llama's chat template writes today's date unless it is told another


@dataclass(frozen=True)
class Sample:
    """One text in token ids, without padding."""

    ids: list[int]  # the model's input: the prompt and, for a decoder-only model, the target
    # The target; of a decoder-only model aligned with `ids`, -100 on the prompt. None: no target.
    labels: list[int] | None


@dataclass(frozen=True)
class _Text:
    """A row in token ids, uncut; `shown` is the target with -100 where it does not count."""

    prompt: list[int]
    target: list[int] | None = None
    shown: list[int] | None = None


@dataclass(frozen=True)
class TextEncoder:
    """Rows of a data set, in the formats of `plain_row`, as token ids.

    Of a chat the last turn is the target; it is rendered by the tokenizer's chat template.
    Texts longer than `max_length` are cut: a prompt at its end, so that the target keeps at least
    half. Without it the limit is the tokenizer's, beyond which a text is an error.
    For a classifier a row is one text, a chat with its last turn; targets and labels are not read.
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

    def sample(self, row: Mapping[str, Any], place: str) -> Sample:
        """A row with its target.

        Raises:
            CalibrationError: If there is no text, an empty target, or none where one is needed, or
                the text is too long.
        """
        text = self._read(row, place)
        if self.kind == "seq2seq" and text.target is None:
            raise CalibrationError(
                f"{place}: no target, which an encoder-decoder needs. Give the rows labels (or a "
                "target), or set method.calibration_targets=generated"
            )
        if text.target is not None and not self._words(text.shown or text.target):
            raise CalibrationError(
                f"{place}: the target is empty. Give it a text, choose another "
                "method.calibration_split, or set method.calibration_targets=generated"
            )
        return self._cut(text, place)

    def prompt(self, row: Mapping[str, Any], place: str, reserved: int) -> list[int]:
        """A row's prompt alone; a decoder-only model's leaves room for `reserved` tokens.

        Raises:
            CalibrationError: If there is no text, or it is too long.
        """
        asked = {name: value for name, value in row.items() if name not in TARGETS}
        prompt = self._read(asked, place).prompt
        limit = self._limit
        room = limit if self.kind == "seq2seq" else max(limit - reserved, limit // 2)
        return self._within(prompt, room, place, len(prompt))

    def answered(self, prompt: list[int], answer: list[int], place: str) -> Sample:
        """A prompt with what a model answered to it."""
        return self._cut(_Text(prompt, answer), place)

    @property
    def pad_id(self) -> int:
        """Fills up batches; any id would do, for padding never counts."""
        candidates = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        return next(token for token in candidates if token is not None)

    @property
    def _limit(self) -> int:
        return self.max_length or tokens_allowed(self.tokenizer)

    @cached_property
    def _marks(self) -> frozenset[int]:
        """Tokens that say nothing: begin, end, padding, ignored. An unknown word is a word."""
        marks = {*self.tokenizer.all_special_ids, IGNORED} - {self.tokenizer.unk_token_id}
        return frozenset(marks)

    def _words(self, ids: list[int]) -> bool:
        return any(token not in self._marks for token in ids)

    def _cut(self, text: _Text, place: str) -> Sample:
        """Prompt and target as the model takes them, no longer than allowed."""
        limit, prompt, target = self._limit, text.prompt, text.target
        if target is None:
            return Sample(self._within(prompt, limit, place, len(prompt)), None)
        if self.kind == "seq2seq":
            labels = self._within(target, limit, f"{place}, target", len(target))
            return Sample(self._within(prompt, limit, place, len(prompt)), labels)
        kept_ids = prompt[: max(limit - len(target), limit // 2)]
        labels = [IGNORED] * len(kept_ids) + (text.shown or target)
        length = len(prompt) + len(target)
        return Sample(self._within(kept_ids + target, limit, place, length), labels[:limit])

    def _within(self, ids: list[int], limit: int, place: str, length: int) -> list[int]:
        if self.max_length is None and length > limit and limit < _NO_LIMIT:
            raise CalibrationError(
                f"{place}: {length} tokens, but the tokenizer's limit (model_max_length) is "
                f"{self._limit}. Set method.max_length to cut long texts"
            )
        return ids[:limit]

    def _read(self, row: Mapping[str, Any], place: str) -> _Text:
        """Prompt and target of a row in token ids, uncut."""
        classified, row = self.kind == "classification", plain_row(row, place)
        if "input_ids" in row:
            text = self._tokenised({**row, "labels": None} if classified else row, place)
        elif "messages" in row:
            text = self._chat(row["messages"], place)
        elif "prompt" in row:
            target = None if classified else row.get("target")
            text = self._plain(row["prompt"], target, place)
        else:
            text = self._plain(row["text"], None, place, name="text")
        if classified and text.target is not None:
            text = _Text([*text.prompt, *text.target])
        if not self._words(text.prompt):
            raise CalibrationError(f"{place}: the text is empty, or padding alone. Remove the row")
        return text

    def _tokenised(self, row: Mapping[str, Any], place: str) -> _Text:
        ids = _integers(row["input_ids"], f"{place}: input_ids")
        mask = [1] * len(ids)
        if row.get("attention_mask") is not None:
            mask = _integers(row["attention_mask"], f"{place}: attention_mask")
        labels = None
        if row.get("labels") is not None:
            labels = _integers(row["labels"], f"{place}: labels")
        aligned = labels is None or self.kind == "seq2seq" or len(labels) == len(ids)
        if len(mask) != len(ids) or not aligned:
            raise CalibrationError(
                f"{place}: {len(ids)} input_ids, but {len(mask)} entries in attention_mask and "
                f"{len(labels or [])} labels"
            )
        kept_ids = [token for token, counts in zip(ids, mask, strict=True) if counts]
        if labels is None:
            return _Text(kept_ids)
        if self.kind == "seq2seq":
            return _Text(kept_ids, [token for token in labels if token != IGNORED])
        shown = [label for label, counts in zip(labels, mask, strict=True) if counts]
        start = next((i for i, label in enumerate(shown) if label != IGNORED), len(shown))
        return _Text(kept_ids[:start], kept_ids[start:], shown[start:])

    def _chat(self, messages: Any, place: str) -> _Text:
        if self.kind == "seq2seq" or not getattr(self.tokenizer, "chat_template", None):
            raise CalibrationError(
                f"{place}: messages need a decoder-only model or classifier and a tokenizer with a "
                "chat template; give rows with prompt and target, or set modelpool.tokenizer"
            )
        turns = messages if isinstance(messages, list | tuple) else [messages]
        if not all(isinstance(turn, Mapping) for turn in turns):
            raise CalibrationError(
                f"{place}: messages must be a list of turns, each with role and content, got "
                f"{str(messages)[:60]!r}"
            )
        turns = [dict(turn) for turn in turns]
        answered = bool(turns) and turns[-1].get("role") == "assistant"
        asked = turns[:-1] if answered else turns
        if not asked:
            raise CalibrationError(f"{place}: the chat has no turn before the answer")
        prompt = self._rendered(asked, place, add_generation_prompt=True)
        if not answered:
            return _Text(self._ids(prompt))
        if not str(turns[-1].get("content") or "").strip():
            return _Text(self._ids(prompt), [])
        whole = self._rendered(turns, place, add_generation_prompt=False)
        if not whole.startswith(prompt):
            raise CalibrationError(
                f"{place}: the tokenizer's chat template renders the prompt differently once there "
                "is an answer; give rows with prompt and target"
            )
        return _Text(self._ids(prompt), self._ids(whole[len(prompt) :]))

    def _rendered(
        self, turns: list[dict[str, Any]], place: str, *, add_generation_prompt: bool
    ) -> str:
        options = {"add_generation_prompt": add_generation_prompt, "date_string": _DATE}
        try:
            return self.tokenizer.apply_chat_template(turns, tokenize=False, **options)
        except Exception as error:  # a template may raise anything
            raise CalibrationError(
                f"{place}: the tokenizer's chat template cannot be used: {first_line(error)}. "
                "Correct the row, or set modelpool.tokenizer"
            ) from error

    def _plain(self, prompt: Any, target: Any, place: str, *, name: str = "prompt") -> _Text:
        for key, value in ((name, prompt), ("target", target)):
            if not isinstance(value, str) and not (key == "target" and value is None):
                raise CalibrationError(
                    f"{place}: {key} is {type(value).__name__}, not a text ({str(value)[:60]!r})"
                )
        if not prompt.strip():
            return _Text([])
        ids = list(self.tokenizer(prompt, verbose=False)["input_ids"])
        if target is None and self.kind == "classification":
            return _Text(ids)
        if self.kind == "seq2seq":
            if target is None:
                return _Text(ids)
            return _Text(ids, list(self.tokenizer(text_target=target, verbose=False)["input_ids"]))
        end = self.tokenizer.eos_token_id
        if ids and ids[-1] == end:  # some tokenizers end every text: the target follows here
            ids.pop()
        if target is None:
            return _Text(ids)
        return _Text(ids, [*self._ids(target), *([] if end is None else [end])])

    def _ids(self, text: str) -> list[int]:
        """Token ids of a text that brings its own marks, or follows another."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def tokens_allowed(tokenizer: Any) -> int:
    """Return a tokenizer's own limit of tokens.

    Raises:
        CalibrationError: If its files give no number of tokens.
    """
    limit = tokenizer.model_max_length
    whole = isinstance(limit, int) or (isinstance(limit, float) and limit.is_integer())
    if isinstance(limit, bool) or not whole or limit < 1:
        raise CalibrationError(
            f"the tokenizer's limit (model_max_length in tokenizer_config.json) is {limit!r:.40}, "
            "not a number of tokens. Correct the file"
        )
    return int(limit)


def pad_samples(samples: Sequence[Sample], encoder: TextEncoder) -> dict[str, Tensor]:
    """Samples as one batch, padded to the longest of them.

    Returns:
        `input_ids`, `attention_mask` and, where there are labels, `labels`, each
        `[batch, length]`, int64; labels are -100 on padding.
    """
    left = encoder.tokenizer.padding_side == "left"
    batch = {
        "input_ids": pad_rows([sample.ids for sample in samples], encoder.pad_id, left=left),
        "attention_mask": pad_rows([[1] * len(sample.ids) for sample in samples], 0, left=left),
    }
    if any(sample.labels is not None for sample in samples):
        labels = [sample.labels or [IGNORED] * len(sample.ids) for sample in samples]
        batch["labels"] = pad_rows(labels, IGNORED, left=left and encoder.kind == "causal")
    return batch


def pad_rows(rows: Sequence[list[int]], fill: int, *, left: bool) -> Tensor:
    """Rows of unequal length as one int64 tensor, filled up on one side."""
    padded = torch.full((len(rows), max(map(len, rows))), fill, dtype=torch.long)
    for row, ids in zip(padded, rows, strict=True):
        place = slice(len(row) - len(ids), None) if left else slice(len(ids))
        row[place] = torch.tensor(ids, dtype=torch.long)
    return padded


def _integers(values: Any, name: str) -> list[int]:
    plain = values.tolist() if hasattr(values, "tolist") else list(values)
    for value in plain:
        if not isinstance(value, Integral):  # bool counts: masks may be of it
            raise CalibrationError(
                f"{name} must be integers, got {value!r} ({type(value).__name__}). Store them as "
                "integers"
            )
    return [int(value) for value in plain]
