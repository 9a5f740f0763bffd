"""Rows of public formats: what is the prompt, the target, and what is refused."""

from typing import Any

import pytest
from tiny_texts import word_tokenizer
from tiny_tokenizers import trained_tokenizer

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.data.text_formats import read_row
from fusion_bench_featcal.data.text_samples import IGNORED, TextEncoder

ASK, SAY = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
BE = {"role": "system", "content": "s"}
PARTS = [{"type": "text", "text": "q1 "}, {"type": "text", "text": "q2", "image_url": None}]


def shared(*turns: str) -> list[dict[str, str]]:
    """ShareGPT's turns, as `human: q`."""
    return [dict(zip(("from", "value"), turn.split(": "), strict=True)) for turn in turns]


def answered(*roles: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, "qa")]}  # noqa: B905


CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": [BE, ASK, SAY]}, "system s|user q > a"),
    ({"messages": {"role": ["user", "assistant"], "content": ["q", "a"]}}, "user q > a"),
    ({"messages": '[{"role": "user", "content": "q"}]'}, "user q > None"),  # of a table
    ({"messages": [{"role": "user", "content": PARTS}, SAY]}, "user q1 q2 > a"),
    ({"conversations": shared("system: s", "human: q", "chatgpt: a")}, "system s|user q > a"),
    ({"conversations": shared("human: q", "Bing: a", "human: p", "bard: b")},
     "user q|assistant a|user p > b"),
    (answered("User", "MODEL"), "user q > a"),
    ({"messages": [ASK, SAY, {"role": "function", "name": "f", "content": "1"}]},
     "user q|assistant a|tool 1 > None"),
    ({"prompt": [ASK], "completion": [SAY]}, "user q > a"),  # TRL
    ({"messages": [ASK], "response": "a"}, "user q > a"),
    ({"prompt": "q", "chosen": [ASK, SAY], "rejected": [ASK]}, "user q > a - rejected"),
    ({"chosen": [ASK, SAY], "rejected": [ASK, SAY]}, "user q > a - rejected"),
    ({"messages": [ASK, SAY], "system": "s", "id": 1}, "system s|user q > a - id"),
    ({"messages": [ASK, SAY], "system": "", "tools": None, "history": []}, "user q > a"),
    ({"messages": [ASK, SAY | {"weight": 0}, ASK, SAY | {"weight": 1}]},
     "user q|assistant a|user q > a"),
    ({"messages": [ASK, SAY, ASK, {**SAY, "content": "bad", "weight": 0}]}, "user q > a"),
]  # fmt: skip

PROMPTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "q", "target": 15, "source": "x"}, "q > 15 - source"),
    ({"instruction": "q", "input": "c", "output": "a", "text": "whole"}, "q||c > a - text"),
    ({"instruction": "q", "input": "", "system": None, "history": [], "output": "a"}, "q > a"),
    ({"instruction": "q", "context": "c", "response": "a"}, "q||c > a"),  # dolly
    ({"prompt": "q", "chosen": "a", "rejected": "b"}, "q > a - rejected"),
    ({"question": "q", "choices": ["x", "y"], "answer": 1}, "q||A. x|B. y > B"),  # MMLU
    ({"question": "q", "choices": '["x", "y"]', "answer": "0"}, "q||A. x|B. y > A"),
    ({"question": "q", "choices": ["x", "y"], "answer": "y"}, "q||A. x|B. y > y"),
    ({"question": "q", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "2"},
     "q||1. x|2. y > 2"),  # ARC
    ({"prompt": "q", "completion": "a", "label": True}, "q > a"),  # KTO
    ({"prompt": "q", "completion": "a", "weight": 1.0}, "q > a"),
    ({"prompt": "q", "completion": "a", "weight": 72}, "q > a - weight"),
    ({"prompt": "q", "completion": "a", "label": 3}, "q > a - label"),
    ({"text": "t", "label": 1}, "t > None - label"),
    ({"prompt": None, "text": "t"}, "t > None"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "expected"), [*CHATS, *PROMPTS])
def test_prompt_target_and_unread_columns(row: dict[str, Any], expected: str):
    text = read_row(row, "")
    prompt, target = text.prompt, text.target
    if text.form == "chat":
        prompt = "|".join(f"{turn['role']} {turn['content']}" for turn in prompt)
        target = target and target["content"]
    unread = "".join(f" - {name}" for name in text.unread)
    assert f"{prompt} > {target}{unread}".replace("\n", "|") == expected
    assert text.lacks_target == (target is None and text.form != "text")


def test_only_named_columns_are_read():
    row = {"q": "a", "prompt": "id", "tools": [1], "r": "b"}
    text = read_row(row, "", {"prompt": "q", "target": "r"})
    assert (text.prompt, text.target, text.columns) == ("a", "b", ("q", "r"))
    assert text.unread == ("prompt", "tools")


CALL = {"role": "assistant", "content": None, "function_call": {"name": "f"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [ASK, {"role": "narrator", "content": "a"}]}, "turn 1: the speaker 'narrator'"),
    ({"messages": [{"content": "q"}]}, "turn 0: the speaker None is unknown"),
    ({"messages": [ASK, CALL]}, "turn 1: the content must be a text .*, content, function_call"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "image": "x.png"}]}]},
     "list of text parts, got .*image"),
    ({"messages": {"role": ["user"], "content": ["q", "a"]}}, "lists of role, content differ in"),
    ({"messages": "q"}, "messages must be a list, or its JSON text, got 'q'"),
    ({"messages": [SAY]}, "the chat has no turn before the answer"),
    ({"messages": [ASK, SAY | {"weight": 0}]}, "all answers have weight 0"),
    ({"messages": [ASK, SAY], "context": "c"}, "column context has no place in a chat"),
    ({"prompt": "q", "system": "s"}, "column system has no place in a prompt"),
    ({"instruction": "q", "history": [["x", "y"]], "output": "a"}, "column history has no place"),
    ({"prompt": "q", "tools": [{"name": "f"}], "target": "a"}, "column tools has no place"),
    ({"text": "t", "choices": ["x"]}, "column choices has no place in a text"),
    ({"question": "q", "choices": ["x", "y"], "answer": 2}, "answer 2, but there are 2 choices"),
    ({"prompt": ["q"], "answer": "x"}, "prompt is list, not a text"),
    ({"prompt": "q", "target": 1.5}, "target is float, not a text"),
    ({"prompt": "q", "output": "b", "answer": "c"}, "which of output, answer is the answer"),
    ({"prompt": "q", "completion": "a", "label": False}, "weight 0 or label false"),
    ({"sentence": "a"}, r"this one has \['sentence'\]"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "message"), REFUSED)
def test_rows_that_could_be_misread_are_refused(row: dict[str, Any], message: str):
    with pytest.raises(CalibrationError, match=rf"^the row.*: .*{message}|^the row, {message}"):
        read_row(row, "the row")


TOOL = {"name": "look"}
CALLS = [{"type": "function", "function": {"name": "look", "arguments": '{"noun": "lamp"}'}}]
CALLED = {"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": CALLS}]}


def test_tools_and_their_calls_go_to_the_chat_template():
    tokenizer = trained_tokenizer("bytes")
    sample = TextEncoder(tokenizer, "causal").sample(read_row({**CALLED, "tools": [TOOL]}, ""))
    prompt = tokenizer.decode([i for i, n in zip(sample.ids, sample.labels or ()) if n == IGNORED])  # noqa: B905
    target = tokenizer.decode([n for n in sample.labels or () if n != IGNORED])
    assert prompt.strip() == "[INST] look user q [/INST]" and target.strip() == "look lamp</s>"


IGNORING = "{% for m in messages %}{{ m.role[0] }} {{ m.content }} {% endfor %}"


@pytest.mark.parametrize(
    ("row", "name"), [({"messages": [ASK, SAY], "tools": [TOOL]}, "tools"), (CALLED, "tool_calls")]
)
def test_tools_that_the_template_ignores_are_refused(row: dict[str, Any], name: str):
    encoder = TextEncoder(word_tokenizer(chat_template=IGNORING), "causal")
    with pytest.raises(CalibrationError, match=f"row 1: .* chat template ignores {name}"):
        encoder.sample(read_row(row, "row 1"))
