"""Chats as the tokenizer's chat template renders them."""

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from itertools import takewhile
from typing import Any, NamedTuple

from transformers.utils import chat_template_utils

from fusion_bench_featcal.data.chats import Turn
from fusion_bench_featcal.data.text_formats import Text
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.block import first_line

_SHORTEST_CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
_DAY = datetime(2024, 7, 26)
_TEMPLATE_PREFIX = "{# Rendered on a fixed day. +#}"  # separates our copy in transformers' cache
_MAX_STEPS = 1_000_000
"""Maximum number of iterations of all loops of a template for one chat."""


class Chat(NamedTuple):
    """A rendered chat.

    Attributes:
        prompt: The text before the answer.
        answer: The answer with the text that the template writes after it. None without an answer.
        unread: Sentences on keys of turns that the template does not show.
    """

    prompt: str
    answer: str | None
    unread: tuple[str, ...]


def render(tokenizer: Any, turns: list[Turn], name: str, **values: object) -> str:
    """Render a chat with the template. Templates that print the date get 26 July 2024.

    Args:
        tokenizer: A tokenizer with a chat template.
        turns: The turns. If the template does not show their texts, they are passed as parts.
        name: The row's name in messages.
        **values: Other variables of the template, such as `tools`.

    Raises:
        CalibrationError: If the template raises an error.
    """
    try:
        text = _apply_template(tokenizer, turns, values)
        if _contains_turns(text, turns):
            return text
        # Templates of models that read images expect a list of parts.
        parts = [t | {"content": [{"type": "text", "text": t["content"]}]} for t in turns]
        text_parts = _apply_template(tokenizer, parts, values)
        return text_parts if _contains_turns(text_parts, turns) else text
    except Exception as error:  # a template may raise any error
        raise CalibrationError(
            f"{name}: the tokenizer's chat template cannot be used: {first_line(error)}. "
            "Correct the example, or give a tokenizer with another template"
        ) from error


def _apply_template(tokenizer: Any, turns: list[Turn], values: Mapping[str, object]) -> str:
    # transformers 5 passes no functions to a template, so they have to be its globals.
    template = _TEMPLATE_PREFIX + tokenizer.get_chat_template(tools=values.get("tools"))
    compiled = chat_template_utils._compile_jinja_template(template)
    compiled.globals.update(strftime_now=_DAY.strftime, range=_make_limited_range())
    values = {"date_string": f"{_DAY:%d %b %Y}", "chat_template": template, **values}
    return tokenizer.apply_chat_template(turns, tokenize=False, **values)


def _make_limited_range() -> Callable[..., range]:
    """Return a `range` for one chat. Nested loops of an untrusted template could take hours."""
    used = 0

    def limited(*bounds: int) -> range:
        nonlocal used
        used += len(numbers := range(*bounds))
        if used > _MAX_STEPS:
            raise OverflowError(f"its loops have more than {_MAX_STEPS:,} iterations")
        return numbers

    return limited


def _contains_turns(text: str, turns: list[Turn]) -> bool:
    """Return whether a rendered chat contains the texts of the user's turns."""
    contents = (turn["content"] for turn in turns if turn["role"] == "user")
    return all(not isinstance(content, str) or content.strip() in text for content in contents)


def render_chat(tokenizer: object, text: Text) -> Chat:
    """Render a chat, and split it into prompt and answer.

    Raises:
        CalibrationError: As `render`, or if the template does not show the row's tools or
            documents, or writes the prompt differently once there is an answer.
    """
    turns = text.prompt if text.target is None else [*text.prompt, text.target]

    def rendered(turns: list[Turn], asks: bool, values: Mapping[str, object] = text.values) -> str:
        return render(tokenizer, turns, text.name, add_generation_prompt=asks, **values)

    is_asked = text.target is None
    whole = rendered(turns, is_asked)
    for key in text.values:
        fewer = {name: value for name, value in text.values.items() if name != key}
        if rendered(turns, is_asked, fewer) == whole:
            raise CalibrationError(
                f"{text.name}: the tokenizer's chat template does not render {key}. Remove the "
                "column, or give a tokenizer whose template renders it"
            )
    keys = dict.fromkeys(key for turn in turns for key in turn if key not in ("role", "content"))
    without = {key: [{k: turn[k] for k in turn if k != key} for turn in turns] for key in keys}
    hidden = [key for key in keys if rendered(without[key], is_asked) == whole]
    unread = tuple(f"{key} of turns, which the template does not render" for key in hidden)
    if text.target is None:
        return Chat(whole, None, unread)
    prompt = rendered(text.prompt, True)
    if not str(text.target["content"]).strip():
        return Chat(prompt, "", unread)
    if not whole.startswith(prompt):
        raise CalibrationError(
            f"{text.name}: the tokenizer's chat template renders the prompt differently when an "
            "answer follows; give examples with prompt and target"
        )
    return Chat(prompt, whole[len(prompt) :], unread)


def template_prefix_length(tokenizer: Any, text: Text, prompt: list[int]) -> int:
    """Return the number of a prompt's tokens that the template writes before all contents."""
    turns = [{**turn, "content": "."} for turn in text.prompt]
    rendered = render(tokenizer, turns, text.name, add_generation_prompt=True, **text.values)
    ids = tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"]
    pairs = zip(prompt, ids, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids of all special tokens, including added tokens without a role."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    without_role = {index for index, token in added.items() if token.special}
    return frozenset(without_role | {*tokenizer.all_special_ids})


def render_shortest_chat(tokenizer: object) -> str | None:
    """Render a question with its answer. Return None if there is no usable template."""
    try:
        return render(tokenizer, _SHORTEST_CHAT, "a chat")
    except CalibrationError:  # there is no template, or the data's chats are rendered later
        return None


def answer_end_tokens(tokenizer: Any) -> Iterator[int]:
    """Yield the first special token that the template writes after an answer, if there is one."""
    text = render_shortest_chat(tokenizer) or ""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    special = special_ids(tokenizer)

    def follows(token: int) -> bool:
        return token in special or not tokenizer.decode([token]).strip()

    after = [token for token in takewhile(follows, reversed(ids)) if token in special]
    yield from after[-1:]
