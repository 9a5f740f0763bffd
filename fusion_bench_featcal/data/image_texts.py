"""Samples of texts with images, by a model's own processor, one in a batch."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fusion_bench_featcal.data.chats import Turn, parsed
from fusion_bench_featcal.data.media_batches import MediaBatches
from fusion_bench_featcal.data.pictures import digest_of, file_in, read_image, refuse_depth
from fusion_bench_featcal.data.templates import render
from fusion_bench_featcal.data.text_formats import CHATS, Text, read_row
from fusion_bench_featcal.data.text_rows import TextRows
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.words import option
from fusion_bench_featcal.families.base import NO_TARGET

IMAGES = ("image", "images")
"""Columns of a row's images."""
_MARK = "<image>"
"""Place of an image in a text, as in LLaVA's chats."""


@dataclass(frozen=True)
class ImageText:
    """A row with its images.

    Attributes:
        text: The row without its images, which are marked in its texts.
        images: They, as the dataset stores them.
    """

    text: Text
    images: Sequence[Any]

    def turns(self) -> list[Turn]:
        """Return prompt and answer as turns of parts. Images are parts without a value.

        Raises:
            CalibrationError: If the row has no answer, or other images than its texts.
        """
        name, prompt, target = self.text.name, self.text.prompt, self.text.target
        if self.text.form not in ("prompt", "chat") or target is None:
            raise CalibrationError(
                f"{name}: a row with images needs prompt and target, or messages that end in an "
                "answer. Write the answer, or leave the row out"
            )
        if self.text.form == "prompt":
            prompt = [{"role": "user", "content": prompt}]
            target = {"role": "assistant", "content": target}
        turns = [dict(turn) for turn in (*prompt, target)]
        marks = sum(turn["content"].count(_MARK) for turn in turns)
        if not marks:  # they come first
            user_turn = next(turn for turn in turns if turn["role"] == "user")
            user_turn["content"] = _MARK * len(self.images) + user_turn["content"]
        elif marks != len(self.images):
            raise CalibrationError(
                f"{name}: its texts have {marks} {_MARK}, and it has {len(self.images)} images. "
                f"Write {_MARK} once for each, or nowhere"
            )
        return [turn | {"content": _parts(turn["content"])} for turn in turns]


def _parts(content: str) -> list[dict[str, str]]:
    """Return a text as parts, with an image in place of each mark."""
    first, *others = content.split(_MARK)
    parts = [{"type": "text", "text": first}]
    for text in others:
        parts += [{"type": "image"}, {"type": "text", "text": text.removeprefix("\n")}]
    return [part for part in parts if part.get("text") != ""]


def read_image_row(row: Any, name: str, columns: Mapping[str, str]) -> ImageText:
    """Read a row of any format of `read_row`, whose turns may have parts that are images.

    Args:
        row: The row.
        name: Its name in messages.
        columns: Standard name of a column -> its name in the row, to read only these.
    """
    values, images = dict(row), list[Any]()
    for column in CHATS:
        stored = columns.get(column, column)
        if isinstance(chat := parsed(values.get(stored), f"{name}: {stored}"), list):
            values[stored] = [_marked(turn, images) for turn in chat]
    cells = [values.pop(columns.get(column, column), None) for column in IMAGES]
    for value in cells:
        images += value if isinstance(value, list | tuple) else [] if value is None else [value]
    read = {standard: stored for standard, stored in columns.items() if standard not in IMAGES}
    return ImageText(read_row(values, name, read or None), images)


def read_image_rows(rows: TextRows, indices: Iterable[int], home: Path) -> list[ImageText]:
    """Read some rows of a dataset. Relative paths of images start at a folder."""
    read = (read_image_row(rows[index], rows.at(index), rows.columns) for index in indices)
    return [replace(row, images=[file_in(home, i) for i in row.images]) for row in read]


def _marked(turn: Any, images: list[Any]) -> Any:
    """Return a turn with a mark for each image part. Those that have one are added to the list."""
    content = turn.get("content") if isinstance(turn, Mapping) else None
    if not isinstance(content, list | tuple):
        return turn
    texts = []
    for part in content:
        is_image = isinstance(part, Mapping) and part.get("type") in ("image", "image_url")
        texts.append({"type": "text", "text": _MARK} if is_image else part)
        stored = part.get("image") or part.get("url") or part.get("path") if is_image else None
        images += [] if stored is None else [stored]
    return {**turn, "content": texts}


@dataclass(eq=False)
class ImageTextBatches(MediaBatches):
    """One task's samples with images, which are marked in their texts.

    Attributes:
        limit: Longest row in tokens, with those of images.
    """

    limit: int

    def content(self, row: ImageText) -> Hashable:
        """Return what the row says and shows, which tells repeated ones.

        Raises:
            CalibrationError: As `turns`, or if an image cannot be read, by its header.
        """
        row.turns()
        for image in row.images:
            read_image(image, row.text.name, refuse_depth)
        return repr((row.text.prompt, row.text.target)), *map(digest_of, row.images)

    def inputs_of(self, row: ImageText) -> dict[str, Tensor]:
        """Return a row as a batch of the model's inputs, with labels of its answer.

        Raises:
            CalibrationError: If the template renders the prompt differently once there is an
                answer, the row is too long, or an image cannot be read.
        """
        turns, name = row.turns(), row.text.name
        pictures = [read_image(image, name) for image in row.images]
        prompt = self._encoded(turns[:-1], pictures, name, asks=True)
        whole = self._encoded(turns, pictures, name, asks=False)
        start, ids = prompt["input_ids"].shape[1], whole["input_ids"]
        if prompt["input_ids"].tolist() != ids[:, :start].tolist():
            raise CalibrationError(
                f"{name}: the chat template renders the prompt differently once there "
                "is an answer. Give a processor with another template"
            )
        end = start + len(self.encoder.until_end(ids[0, start:].tolist()))
        if end > self.limit:
            raise CalibrationError(
                f"{name}: {end} tokens with those of its images, more than {self.limit}, the "
                f"model's positions or {option('max_length')}: rows with images are not cut. Leave "
                "the row out"
            )
        inputs = {
            key: value[:, :end] if value.shape == ids.shape else value
            for key, value in whole.items()
        }
        labels = inputs["input_ids"].clone()
        labels[:, :start] = NO_TARGET
        return inputs | {"labels": labels}

    def _encoded(
        self, turns: list[Turn], pictures: list[Any], name: str, *, asks: bool
    ) -> dict[str, Tensor]:
        text = render(self.encoder.tokenizer, turns, name, add_generation_prompt=asks)
        options: Any = {"add_special_tokens": False, "return_tensors": "pt"}
        return dict(self.processor(text=[text], images=pictures or None, **options))
