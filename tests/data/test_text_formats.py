"""Rows of public formats: what is the prompt, the target, and what is refused."""

import json
import re
from typing import Any

import pytest

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.data.text_formats import read_row

ASK, SAY = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
BE = {"role": "system", "content": "s"}
PARTS = [{"type": "text", "text": "q1 "}, {"type": "text", "text": "q2"}]
SHARED = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]  # ShareGPT

CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": [BE, ASK, SAY]}, "system s|user q > a"),
    ({"messages": '[{"role": "user", "content": "q"}]'}, "user q > None"),  # of a table
    ({"messages": [{"role": "user", "content": PARTS}, SAY]}, "user q1 q2 > a"),
    ({"conversations": SHARED}, "user q > a"),
    ({"conversations": [*SHARED, *SHARED]}, "user q|assistant a|user q > a"),
    ({"prompt": [ASK], "completion": [SAY]}, "user q > a"),  # TRL
    ({"chosen": [ASK, SAY], "rejected": [ASK, SAY]}, "user q > a - rejected"),
    ({"messages": [ASK, SAY], "system": "s", "id": 1}, "system s|user q > a - id"),
    ({"messages": [ASK, SAY, ASK, {**SAY, "content": "bad", "weight": 0}]}, "user q > a"),
    ({"messages": [ASK, SAY, ASK, {**SAY, "content": "bad", "loss": False}]}, "user q > a"),
    ({"messages": [ASK, SAY, ASK, {**SAY, "content": "bad", "train": False}]}, "user q > a"),
    ({"messages": [ASK, SAY, ASK, {**SAY, "content": "bad", "training": "false"}]}, "user q > a"),
]

PROMPTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "q", "target": 15, "source": "x"}, "q > 15 - source"),
    ({"instruction": "q", "input": "c", "output": "a", "text": "all"}, "q||c > a - text"),  # Alpaca
    ({"instruction": "q", "input": "", "system": None, "history": [], "output": "a"}, "q > a"),
    ({"instruction": "q", "context": "c", "response": "a"}, "q||c > a"),  # Dolly
    ({"prompt": "q", "chosen": "a", "rejected": "b"}, "q > a - rejected"),
    ({"question": "q", "choices": ["x", "y"], "answer": 1}, "q||A. x|B. y > B"),  # MMLU
    ({"question": "q", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "2"},
     "q||1. x|2. y > 2"),  # ARC
    ({"question": "q", "options": {"A": "x", "B": "y"}, "answer": "B"}, "q||A. x|B. y > B"),
    ({"question": "q", "options": ["x", "y"], "answer": "A"}, "q||A. x|B. y > A"),
    ({"question": "q", "A": "x", "B": "y", "C": "z", "answer": "C"}, "q||A. x|B. y|C. z > C"),
    ({"prompt": "q", "completion": "a", "label": True}, "q > a"),  # KTO
    ({"text": "t", "label": 1}, "t > None - label"),
    ({"question": "q", "context": "c", "answers": {"text": ["a", "a"], "answer_start": [0, 9]}},
     "q||c > a"),  # SQuAD
    ({"question": "q", "answer": ["a"]}, "q > a"),
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


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [ASK, {"role": "narrator", "content": "a"}]}, "turn 1: the speaker 'narrator'"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "image": "x.png"}]}]},
     "list of text parts, got .*image"),
    ({"messages": "q"}, "messages must be a list, or its JSON text, got 'q'"),
    ({"messages": [SAY]}, "the chat has no turn before the answer"),
    ({"messages": [ASK, SAY | {"tool_calls": [1]}]}, "turn 1: tool_calls are not supported"),
    ({"messages": [ASK, SAY], "functions": [{}]},
     "column functions cannot be used in a chat. Write it into the text, or"),
    ({"prompt": "q", "tools": [{}]},
     "column tools cannot be used in a prompt. Write the example as mes"),
    ({"question": "q", "article": "x", "answer": "y"}, "column article cannot be used in a prompt"),
    ({"question": "q", "images": ["x"], "answer": "y"}, "column images cannot be used in a prompt"),
    ({"prompt": "q", "image": "x"}, "This model reads only text: name one that has a tower for it"),
    ({"messages": [ASK, SAY], "options": ["x", "y"]}, "column options cannot be used in a chat"),
    ({"prompt": "q", "system": "s"}, "column system cannot be used in a prompt"),
    ({"question": "q", "choices": ["x", "y"], "answer": 2},
     "the answer is 2, but its 2 choices are numbered from 0"),
    ({"question": "q", "choices": ["x"] * 27}, "27 choices, but 26 letters"),
    ({"question": "q", "choices": {"text": ["x", "y"], "label": ["A"]}}, "2 choices, but 1 lett"),
    ({"prompt": ["q"], "text_pair": "x"}, "prompt is list, not a text"),
    ({"prompt": ["q"], "answer": "x"}, "prompt is list, not a text"),
    ({"prompt": "q", "output": "b", "answer": "c"}, "which of output, answer is the answer"),
    ({"question": "q", "answers": {"text": ["a", "b"]}}, "answers has 2 different answers. Write"),
    ({"question": "q", "answers": {"text": []}}, "answers has 0 different answers. Write the one"),
    ({"messages": [ASK, SAY | {"loss": False}]}, "all answers have weight 0, or loss false"),
    ({"messages": [ASK, SAY | {"loss_mask": [0, 1]}]}, "turn 1: column loss_mask cannot be used"),
    ({"messages": [ASK, SAY], "loss_mask": [0, 1]}, "column loss_mask cannot be used in a chat"),
    ({"input_ids": [1, 2], "completion_mask": [0, 1]},
     "column completion_mask cannot be used in tokens"),
    ({"input_ids": [1, 2], "assistant_masks": [0, 1]},
     "column assistant_masks cannot be used in tokens"),
    ({"sentence": "a"}, r"this one has \['sentence'\]"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "message"), REFUSED)
def test_rows_that_could_be_misread_are_refused(row: dict[str, Any], message: str):
    with pytest.raises(CalibrationError, match=rf"^the row.*: .*{message}|^the row, {message}"):
        read_row(row, "the row")


URI = "data:image/png;base64,AAEC"
SEEN = {"type": "image", "path": "a.png"}


def with_parts(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "q"}]}]


IMAGES: list[tuple[dict[str, Any], list[Any]]] = [
    ({"prompt": with_parts({"type": "image"}), "completion": [SAY], "images": ["a"]}, ["a"]),
    ({"messages": json.dumps([*with_parts(SEEN), SAY])}, ["a.png"]),
    ({"chosen": [*with_parts(SEEN), SAY], "rejected": [*with_parts(SEEN), SAY]}, ["a.png"]),
    ({"prompt": with_parts(SEEN), "chosen": [*with_parts(SEEN), SAY]}, ["a.png"]),
    ({"messages": [*with_parts({"type": "image_url", "image_url": {"url": "file:///a"}}), SAY]},
     ["/a"]),
    ({"messages": [*with_parts({"image_url": URI, "type": None}), SAY]}, [b"\0\1\2"]),
    ({"messages": [*with_parts({"type": "image", "index": 0, "text": None}), SAY], "images": ["a"]},
     ["a"]),
    ({"messages": [*with_parts({"type": "image"}, SEEN), SAY], "image": URI},
     [b"\0\1\2", "a.png"]),
]  # fmt: skip


@pytest.mark.parametrize(("row", "images"), IMAGES)
def test_images_of_parts_and_columns(row: dict[str, Any], images: list[Any]):
    text = read_row(row, "", reads_images=True)
    assert text.form == "chat" and text.target and text.target["content"] == "a"
    assert text.prompt[-1]["content"] == "<image>" * len(images) + "q"
    assert [*text.images] == images and text.unread in ((), ("rejected",), ("prompt",))


PART = re.escape('{"type": "image", "path": "FILE"}')
NO_IMAGES: list[tuple[dict[str, Any], str]] = [
    ({"type": "image", "source": {"data": "x"}}, f"unsupported keys .source.. .*{PART}"),
    ({"type": "image", "index": 1}, f"unsupported keys .index.. .*{PART}"),
    ({"type": "image"}, f"1 parts stand for images that are missing. .*{PART}"),
    ({"type": "image_url", "image_url": {"url": "https://x/y.png"}}, f"not downloaded. .*{PART}"),
    ({"type": "image", "url": "data:image/png;base64,A"}, "is damaged"),
    ({"type": "video", "video": "x.mp4"}, f"a list of text parts, got .*Write an image as {PART}"),
]


@pytest.mark.parametrize(("part", "message"), NO_IMAGES)
def test_parts_that_are_no_images_are_refused(part: dict[str, Any], message: str):
    with pytest.raises(CalibrationError, match=rf"^the row.*: .*{message}"):
        read_row({"messages": [*with_parts(part), SAY]}, "the row", reads_images=True)


def test_masks_that_change_no_answer_are_not_read():
    rows = {"input_ids": [1], "labels": [1], "loss_mask": [1]}, {"text": "t", "labels": [1]}
    assert [read_row(row, "").unread for row in rows] == [("loss_mask",), ("labels",)]


def test_json_texts_that_are_no_chats_are_texts():
    target = '[{"from": "Rome", "to": "Bonn"}]'
    assert read_row({"prompt": "q", "target": target}, "").target == target
