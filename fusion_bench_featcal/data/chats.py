"""Turns of chats: their speakers and contents."""

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


def is_chat(value: Any) -> bool:
    """Return whether a value is a list of turns, or a list of values for each key of turns."""
    turns = [value] if isinstance(value, Mapping) else value
    is_list = isinstance(turns, list | tuple) and all(isinstance(turn, Mapping) for turn in turns)
    return is_list and bool(turns) and bool({"role", "from"} & turns[0].keys())


def read_turns(chat: object, name: str) -> list[Turn]:
    """Return a chat's turns with `role`, `content` and other keys, such as `name`.

    Args:
        chat: A list of turns, a list of values for each key, or either as a JSON text. Turns have
            `role` and `content`, or `from` and `value`.
        name: The row's name in messages.

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
    return [_turn(turn, f"{name}, turn {number}") for number, turn in enumerate(chat)]


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

    Turns after the last answer with a weight are left out if the last one has weight 0.

    Raises:
        CalibrationError: If nothing comes before the answer, or all answers have weight 0.
    """
    weights = [turn.pop("weight", None) for turn in turns]
    answers = [n for n, turn in enumerate(turns) if turn["role"] == "assistant"]
    if answers and answers[-1] == len(turns) - 1 and weights[-1] == 0:
        counted = [n for n in answers if weights[n] != 0]
        if not counted:
            raise CalibrationError(f"{name}: all answers have weight 0. Remove the row")
        turns = turns[: counted[-1] + 1]
    is_answered = bool(turns) and turns[-1]["role"] == "assistant"
    question = turns[:-1] if is_answered else turns
    if not question:
        raise CalibrationError(f"{name}: the chat has no turn before the answer")
    return question, turns[-1] if is_answered else None


def _turn(turn: Mapping[str, object], name: str) -> Turn:
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
    other = {key: value for key, value in values.items() if key not in _KEYS}
    content = values.get("content", values.get("value"))
    return {"role": role, "content": _content(content, name, list(turn)), **other}


def _content(content: object, name: str, keys: list[str]) -> str:
    """Return a turn's content, a text or a list of text parts, as one text."""
    texts = []
    for part in content if isinstance(content, list | tuple) else [content]:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            raise CalibrationError(
                f"{name}: the content must be a text or a list of text parts, got "
                f"{str(part)[:60]!r} (keys of the turn: {', '.join(keys)})"
            )
        texts.append(text)
    return "".join(texts)
