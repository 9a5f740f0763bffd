"""Texts as token ids: prompts, targets, chats, padding, and rows that are refused."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from sample_pools import text_batch, text_sample, words
from tiny_models import NO_TARGET
from tiny_texts import word_tokenizer
from tiny_tokenizers import KINDS, trained_tokenizer
from transformers.utils import chat_template_utils

from fusion_bench_featcal import CalibrationError, FeatCalSettings
from fusion_bench_featcal.data import templates
from fusion_bench_featcal.data.text_batches import TextBatches
from fusion_bench_featcal.data.text_formats import Text, read_row
from fusion_bench_featcal.data.text_rows import TextRows
from fusion_bench_featcal.data.text_samples import CausalTextEncoder

A, B, C, D, END = 3, 4, 5, 6, 1
PAIR = {"prompt": "a b", "target": "c"}
LONG = {"prompt": "a b c d e f", "target": "a b"}
CHAT = (
    "{% for m in messages %}{{ m.role[0] }} {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}a {% endif %}"
)
ASKED = [{"role": "user", "content": "b c"}]
TURNS = [*ASKED, {"role": "assistant", "content": "d"}]
IN_CHAT: dict[str, Any] = {"chat_template": CHAT}
PADDED = {"input_ids": [A, B, END, 0, 0], "attention_mask": [1, 1, 1, 0, 0]}


def sample(row: Any, kind: str = "causal", **options: Any) -> str:
    """The sample of a row. Options go to the tokenizer, `max_length` to the calibration."""
    settings = {name: options.pop(name) for name in {"max_length"} & options.keys()}
    options = {"ends": kind == "seq2seq"} | options
    return text_sample(row, kind, word_tokenizer(**options), **settings)


SAMPLES: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("seq2seq", PAIR, "a b . > c .", {}),
    ("seq2seq", PADDED | {"labels": [C, END, -100]}, "a b . > c .", {}),
    ("causal", PAIR, "a b c . > _ _ c .", {}),
    ("causal", PAIR, "a b c . > _ _ c .", {"ends": True}),  # one end, not two
    ("causal", {"prompt": "a b"}, "a b", {}),
    ("causal", {"input_ids": [A, B, C, D], "labels": [-100, B, -100, D]}, "a b c d > _ b _ d", {}),
    ("causal", {"messages": TURNS}, "? b c a d > _ _ _ _ d", IN_CHAT),
    ("causal", {"prompt": "a b c d", "target": "d d d d d d"}, "b c d d d d > _ _ _ d d d",
     {"max_length": 6}),  # at least half of it for the target
    ("causal", {"messages": [{"role": "user", "content": "b c d e"}, TURNS[1]]},
     "? c d e a d > _ _ _ _ _ d", IN_CHAT | {"max_length": 6}),  # the oldest part goes
    ("classification", {"messages": [{"role": "user", "content": "b c d e"}]}, "? d e a",
     IN_CHAT | {"max_length": 4}),
    ("seq2seq", {"prompt": "a b c d", "target": "d d d d"}, "a b . > d d d", {"max_length": 3}),
    ("classification", {"text": "a b", "text_pair": "c", "label": 1}, "a b c", {}),
    ("classification", PADDED | {"labels": 2}, "a b .", {}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "row", "expected", "options"), SAMPLES)
def test_prompt_and_target_of_a_row(kind: str, row: Any, expected: str, options: dict[str, Any]):
    assert sample(row, kind, **options) == expected
    if "input_ids" in row:
        tensors = {name: torch.tensor(value) for name, value in row.items()}
        assert sample(tensors, kind) == expected


MESSAGES: list[tuple[Any, dict[str, Any], str]] = [
    ({"prompt": "a"}, {"kind": "seq2seq"}, "needs a target.*calibration_targets=generated"),
    ({"prompt": "a", "target": " "}, {}, "the target is empty"),
    ({"input_ids": [A, B], "labels": [A]}, {}, "2 input_ids, but .* 1 labels"),
    ({"messages": ASKED}, {}, "chat template"),
    (LONG, {"model_max_length": 8}, r"9 tokens.*limit.*is 8.*max_length"),
]


@pytest.mark.parametrize(("row", "options", "message"), MESSAGES)
def test_rows_without_a_usable_sample_are_named(row: Any, options: dict[str, Any], message: str):
    with pytest.raises(CalibrationError, match=rf"task 'a', .*train.*, example 0.*{message}"):
        sample(row, **options)
    with pytest.raises(CalibrationError, match="max_length=9 is more than 8 tokens"):
        sample(PAIR, max_length=9, model_max_length=8)


def test_a_prompt_that_leaves_no_room_for_the_answer_is_named_with_both_limits():
    encoder = CausalTextEncoder(word_tokenizer(model_max_length=8))
    with pytest.raises(CalibrationError, match=r"a: 6 tokens.*is 8, of which 3 are for the answer"):
        encoder.prompt(read_row({"prompt": " ".join("abcdef")}, "a"), 3)


@pytest.mark.parametrize(("kind", "side", "ids", "labels"), [
    ("causal", "left", [[A, B, C], [0, 0, A]], [[-100, B, C], [-100] * 3]),
    ("seq2seq", "left", [[A, B, C], [0, 0, A]], [[B, C], [C, -100]]),
    ("classification", "right", [[A, B, C], [A, 0, 0]], None),
])  # fmt: skip
def test_batches_are_padded_on_the_side_of_the_tokenizer(kind, side, ids, labels):
    targets = ([B, C], [C]) if kind == "seq2seq" else ([-100, B, C], None)
    rows = [{"input_ids": i, "labels": t} for i, t in zip(([A, B, C], [A]), targets, strict=True)]
    batch = text_batch(rows, kind, word_tokenizer(padding_side=side))
    order = batch["input_ids"].argsort(dim=0, descending=True, stable=True)[:, 1]
    assert batch["input_ids"][order].tolist() == ids
    assert batch["attention_mask"][order].tolist() == [[int(i > 0) for i in row] for row in ids]
    assert (batch["labels"][order].tolist() if "labels" in batch else None) == labels


def test_pairs_of_a_classifier_have_types_and_are_cut_together():
    rows = [{"text": "a b c d", "text_pair": "e"}, {"text": "a b", "text_pair": ""}]
    names = ["input_ids", "token_type_ids", "attention_mask"]  # BERT's
    tokenizer = word_tokenizer(model_input_names=names)
    batch = text_batch(rows, "classification", tokenizer, max_length=4)
    order = batch["attention_mask"].sum(dim=1).argsort(descending=True)
    assert words(batch["input_ids"][order][0]) == "a b c e"
    assert batch["token_type_ids"][order].tolist() == [[0, 0, 0, 1], [0, 0, 0, 0]]


# --- trained tokenizers of all common kinds ---


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_and_target_are_tokenised_as_one_text(kind: str):
    tokenizer, encoder = trained_tokenizer(kind), CausalTextEncoder(trained_tokenizer(kind))

    def encoded(row: dict[str, Any]) -> tuple[list[int], list[int]]:
        """Token ids, and those of them that are targets, which come last."""
        ids = encoder.sample(read_row(row, ""))
        targets = [label for label in ids.labels or () if label != NO_TARGET]
        assert ids.ids[-len(targets) :] == targets and len(ids.labels or ()) == len(ids.ids)
        return ids.ids, targets

    for prompt, target in (("number of river :", " 42 10"), ("colour of lamp : ", "red")):
        ids, targets = encoded({"prompt": prompt, "target": target})
        assert ids == [*tokenizer(prompt + target)["input_ids"], tokenizer.eos_token_id]
        assert tokenizer.decode(targets[:-1]).split() == target.split()
    # Without a blank between them the target is a text of its own.
    ids, targets = encoded({"prompt": "colour of lamp", "target": "red"})
    alone = tokenizer("red", add_special_tokens=False)["input_ids"]
    assert targets == [*alone, tokenizer.eos_token_id]
    assert ids == [*tokenizer("colour of lamp")["input_ids"], *targets]
    chat = [{"role": "user", "content": "river"}, {"role": "assistant", "content": "blue"}]
    ids, targets = encoded({"messages": chat})
    whole = tokenizer.apply_chat_template(chat, tokenize=False)
    assert ids == tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert "blue" in tokenizer.decode(targets) and "river" not in tokenizer.decode(targets)


# Ends of four public formats. [INST] and [/INST] are special tokens without a role.
@pytest.mark.parametrize("end", ["[/INST]\n", "[/INST]\n</s>", " [/INST]", "</s>\n"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_ends_where_the_template_ends_it(kind: str, end: str):
    tokenizer = copy.deepcopy(trained_tokenizer(kind))
    tokenizer.chat_template = (
        "{% for m in messages %}[INST]{{ m.role }} {{ m.content }}" + end + "{% endfor %}"
        "{% if add_generation_prompt %}[INST]assistant {% endif %}"
    )
    encoder, mark = CausalTextEncoder(tokenizer), end.strip().partition("\n")[0]
    chat = [{"role": "user", "content": "river"}, {"role": "assistant", "content": "blue lamp"}]
    targets = [t for t in encoder.sample(read_row({"messages": chat}, "")).labels or () if t >= 0]
    assert tokenizer.decode(targets).replace(" ", "") == f"bluelamp{mark}"
    stop = tokenizer.convert_tokens_to_ids(mark)
    assert encoder.ends == {stop, tokenizer.eos_token_id}
    assert encoder.until_end([7, stop, 8]) == [7, stop]
    # A prompt and target that were written by hand end there, too.
    row = {"prompt": "[INST]user river[/INST]", "target": f"blue{end}"}
    assert (encoder.sample(read_row(row, "")).labels or [])[-1] == stop


def in_chat(template: str) -> dict[str, Any]:
    return {"chat_template": template}


IN_TOOLS = in_chat("{% for t in tools or [] %}{{ t.name }} {% endfor %}" + CHAT)
DATED = in_chat("{{ strftime_now('%d').replace('26', 'e') }} " + CHAT)
NOTED = in_chat(CHAT.replace("{{ m.content }}", "{{ m.content }} {{ m.mark }}"))


def test_a_template_shows_tools_and_keys_or_they_are_named():
    assert sample({"messages": TURNS, "tools": [{"name": "e"}]}, **IN_TOOLS) == (
        "e ? b c a d > _ _ _ _ _ d"
    )
    with pytest.raises(
        CalibrationError, match=r"example 0: .*template does not render tools\. Remove"
    ):
        sample({"messages": TURNS, "tools": [{"name": "e"}]}, **IN_CHAT)
    turns = [{**turn, "mark": "e"} for turn in TURNS]
    text = read_row({"messages": turns}, "")
    shown, hidden = (CausalTextEncoder(word_tokenizer(**o)).sample(text) for o in (NOTED, IN_CHAT))
    assert not shown.unread and "e" in words(shown.ids)
    assert hidden.unread == ("mark of turns, which the template does not render",)


def test_the_clock_stands_still_in_templates():
    assert sample({"messages": TURNS}, **DATED) == "e ? b c a d > _ _ _ _ _ d"


def test_threads_that_render_at_once_leave_the_clock_of_transformers() -> None:
    """The second thread begins while the first renders, and ends after it."""
    first, second, ended = threading.Event(), threading.Event(), threading.Event()
    clock, tokenizers = chat_template_utils.datetime, [word_tokenizer(**DATED) for _ in range(2)]

    def meeting(tokenizer: Any, arrived: threading.Event, awaited: threading.Event) -> Any:
        render = tokenizer.apply_chat_template

        def waiting(*arguments: Any, **options: Any) -> Any:
            arrived.set()
            assert awaited.wait(60)
            return render(*arguments, **options)

        tokenizer.apply_chat_template = waiting
        return tokenizer

    def begin() -> str:
        try:
            return templates.render(meeting(tokenizers[0], first, second), TURNS, "row")
        finally:
            ended.set()

    def follow() -> str:
        assert first.wait(60)
        return templates.render(meeting(tokenizers[1], second, ended), TURNS, "row")

    with ThreadPoolExecutor(2) as pool:
        texts = [task.result() for task in [pool.submit(begin), pool.submit(follow)]]
    assert texts[0] == texts[1] and texts[0].startswith("e ")
    assert chat_template_utils.datetime is clock
    alone: Any = word_tokenizer(**in_chat("{{ strftime_now('%Y') }}"))
    templates.render(alone, TURNS, "row")
    assert alone.apply_chat_template(TURNS, tokenize=False) == f"{clock.now():%Y}"


def test_a_template_whose_loops_would_take_hours_is_refused() -> None:
    template = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    tokenizer = word_tokenizer(**in_chat(template))
    with pytest.raises(
        CalibrationError, match=r"^row: .*its loops have more than 1,000,000 iterations"
    ):
        templates.render(tokenizer, TURNS, "row")
    short = word_tokenizer(**in_chat("{% for i in range(99999) %}{% endfor %}a"))
    assert [templates.render(short, TURNS, "row") for _ in range(20)] == ["a"] * 20


def test_samples_by_length_are_read_once(monkeypatch) -> None:
    drawn, read = [2, 0, 1], list[int]()

    def counted(rows: TextRows, index: int) -> Text:
        read.append(index)
        return original(rows, index)

    original = TextRows.read
    monkeypatch.setattr(TextRows, "read", counted)
    rows = TextRows([{"prompt": "a " * n, "target": "b"} for n in (3, 2, 1)], "data")
    encoder = CausalTextEncoder(word_tokenizer())
    batches = TextBatches(rows, drawn, FeatCalSettings(), encoder, torch.nn.Identity)
    ordered, order = batches.by_length()
    assert ordered.indices == [2, 1, 0] and order == [0, 2, 1]
    assert [text.prompt for text in ordered.texts] == ["a ", "a a ", "a a a "]
    assert [len(sample.ids) for sample in ordered.encoded] == sorted(batches.lengths())
    assert sorted(read) == sorted(drawn)
