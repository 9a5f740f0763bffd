"""Samples of texts with images, converted by the model's processor, one per batch."""

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fusion_bench_featcal.data.chats import IMAGE_MARK, Turn
from fusion_bench_featcal.data.media_batches import MediaBatches
from fusion_bench_featcal.data.pictures import digest_image, read_image, refuse_depth
from fusion_bench_featcal.data.templates import Chat, render_chat
from fusion_bench_featcal.data.text_formats import Text
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.block import first_line
from fusion_bench_featcal.errors.words import option
from fusion_bench_featcal.families.base import NO_TARGET


def _read_turns(text: Text) -> list[Turn]:
    """Return prompt and answer as turns whose content is a list of parts, as templates take it.

    Raises:
        CalibrationError: If there is no answer, the answer has an image, or there are more or fewer
            marks than images.
    """
    name, prompt, target = text.name, text.prompt, text.target
    if text.form not in ("prompt", "chat") or target is None:
        raise CalibrationError(
            f"{name}: an example with images needs prompt and target, or messages that end with "
            "an answer. Add the answer, or remove the example"
        )
    if text.form == "prompt":
        prompt = [{"role": "user", "content": prompt}]
        target = {"role": "assistant", "content": target}
    if IMAGE_MARK in target["content"] or not target["content"].strip():
        fault = f"has an image ({IMAGE_MARK})" if IMAGE_MARK in target["content"] else "is empty"
        raise CalibrationError(
            f"{name}: the answer {fault}, but models generate text. Correct it, or remove the "
            "example"
        )
    turns = [dict(turn) for turn in (*prompt, target)]
    marks = sum(turn["content"].count(IMAGE_MARK) for turn in turns)
    if not marks:  # images come first
        user_turn = next(turn for turn in turns if turn["role"] == "user")
        user_turn["content"] = IMAGE_MARK * len(text.images) + user_turn["content"]
    elif marks != len(text.images):
        raise CalibrationError(
            f"{name}: its texts contain {IMAGE_MARK} {marks} times, but it has {len(text.images)} "
            f"images. Write {IMAGE_MARK} once for each image, or not at all"
        )
    return [turn | {"content": _split_at_marks(turn["content"])} for turn in turns]


def _split_at_marks(content: str) -> list[dict[str, str]]:
    """Split a text into text parts, with an image part in place of each mark."""
    texts = [text for text in re.split(f"({IMAGE_MARK})\n?", content) if text]
    return [{"type": "image"} if t == IMAGE_MARK else {"type": "text", "text": t} for t in texts]


@dataclass(eq=False)
class ImageTextBatches(MediaBatches):
    """One task's samples with images, which are marked in their texts.

    Attributes:
        rows: The texts of the examples, with images as paths, bytes or pictures.
        limit: Maximum number of tokens of an example, image tokens included.
    """

    rows: Sequence[Text]
    limit: int

    @property
    def texts(self) -> list[Text]:
        """The samples' texts."""
        return [*self.rows]

    @property
    def unread(self) -> list[str]:
        """Columns that are not read, and keys of turns that the template does not show."""
        read = [*self.rows, *map(self._render, self.rows)]
        return list(dict.fromkeys(name for row in read for name in row.unread))

    def dedup_key(self, row: Text) -> Hashable:
        """Return the rendered chat and digests of the images.

        Raises:
            CalibrationError: If the text cannot be rendered, or an image's header cannot be read.
        """
        chat = self._render(row)
        for image in row.images:
            read_image(image, row.name, refuse_depth)
        return chat.prompt, chat.answer, *map(digest_image, row.images)

    def _render(self, text: Text) -> Chat:
        *prompt, answer = _read_turns(text)
        return render_chat(self.encoder.tokenizer, replace(text, prompt=prompt, target=answer))

    def encode(self, row: Text) -> dict[str, Tensor]:
        """Return an example as a batch of the model's inputs, with labels of its answer.

        Raises:
            CalibrationError: If the template renders the prompt differently once there is an
                answer, the example is too long, or an image cannot be read.
        """
        chat, name = self._render(row), row.name
        pictures = [read_image(image, name) for image in row.images]
        prompt = self._process(chat.prompt, pictures, name)
        whole = self._process(f"{chat.prompt}{chat.answer}", pictures, name)
        start, ids = prompt["input_ids"].shape[1], whole["input_ids"]
        if prompt["input_ids"].tolist() != ids[:, :start].tolist():
            raise CalibrationError(
                f"{name}: the chat template renders the prompt differently when an answer "
                "follows. Give a processor with another template"
            )
        end = start + len(self.encoder.until_end(ids[0, start:].tolist()))
        if end > self.limit:
            raise CalibrationError(
                f"{name}: {end} tokens, including those of its images, exceed {self.limit} (the "
                f"model's positions or {option('max_length')}), and examples with images are not "
                "truncated. Remove the example"
            )
        inputs = {k: v[:, :end] if v.shape == ids.shape else v for k, v in whole.items()}
        labels = inputs["input_ids"].clone()
        labels[:, :start] = NO_TARGET
        return inputs | {"labels": labels}

    def _process(self, text: str, pictures: list[Any], name: str) -> dict[str, Tensor]:
        options: Any = {"add_special_tokens": False, "return_tensors": "pt"}
        try:
            return dict(self.processor(text=[text], images=pictures or None, **options))
        except Exception as error:  # processors raise any error
            raise CalibrationError(
                f"{name}: the processor fails on text and images ({first_line(error)}). Correct "
                "the example or the processor"
            ) from error
