"""Turns of chats: their speakers and contents."""

from base64 import b64decode
from collections.abc import Mapping
from typing import Any

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.files.untrusted import parse_sample

Turn = dict[str, Any]

_SPEAKERS = {
    "user": "user human prompter",
    "assistant": "assistant gpt chatgpt gpt-4 bing bard gemini claude bot chatbot model ai",
    "system": "system developer",
    "tool": "tool function observation ipython tool_response function_response",
}
_ROLES = {name: role for role, names in _SPEAKERS.items() for name in names.split()}
_KEYS = ("role", "from", "content", "value")
_FLAGS = ("weight", "loss", "train", "training", "loss_mask")
"""Keys of turns, and 0 or false for answers that do not count."""
MASKS = (
    "loss_mask", "label_mask", "completion_mask", "response_mask", "assistant_mask",
    "assistant_masks", "train_detail", "training_detail",
)  # fmt: skip
"""Columns and keys of turns that choose tokens of an answer."""
MARK = "<image>"
"""Place of an image in a text, as in LLaVA's chats."""
_IMAGES = ("bytes", "image", "image_url", "url", "path")
AS_PART = '{"type": "image", "path": "FILE"}'
AS_LABELS = "Give the row as input_ids and labels, -100 for tokens that do not count"


def is_chat(value: Any) -> bool:
    """Return whether a value is a list of turns, or a list of values for each key of turns."""
    turns = [value] if isinstance(value, Mapping) else value
    is_list = isinstance(turns, list | tuple) and all(isinstance(turn, Mapping) for turn in turns)
    return is_list and bool(turns) and bool({"role", "from"} & turns[0].keys())


def read_turns(chat: object, name: str, images: list[Any] | None = None) -> list[Turn]:
    """Return a chat's turns with `role`, `content` and other keys, such as `name`.

    Args:
        chat: A list of turns, a list of values for each key, or either as a JSON text. Turns have
            `role` and `content`, or `from` and `value`.
        name: The row's name in messages.
        images: A list to which the images of parts are added, None for those that only mark a
            place. A mark is written into the text for each. Without a list they are refused.

    Raises:
        CalibrationError: If it has another form, a speaker is unknown, or a turn calls tools.
    """
    chat = parsed(chat, f"{name}: messages")
    if isinstance(chat, Mapping) and all(isinstance(part, list) for part in chat.values()):
        if len({len(part) for part in chat.values()}) > 1:
            raise CalibrationError(f"{name}: the lists of {', '.join(chat)} differ in length")
        chat = [dict(zip(chat, turn, strict=True)) for turn in zip(*chat.values(), strict=True)]
    if not isinstance(chat, list | tuple) or not all(isinstance(turn, Mapping) for turn in chat):
        raise CalibrationError(
            f"{name}: messages must be a list of turns, each with role and content, got "
            f"{str(chat)[:60]!r}"
        )
    return [_turn(turn, f"{name}, turn {number}", images) for number, turn in enumerate(chat)]


def parsed(value: object, name: str) -> object:
    """Return a list or mapping, which some tables contain as a JSON text, or None.

    Raises:
        CalibrationError: If it is another text.
    """
    if not isinstance(value, str):
        return value
    try:
        content = parse_sample(value or "[]")
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, list | dict):
        raise CalibrationError(f"{name} must be a list, or its JSON text, got {value[:60]!r}")
    return content


def answered_turns(turns: list[Turn], name: str) -> tuple[list[Turn], Turn | None]:
    """Split a chat into the turns before its last answer, and the answer if it comes last.

    Turns after the last answer that counts are left out if the last one has weight 0 or the like.

    Raises:
        CalibrationError: If nothing comes before the answer, or no answer counts.
    """
    counts = [not any([is_no(turn.pop(key, None)) for key in _FLAGS]) for turn in turns]
    answers = [n for n, turn in enumerate(turns) if turn["role"] == "assistant" and counts[n]]
    answer = None
    if turns and turns[-1]["role"] == "assistant":
        if not answers:
            fault = "all answers have weight 0, or loss false"
            raise CalibrationError(f"{name}: {fault}. Remove the row")
        turns, answer = turns[: answers[-1]], turns[answers[-1]]
    if not turns:
        raise CalibrationError(f"{name}: the chat has no turn before the answer")
    return turns, answer


def unused_column(name: str, column: str, place: str, advice: str) -> CalibrationError:
    """Return the error of a row with a column or key that changes the input and is not used."""
    return CalibrationError(
        f"{name}: column {column} has no place in {place}. {advice}, or leave the column out"
    )


def has_value(value: object) -> bool:
    """Return whether a column or key has something in a row."""
    return hasattr(value, "shape") or (value is not None and value not in ("", [], {}))


def is_no(value: object) -> bool:
    """Return whether a flag of tables is 0 or false."""
    return str(value).lower() in ("0", "0.0", "false")


def _turn(turn: Mapping[str, object], name: str, images: list[Any] | None) -> Turn:
    values = {key: value for key, value in turn.items() if value is not None}
    speaker = values.get("role", values.get("from"))
    role = _ROLES.get(str(speaker).strip().lower())
    if role is None:
        raise CalibrationError(
            f"{name}: the speaker {speaker!r} is unknown. Rename it to user, assistant, system or "
            "tool"
        )
    if values.get("tool_calls"):
        raise CalibrationError(f"{name}: tool_calls are not read. Write them into the content")
    for key in (*_FLAGS, *MASKS) if role == "assistant" else ():
        if isinstance(values.get(key), list | Mapping):
            raise unused_column(name, key, "a turn", AS_LABELS)
    other = {key: value for key, value in values.items() if key not in _KEYS}
    content = values.get("content", values.get("value"))
    return {"role": role, "content": _content(content, name, list(turn), images), **other}


def _content(content: object, name: str, keys: list[str], images: list[Any] | None) -> str:
    """Return a turn's content, a text or a list of parts, as one text with marks for images."""
    texts = []
    for part in content if isinstance(content, list | tuple) else [content]:
        text = part.get("text") if isinstance(part, Mapping) else part
        if images is not None and isinstance(part, Mapping) and _is_image(part):
            images.append(_image_in(part, name, images.count(None)))
            text = MARK
        if not isinstance(text, str):
            advice = "" if images is None else f". Write an image as {AS_PART}"
            raise CalibrationError(
                f"{name}: the content must be a text or a list of text parts, got "
                f"{str(part)[:60]!r} (keys of the turn: {', '.join(keys)}){advice}"
            )
        texts.append(text)
    return "".join(texts)


def _is_image(part: Mapping[str, Any]) -> bool:
    """Return whether a part is an image by its type, or by its keys if it has none."""
    return "image" in str(part.get("type") or [key for key in part if has_value(part[key])])


def _image_in(part: Mapping[str, Any], name: str, place: int) -> Any:
    """Return the image of a part, or None if the part only marks the place of an image."""
    values = {k: v for k, v in part.items() if has_value(v) and (k, v) != ("index", place)}
    keys = [key for key in values if key != "type"]
    if keys and (len(keys) > 1 or keys[0] not in _IMAGES):
        raise CalibrationError(
            f"{name}: the image has {', '.join(keys)}, which are not read. Write it as {AS_PART}"
        )
    return stored_image(values[keys[0]], name) if keys else None


def stored_image(value: Any, name: str) -> Any:
    """Return an image as a file's path or bytes, or as the value that it is.

    Raises:
        CalibrationError: If it is the address of a page, or a damaged data URI.
    """
    value = value.get("url", value) if isinstance(value, Mapping) else value
    if not isinstance(value, str):
        return value
    try:
        if value.startswith("data:"):
            return b64decode(value.partition(";base64,")[2])
    except ValueError as error:
        raise CalibrationError(f"{name}: {value[:60]!r} is damaged: {error}. Replace it") from error
    if "://" in (path := value.removeprefix("file://")):
        raise CalibrationError(
            f"{name}: {value[:60]!r} is not downloaded. Save the image, and write it as {AS_PART}"
        )
    return path
