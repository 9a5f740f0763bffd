"""Common formats of text examples: prompts with answers, chats, plain texts, token ids."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from string import ascii_uppercase
from typing import Any, Literal

from fusion_bench_featcal.data.chats import (
    MASKS,
    PART_FORM,
    USE_LABELS,
    Turn,
    column_error,
    has_value,
    image_source,
    is_chat,
    is_false_flag,
    parse_json,
    read_turns,
    split_answer,
)
from fusion_bench_featcal.errors import CalibrationError

CHATS = ("messages", "conversations")
PROMPTS = ("prompt", "instruction", "question")
FORMATS = ("input_ids", *CHATS, *PROMPTS, "text", "chosen")
"""Columns for texts, one of which an example must have. The first one has priority."""
TARGETS = ("target", "completion", "response", "output", "answer", "answerKey", "chosen")
"""Names of the column with the answer to a prompt."""
FLAGGED = ("weight", "label", *PROMPTS, *TARGETS)
"""Columns that `is_left_out` reads."""
_CONTEXTS = ("input", "context")
_SYSTEMS = ("system", "system_prompt")
_TEMPLATE_COLUMNS = ("tools", "documents")
_CHAT_COLUMNS = (*_SYSTEMS, *_TEMPLATE_COLUMNS, "functions", "history")
_CHOICES = ("choices", "options")
IMAGES = ("image", "images")
"""Columns for images."""
_MEDIA = (*IMAGES, "audio", "video", "videos")
STANDARD = {name: names[0] for names in (CHATS, PROMPTS, _CHOICES, _SYSTEMS) for name in names}
STANDARD |= {name: "context" for name in _CONTEXTS}
"""Name of a column -> its name in the option `--columns`."""
NEEDED = (
    *_CHAT_COLUMNS, *_CHOICES, "A", "B", "context", "text_pair", "article", "document", "passage",
    "paragraph", "story", *_MEDIA, *MASKS,
)  # fmt: skip
"""Columns that change the model's input. An example with an unread value in one is refused."""
_NO_TOWER = "This model reads only text: name one that has a tower for it"
_HINTS: dict[str, str] = {**dict.fromkeys(_MEDIA, _NO_TOWER), **dict.fromkeys(MASKS, USE_LABELS)}


@dataclass(frozen=True)
class Text:
    """An example in one of four formats.

    Attributes:
        name: The example's name in messages.
        form: `tokens`, `chat`, `prompt` or `text`, which has no target.
        prompt: A text, the turns before the answer, or columns of token ids.
        target: The answer: a text or a turn. None without an answer.
        pair: Second text of a classifier's pair.
        values: Other variables of the chat template: `tools`, `documents`.
        columns: Names of the columns that are read.
        unread: Names of the other columns with a value.
        images: The images as the dataset stores them, in the order of their marks in the texts.
    """

    name: str
    form: Literal["tokens", "chat", "prompt", "text"]
    prompt: Any
    target: Any = None
    pair: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    images: tuple[Any, ...] = ()

    @property
    def lacks_target(self) -> bool:
        """True if there is a prompt without an answer. An expert must generate the answer."""
        return self.form in ("chat", "prompt") and self.target is None


def read_row(
    row: object, name: str, columns: Mapping[str, str] | None = None, *, reads_images: bool = False
) -> Text:
    """Read an example in any common format.

    Chats are lists of turns, ShareGPT's `conversations`, or TRL's prompts and completions. Prompts
    may have a context and choices. The target of a preference is its `chosen` answer.

    Args:
        row: Column -> value.
        name: The example's name in messages.
        columns: Standard name of a column -> its name in the row, to read only these.
        reads_images: Whether the model reads images, in columns or in parts of turns.

    Raises:
        CalibrationError: If the row has none of these formats, several answers, or a column that
            would change the input in an unknown way.
    """
    if not isinstance(row, Mapping):
        raise CalibrationError(f"{name}: an example must be a mapping, got {type(row).__name__}")
    return _RowReader(row, name, columns or {}, reads_images).read()


def is_left_out(row: object) -> bool:
    """Return whether an example is left out: its weight is 0, or KTO's label is false."""
    if not isinstance(row, Mapping):
        return False
    has_answer = any(row.get(p) for p in PROMPTS) and any(row.get(t) for t in TARGETS)
    is_bad = has_answer and str(row.get("label")).lower() == "false"
    return is_bad or is_false_flag(row.get("weight"))


class _RowReader:
    """Reads one row.

    Attributes:
        images: Images in the parts of turns, or None if the model reads no images.
        values: Standard name of a column -> its value, without missing values.
        used: Standard names of the columns that have been read so far.
    """

    def __init__(
        self, row: Mapping[str, object], name: str, columns: Mapping[str, str], reads_images: bool
    ) -> None:
        self.row, self.name = row, name
        self.images: list[Any] | None = [] if reads_images else None
        self.names = columns or {str(column): str(column) for column in row}
        self.values = {n: row[c] for n, c in self.names.items() if row.get(c) is not None}
        self.used: list[str] = []

    def read(self) -> Text:
        """Return the example, and refuse unread columns that would change it."""
        if is_left_out(self.values):
            raise CalibrationError(f"{self.name}: weight 0 or label false. Remove the example")
        for flag, yes in (("weight", ("1", "1.0")), ("label", ("true",))):
            if str(self.values.get(flag)).lower() in yes:
                self.take(flag)  # the row counts, as it does without the column
        if "input_ids" in self.values:
            tokens = {n: self.take(n) for n in ("input_ids", "attention_mask", "labels")}
            return self.with_columns(Text(self.name, "tokens", tokens))
        return self.with_columns(self.read_chat() or self.read_plain())

    def take(self, *names: str) -> object:
        """Return the value of the first of these columns that exists, and record its use."""
        name = next((name for name in names if name in self.values), None)
        if name is None:
            return None
        self.used.append(name)
        return self.values[name]

    def read_chat(self) -> Text | None:
        """Return a chat, or None if the row is no chat."""
        form = next((name for name in FORMATS if name in self.values), "")
        if form in CHATS or is_chat(self.values.get(form)):  # TRL, also without a prompt
            turns = read_turns(self.take(form), self.name, self.images)
        elif form in PROMPTS and any(is_chat(self.values.get(name)) for name in TARGETS):
            turns = [{"role": "user", "content": self.as_text(self.take(form), form)}]
        else:
            return None
        lacks_answer = turns and turns[-1]["role"] != "assistant"
        if lacks_answer and (answer := self.read_answer()) is not None:
            turns = self.add_answer(turns, answer)
        if turns and turns[0]["role"] != "system" and (system := self.take(*_SYSTEMS)):
            turns = [{"role": "system", "content": self.as_text(system, "system")}, *turns]
        question, answer = split_answer(turns, self.name)
        values = {n: parse_json(self.take(n), f"{self.name}: {n}") for n in _TEMPLATE_COLUMNS}
        values = {name: value for name, value in values.items() if value}
        return Text(self.name, "chat", question, answer, values=values)

    def add_answer(self, turns: list[Turn], answer: object) -> list[Turn]:
        """Return turns and their answer. An answer that repeats the turns replaces them."""
        if not is_chat(answer):
            return [*turns, {"role": "assistant", "content": self.as_text(answer, self.used[-1])}]
        images_before = len(self.images or ())
        answer_turns = read_turns(answer, self.name, self.images)
        if answer_turns[0]["role"] not in ("user", "system"):
            return [*turns, *answer_turns]
        self.images = self.images and self.images[images_before:]
        return answer_turns

    def read_plain(self) -> Text:
        """Return a prompt with its answer, or a plain text."""
        prompt = self.take(*PROMPTS)
        prompt_column = next(reversed(self.used), "")
        pair = self.take("text_pair")
        pair = self.as_text(pair, "text_pair") if pair else None
        if prompt is None and "text" not in self.values:
            raise CalibrationError(
                f"{self.name}: an example needs prompt (and target), messages, text or input_ids; "
                f"this one has {sorted(map(str, self.row))}"
            )
        if prompt is None:
            return Text(self.name, "text", self.as_text(self.take("text"), "text"), pair=pair)
        prompt, target = self.as_text(prompt, prompt_column), self.read_answer()
        target_column = self.used[-1]
        if context := self.take(*_CONTEXTS):
            prompt = f"{prompt}\n\n{self.as_text(context, self.used[-1])}"
        if choices := self.read_choices():
            prompt, target = self.add_choices(prompt, choices, target)
        target = None if target is None else self.as_text(target, target_column)
        return Text(self.name, "prompt", prompt, target, pair)

    def read_choices(self) -> object:
        """Return the choices of a question: one column, or a column for each letter."""
        if any(name in self.values for name in _CHOICES):
            return parse_json(self.take(*_CHOICES), f"{self.name}: {self.used[-1]}")
        letters = [*takewhile(self.values.__contains__, ascii_uppercase)]
        return {letter: self.take(letter) for letter in letters} if len(letters) > 1 else None

    def add_choices(self, prompt: str, choices: Any, target: Any) -> tuple[str, Any]:
        """Return a prompt with a line for each choice, and the target, an index as its letter."""
        texts, letters = choices, list(ascii_uppercase[: len(choices)])
        if isinstance(choices, Mapping):
            texts, letters = list(choices.values()), list(choices)
            if "text" in choices:  # ARC
                texts, letters = choices["text"], choices.get("label", ())
        if len(texts) != len(letters):
            raise CalibrationError(
                f"{self.name}: {len(texts)} choices, but {len(letters)} letters for them"
            )
        pairs = zip(letters, texts, strict=True)
        lines = [f"{letter}. {self.as_text(text, 'choices')}" for letter, text in pairs]
        if str(target).isdecimal() and target not in (*texts, *letters):
            if not int(target) < len(lines):
                raise CalibrationError(
                    f"{self.name}: the answer is {target}, but its {len(lines)} choices are "
                    "numbered from 0"
                )
            target = letters[int(target)]
        return "\n".join([f"{prompt}\n", *lines]), target

    def read_answer(self) -> Any:
        """Return the answer to a prompt: its `target`, else another column of `TARGETS`, or None.

        Raises:
            CalibrationError: If several columns have different answers.
        """
        answers = {name: self.values[name] for name in TARGETS if name in self.values}
        first = next(iter(answers), "target")
        if first != "target" and any(answer != answers[first] for answer in answers.values()):
            raise CalibrationError(
                f"{self.name}: which of {', '.join(answers)} is the answer? Name that column target"
            )
        answer = self.take(first if answers else "answers")
        texts = answer.get("text") if isinstance(answer, Mapping) else answer  # SQuAD's
        if not isinstance(texts, list | tuple) or is_chat(texts):
            return answer
        if len(distinct := [*dict.fromkeys(map(str, texts))]) != 1:
            fault = f"{self.names[self.used[-1]]} has {len(distinct)} different answers"
            raise CalibrationError(f"{self.name}: {fault}. Write the one to use as target")
        return distinct[0]

    def read_images(self) -> tuple[Any, ...]:
        """Return all images. Images of columns fill parts without an image, or come last."""
        if self.images is None:
            return ()
        cells = [cell for cell in map(self.take, IMAGES) if has_value(cell)]
        stored = [i for cell in cells for i in (cell if isinstance(cell, list | tuple) else [cell])]
        others = iter([image_source(image, self.name) for image in stored])
        images = [next(others, None) if image is None else image for image in self.images]
        if lacking := images.count(None):
            raise CalibrationError(
                f"{self.name}: {lacking} parts stand for images that are missing. Give the images "
                f"in the column images, or in the parts: {PART_FORM}"
            )
        return *images, *others

    def as_text(self, value: object, column: str) -> str:
        """Return a value as text. Tables contain whole numbers without quotes."""
        if not isinstance(value, str) and type(value) is not int:
            raise CalibrationError(
                f"{self.name}: {self.names.get(column, column)} is {type(value).__name__}, not a "
                f"text ({str(value)[:60]!r}). Write it in quotes"
            )
        return str(value)

    def with_columns(self, text: Text) -> Text:
        """Return a text with names of columns and images. Refuse unread columns of `NEEDED`."""
        images = self.read_images()
        columns = dict.fromkeys(self.names[n] for n in self.used if has_value(self.values[n]))
        changing = NEEDED if text.form != "tokens" else () if "labels" in self.used else MASKS
        needed = [n for n in changing if n not in self.used and has_value(self.values.get(n))]
        if needed:
            as_chat = needed[0] in _CHAT_COLUMNS and text.form != "chat"
            advice = "Write the example as messages" if as_chat else "Write it into the text"
            advice = _HINTS.get(needed[0], advice)
            place = text.form if text.form == "tokens" else f"a {text.form}"
            raise column_error(self.name, self.names[needed[0]], place, advice)
        unread = tuple(str(n) for n, v in self.row.items() if has_value(v) and n not in columns)
        return replace(text, columns=tuple(columns), unread=unread, images=images)
