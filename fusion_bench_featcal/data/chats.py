"""Turns of chats: their roles and contents."""

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
"""Keys of turns whose value is 0 or false if an answer does not count."""
MASKS = (
    "loss_mask", "label_mask", "completion_mask", "response_mask", "assistant_mask",
    "assistant_masks", "train_detail", "training_detail",
)  # fmt: skip
"""Columns and keys of turns that choose tokens of an answer."""
IMAGE_MARK = "<image>"
"""Marks the place of an image in a text, as in LLaVA's chats."""
_IMAGES = ("bytes", "image", "image_url", "url", "path")
PART_FORM = '{"type": "image", "path": "FILE"}'
USE_LABELS = "Give input_ids and labels, with label -100 for tokens that do not count"


def is_chat(value: Any) -> bool:
    """Return whether a value is a list of turns, or maps each key of turns to a list of values."""
    turns = [value] if isinstance(value, Mapping) else value
    is_list = isinstance(turns, list | tuple) and all(isinstance(turn, Mapping) for turn in turns)
    return is_list and bool(turns) and bool({"role", "from"} & turns[0].keys())


def read_turns(chat: object, name: str, images: list[Any] | None = None) -> list[Turn]:
    """Return a chat's turns with `role`, `content` and other keys, such as `name`.

    Args:
        chat: A list of turns, a list of values for each key, or either as a JSON text. Turns have
            `role` and `content`, or `from` and `value`.
        name: The example's name in messages.
        images: A list to which images of parts are appended: None for a part that only marks a
            place. Each image leaves a mark in the text. Without a list, images are refused.

    Raises:
        CalibrationError: If the chat has another form, a role is unknown, or a turn calls tools.
    """
    chat = parse_json(chat, f"{name}: messages")
    if isinstance(chat, Mapping) and all(isinstance(part, list) for part in chat.values()):
        if len({len(part) for part in chat.values()}) > 1:
            raise CalibrationError(f"{name}: the lists of {', '.join(chat)} differ in length")
        chat = [dict(zip(chat, turn, strict=True)) for turn in zip(*chat.values(), strict=True)]
    if not isinstance(chat, list | tuple) or not all(isinstance(turn, Mapping) for turn in chat):
        raise CalibrationError(
            f"{name}: messages must be a list of turns, each with role and content, got "
            f"{str(chat)[:60]!r}"
        )
    return [_read_turn(turn, f"{name}, turn {index}", images) for index, turn in enumerate(chat)]


def parse_json(value: object, name: str) -> object:
    """Parse the JSON text of a list or mapping. Return other values unchanged.

    Raises:
        CalibrationError: If the value is another text.
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


def split_answer(turns: list[Turn], name: str) -> tuple[list[Turn], Turn | None]:
    """Split a chat into the turns before its answer, and the answer.

    The answer is the last answer that counts. Without one as last turn, it is None. Answers after
    it, with weight 0 or loss false, are left out.

    Raises:
        CalibrationError: If there is no turn before the answer, or no answer counts.
    """
    counts = [not any([is_false_flag(turn.pop(key, None)) for key in _FLAGS]) for turn in turns]
    answers = [n for n, turn in enumerate(turns) if turn["role"] == "assistant" and counts[n]]
    answer = None
    if turns and turns[-1]["role"] == "assistant":
        if not answers:
            fault = "all answers have weight 0, or loss false"
            raise CalibrationError(f"{name}: {fault}. Remove the example")
        turns, answer = turns[: answers[-1]], turns[answers[-1]]
    if not turns:
        raise CalibrationError(f"{name}: the chat has no turn before the answer")
    return turns, answer


def column_error(name: str, column: str, place: str, advice: str) -> CalibrationError:
    """Return the error for an unread column or key that would change the input."""
    return CalibrationError(
        f"{name}: column {column} cannot be used in {place}. {advice}, or remove the column"
    )


def has_value(value: object) -> bool:
    """Return whether a value is neither missing nor empty."""
    return hasattr(value, "shape") or (value is not None and value not in ("", [], {}))


def is_false_flag(value: object) -> bool:
    """Return whether a flag is 0 or false, as a text, number or bool."""
    return str(value).lower() in ("0", "0.0", "false")


def _read_turn(turn: Mapping[str, object], name: str, images: list[Any] | None) -> Turn:
    values = {key: value for key, value in turn.items() if value is not None}
    speaker = values.get("role", values.get("from"))
    role = _ROLES.get(str(speaker).strip().lower())
    if role is None:
        raise CalibrationError(
            f"{name}: the speaker {speaker!r} is unknown. Rename it to user, assistant, system or "
            "tool"
        )
    if values.get("tool_calls"):
        raise CalibrationError(f"{name}: tool_calls are not supported. Write them into the content")
    for key in (*_FLAGS, *MASKS) if role == "assistant" else ():
        if isinstance(values.get(key), list | Mapping):
            raise column_error(name, key, "a turn", USE_LABELS)
    others = {key: value for key, value in values.items() if key not in _KEYS}
    content = values.get("content", values.get("value"))
    return {"role": role, "content": _read_content(content, name, list(turn), images), **others}


def _read_content(content: object, name: str, keys: list[str], images: list[Any] | None) -> str:
    """Return a turn's content as one text with marks for images.

    Args:
        content: A text, or a list of parts.
        name: The turn's name in messages.
        keys: Keys of the turn, for messages.
        images: As for `read_turns`.
    """
    texts = []
    for part in content if isinstance(content, list | tuple) else [content]:
        text = part.get("text") if isinstance(part, Mapping) else part
        if images is not None and isinstance(part, Mapping) and _is_image(part):
            images.append(_read_image_part(part, name, images.count(None)))
            text = IMAGE_MARK
        if not isinstance(text, str):
            advice = "" if images is None else f". Write an image as {PART_FORM}"
            raise CalibrationError(
                f"{name}: the content must be a text or a list of text parts, got "
                f"{str(part)[:60]!r} (keys of the turn: {', '.join(keys)}){advice}"
            )
        texts.append(text)
    return "".join(texts)


def _is_image(part: Mapping[str, Any]) -> bool:
    """Return whether a part is an image, by its type or, without a type, by its keys."""
    return "image" in str(part.get("type") or [key for key in part if has_value(part[key])])


def _read_image_part(part: Mapping[str, Any], name: str, place: int) -> Any:
    """Return the image of a part, or None if the part only marks the place of an image."""
    values = {k: v for k, v in part.items() if has_value(v) and (k, v) != ("index", place)}
    keys = [key for key in values if key != "type"]
    if keys and (len(keys) > 1 or keys[0] not in _IMAGES):
        raise CalibrationError(
            f"{name}: the image has unsupported keys ({', '.join(keys)}). Write it as {PART_FORM}"
        )
    return image_source(values[keys[0]], name) if keys else None


def image_source(value: Any, name: str) -> Any:
    """Return the path or bytes of an image that is a URL or data URI, or any other value unchanged.

    Raises:
        CalibrationError: If the image is on the web, or in a damaged data URI.
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
            f"{name}: the image {value[:60]!r} is not downloaded. Save it, and write it as "
            f"{PART_FORM}"
        )
    return path
