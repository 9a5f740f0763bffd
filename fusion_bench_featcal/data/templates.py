"""Chats as the chat template of a tokenizer writes them."""

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from itertools import takewhile
from typing import Any, NamedTuple

from transformers.utils import chat_template_utils

from fusion_bench_featcal.data.chats import Turn
from fusion_bench_featcal.data.text_formats import Text
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.block import first_line

_SHORTEST = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
_DAY = datetime(2024, 7, 26)
_FIRST = "{# Rendered on a fixed day. +#}"  # makes a template of our own in transformers' cache
_STEPS = 1_000_000
"""Numbers over which the loops of a template may run for one chat."""


class Chat(NamedTuple):
    """A rendered chat.

    Attributes:
        prompt: What the model reads, up to the answer.
        answer: The answer with what the template writes behind it, or None without one.
        unread: Sentences on keys of turns that the template does not show.
    """

    prompt: str
    answer: str | None
    unread: tuple[str, ...]


def render(tokenizer: Any, turns: list[Turn], name: str, **values: object) -> str:
    """Return a chat as the template writes it, on one day whatever the date is.

    Args:
        tokenizer: A tokenizer with a chat template.
        turns: The turns. If the template does not show their texts, they are given as parts.
        name: The row's name in messages.
        values: Other values of the template, such as `tools`.

    Raises:
        CalibrationError: If the template raises an error.
    """
    try:
        text = _written(tokenizer, turns, values)
        if _shows(text, turns):
            return text
        # Such as templates of models that read images.
        parts = [t | {"content": [{"type": "text", "text": t["content"]}]} for t in turns]
        text_parts = _written(tokenizer, parts, values)
        return text_parts if _shows(text_parts, turns) else text
    except Exception as error:  # a template may raise any error
        raise CalibrationError(
            f"{name}: the tokenizer's chat template cannot be used: {first_line(error)}. "
            "Correct the row, or give a tokenizer with another template"
        ) from error


def _written(tokenizer: Any, turns: list[Turn], values: Mapping[str, object]) -> str:
    # transformers 5 hands no function to a template, so that it has to be one of its globals.
    template = _FIRST + tokenizer.get_chat_template(tools=values.get("tools"))
    compiled = chat_template_utils._compile_jinja_template(template)
    compiled.globals.update(strftime_now=_DAY.strftime, range=_limited_range())
    values = {"date_string": f"{_DAY:%d %b %Y}", "chat_template": template, **values}
    return tokenizer.apply_chat_template(turns, tokenize=False, **values)


def _limited_range() -> Callable[..., range]:
    """Return `range` for one chat. Nested loops of some strangers' templates would take hours."""
    used = 0

    def limited(*bounds: int) -> range:
        nonlocal used
        used += len(numbers := range(*bounds))
        if used > _STEPS:
            raise OverflowError(f"its loops count beyond {_STEPS:,}")
        return numbers

    return limited


def _shows(text: str, turns: list[Turn]) -> bool:
    """Return whether a rendered chat has the texts of the user's turns."""
    contents = (turn["content"] for turn in turns if turn["role"] == "user")
    return all(not isinstance(content, str) or content.strip() in text for content in contents)


def rendered_chat(tokenizer: object, text: Text) -> Chat:
    """Render a chat, split into what comes before the answer, and the answer.

    Raises:
        CalibrationError: As `render`, or if the template does not show the row's tools or
            documents, or writes the prompt differently once there is an answer.
    """
    turns = text.prompt if text.target is None else [*text.prompt, text.target]

    def written(turns: list[Turn], asks: bool, values: Mapping[str, object] = text.values) -> str:
        return render(tokenizer, turns, text.name, add_generation_prompt=asks, **values)

    is_asked = text.target is None
    whole = written(turns, is_asked)
    for key in text.values:
        fewer = {name: value for name, value in text.values.items() if name != key}
        if written(turns, is_asked, fewer) == whole:
            raise CalibrationError(
                f"{text.name}: the tokenizer's chat template does not show {key}. Leave the column "
                "out, or give a tokenizer whose template shows them"
            )
    keys = dict.fromkeys(key for turn in turns for key in turn if key not in ("role", "content"))
    without = {key: [{k: turn[k] for k in turn if k != key} for turn in turns] for key in keys}
    hidden = [key for key in keys if written(without[key], is_asked) == whole]
    unread = tuple(f"{key} of turns, which the template does not show" for key in hidden)
    if text.target is None:
        return Chat(whole, None, unread)
    prompt = written(text.prompt, True)
    if not str(text.target["content"]).strip():
        return Chat(prompt, "", unread)
    if not whole.startswith(prompt):
        raise CalibrationError(
            f"{text.name}: the tokenizer's chat template renders the prompt differently once "
            "there is an answer; give rows with prompt and target"
        )
    return Chat(prompt, whole[len(prompt) :], unread)


def head_length(tokenizer: Any, text: Text, prompt: list[int]) -> int:
    """Return how many tokens of a prompt the template writes in front of the first content."""
    turns = [{**turn, "content": "."} for turn in text.prompt]
    rendered = render(tokenizer, turns, text.name, add_generation_prompt=True, **text.values)
    ids = tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"]
    pairs = zip(prompt, ids, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids of all special tokens, those of the vocabulary without a role included."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    without_role = {number for number, token in added.items() if token.special}
    return frozenset(without_role | {*tokenizer.all_special_ids})


def shortest_chat(tokenizer: object) -> str:
    """Return a question and its answer as the template writes them, or no text if it cannot."""
    try:
        return render(tokenizer, _SHORTEST, "a chat")
    except CalibrationError:  # there is no template, or the data's chats are rendered later
        return ""


def end_of_answers(tokenizer: Any) -> Iterator[int]:
    """Yield the first special token that the template writes behind an answer, if there is one."""
    text = shortest_chat(tokenizer)
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    special = special_ids(tokenizer)

    def follows(token: int) -> bool:
        return token in special or not tokenizer.decode([token]).strip()

    behind = [token for token in takewhile(follows, reversed(ids)) if token in special]
    yield from behind[-1:]
