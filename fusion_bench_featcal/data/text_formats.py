"""Text formats in rows of datasets: prompts with answers, chats, and plain texts."""

from collections.abc import Mapping
from typing import Any

from fusion_bench_featcal.errors import CalibrationError

TARGETS = ("target", "completion", "response", "output", "answer")
"""Names of the column with the answer to a row's prompt."""
CHATS = ("messages", "conversations")
PROMPTS = ("prompt", "instruction", "question")
FORMATS = ("input_ids", *CHATS, *PROMPTS, "text")
"""Columns for texts, one of which a row must have. The first one has priority."""
_CONTEXTS = ("input", "context")
"""Names of the column with an `instruction`'s input."""
_ROLES = {"human": "user", "gpt": "assistant"}


def plain_row(row: Mapping[str, Any], label: str) -> dict[str, Any]:
    """Return a row of any common format in one of four formats.

    They are `messages`, `prompt` with or without `target`, `text`, or an unchanged tokenised row.
    ShareGPT's `conversations` and lists of messages as prompt and completion become `messages`. An
    `instruction` with its `input`, and a `question`, become a `prompt`.

    Args:
        row: The row.
        label: Its name in messages.

    Raises:
        CalibrationError: If it has none of these, or several answers.
    """
    values = {name: value for name, value in row.items() if value is not None}
    form = next((name for name in FORMATS if name in values), None)
    if form == "input_ids":
        return dict(row)
    if form in CHATS:
        return {"messages": _turns(values[form])}
    if form == "text":
        return {"text": values["text"]}
    if form is None:
        raise CalibrationError(
            f"{label}: a text is a row with prompt (and target), with messages, with text, or "
            f"with input_ids; this one has {sorted(row)}"
        )
    prompt, target = values[form], _answer_of(values, label)
    if isinstance(prompt, list):  # TRL's conversational form
        answer = target if isinstance(target, list) else _answered(target)
        return {"messages": _turns([*prompt, *answer])}
    context = next((values[name] for name in _CONTEXTS if values.get(name)), "")
    if form == "instruction" and context:
        prompt = f"{prompt}\n\n{context}"
    return {"prompt": prompt} if target is None else {"prompt": prompt, "target": target}


def lacks_answer(row: Mapping[str, Any], label: str) -> bool:
    """Return whether a row has a prompt without an answer, which an expert must generate."""
    plain = plain_row(row, label)
    if "messages" in plain:
        last = list(plain["messages"])[-1:]
        return not any(
            isinstance(turn, Mapping) and turn.get("role") == "assistant" for turn in last
        )
    return "prompt" in plain and "target" not in plain


def _answered(target: Any) -> list[Any]:
    return [] if target is None else [{"role": "assistant", "content": target}]


def _turns(chat: Any) -> Any:
    """Return a chat's turns with `role` and `content`, renamed from ShareGPT's keys if needed."""
    if not isinstance(chat, list | tuple):
        return chat
    return [
        {"role": _ROLES.get(turn["from"], turn["from"]), "content": turn.get("value")}
        if isinstance(turn, Mapping) and "from" in turn
        else turn
        for turn in chat
    ]


def _answer_of(row: Mapping[str, Any], label: str) -> Any:
    """Return the answer to a row's prompt: its `target`, else another column of `TARGETS`, or None.

    Raises:
        CalibrationError: If several have different answers.
    """
    answers = {name: row[name] for name in TARGETS if name in row}
    first = next(iter(answers), "target")
    if first != "target" and any(answer != answers[first] for answer in answers.values()):
        raise CalibrationError(
            f"{label}: which of {', '.join(answers)} is the answer? Name that column target"
        )
    return answers.get(first)
