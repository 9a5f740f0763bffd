"""Texts as token ids: what counts as prompt, target and padding, and what is refused."""

import pytest
import torch
from tiny_texts import word_tokenizer

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.data.text_formats import lacks_answer
from fusion_bench_featcal.data.text_samples import Sample, TextEncoder, TextKind, pad_samples

A, B, C, D, END, UNKNOWN = 3, 4, 5, 6, 1, 2
CHAT = (
    "{% for m in messages %}{{ m.role[0] }} {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}a {% endif %}"
)


def encoder(kind: TextKind = "causal", *, ends=None, max_length=None, **options) -> TextEncoder:
    tokenizer = word_tokenizer(ends=kind == "seq2seq" if ends is None else ends, **options)
    return TextEncoder(tokenizer, kind, max_length)


def sample(row, **options) -> Sample:
    return encoder(**options).sample(row, "task 'x', item 5")


def test_whole_numbers_are_texts_as_tables_write_them():
    assert sample({"prompt": 7, "target": 12}) == sample({"prompt": "7", "target": "12"})


def test_plain_text_for_an_encoder_decoder_keeps_the_tokenizers_end_marks():
    assert sample({"prompt": "a b", "target": "c"}, kind="seq2seq") == Sample([A, B, END], [C, END])


@pytest.mark.parametrize("ends", [False, True])
def test_plain_text_for_a_decoder_is_prompt_then_target_then_one_end(ends):
    expected = Sample([A, B, C, END], [-100, -100, C, END])
    assert sample({"prompt": "a b", "target": "c"}, ends=ends) == expected


def test_a_decoder_can_go_without_targets():
    assert sample({"prompt": "a b"}) == Sample([A, B], None)
    assert sample({"input_ids": [A, B]}) == Sample([A, B], None)


def test_tokenised_rows_lose_their_padding():
    row = {"input_ids": [A, B, END, 0, 0], "attention_mask": [1, 1, 1, 0, 0]}
    tensors = {name: torch.tensor(ids) for name, ids in row.items()}
    labels = [C, END, -100]
    for given in (row, tensors):
        assert sample({**given, "labels": labels}, kind="seq2seq") == Sample([A, B, END], [C, END])
    left = {"input_ids": [0, A, B, C], "attention_mask": [0, 1, 1, 1], "labels": [-100, -100, B, C]}
    assert sample(left) == Sample([A, B, C], [-100, B, C])


@pytest.mark.parametrize("name", ["input_ids", "attention_mask", "labels"])
@pytest.mark.parametrize("value", [3.0, 2.9, "3", None])
def test_token_ids_that_are_no_integers_are_refused(name, value):
    row = {"input_ids": [A, B], "attention_mask": [1, 1], "labels": [A, B]}
    with pytest.raises(CalibrationError, match=rf"item 5: {name} must be integers, got {value!r}"):
        sample({**row, name: [row[name][0], value]})
    with pytest.raises(
        CalibrationError, match=rf"item 5: {name} must be integers, got 1.5 \(float"
    ):
        sample({**row, name: torch.tensor([1.5, 2])})


def test_gaps_in_a_tokenised_target_stay_gaps():
    row = {"input_ids": [A, B, C, D], "labels": [-100, B, -100, D]}
    assert sample(row) == Sample([A, B, C, D], [-100, B, -100, D])


def test_a_chat_is_rendered_and_its_last_turn_is_the_target():
    turns = [{"role": "user", "content": "b c"}, {"role": "assistant", "content": "d"}]
    rendered = word_tokenizer()("u b c a", add_special_tokens=False)["input_ids"]
    found = sample({"messages": turns}, chat_template=CHAT)
    assert found == Sample([*rendered, D], [-100] * len(rendered) + [D])
    assert sample({"messages": turns[:1]}, chat_template=CHAT).labels is None


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"prompt": "a"}, {"kind": "seq2seq"}, "no target.*calibration_targets=generated"),
        ({"prompt": "a", "target": ""}, {"kind": "seq2seq"}, "the target is empty"),
        ({"prompt": "a", "target": " "}, {}, "the target is empty"),
        ({"prompt": " ", "target": "a"}, {"kind": "seq2seq"}, "the text is empty"),
        ({"prompt": "", "target": "a"}, {}, "the text is empty"),
        ({"input_ids": [0, 0], "attention_mask": [0, 0]}, {}, "padding alone"),
        ({"input_ids": [0, 0]}, {}, "padding alone"),
        ({"input_ids": [A, B], "labels": [-100, -100]}, {}, "the target is empty"),
        (
            {"input_ids": [A], "labels": [-100, -100]},
            {"kind": "seq2seq"},
            "the target is empty",
        ),
        ({"input_ids": [A, B], "labels": [A]}, {}, "2 input_ids, but .* 1 labels"),
        ({"input_ids": [A, B], "attention_mask": [1]}, {}, "2 input_ids, but 1 entries"),
        ({"prompt": 7.5}, {}, "prompt is float, not a text"),
        ({"prompt": "a", "target": True}, {}, "target is bool, not a text"),
        ({"sentence": "a"}, {}, r"one has \['sentence'\]"),
        ({"messages": []}, {"chat_template": CHAT}, "no turn before the answer"),
        ({"messages": [{"role": "user", "content": "a"}]}, {}, "chat template"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]},
            {"chat_template": CHAT},
            "the target is empty",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_named(row, options, message):
    with pytest.raises(CalibrationError, match=rf"task 'x', item 5.*{message}"):
        sample(row, **options)


def test_an_unknown_word_is_a_word():
    found = sample({"prompt": "zzz", "target": "zzz"})
    assert found == Sample([UNKNOWN, UNKNOWN, END], [-100, UNKNOWN, END])


def test_too_long_a_text_is_an_error_or_cut():
    row = {"prompt": "a b c d e f", "target": "a b"}
    with pytest.raises(CalibrationError, match=r"9 tokens.*limit.*is 8.*method\.max_length"):
        sample(row, model_max_length=8)
    assert sample(row, max_length=6, model_max_length=8) == Sample(
        [A, B, C, A, B, END], [-100, -100, -100, A, B, END]
    )
    with pytest.raises(CalibrationError, match=r"method\.max_length = 9.*limit of 8"):
        sample(row, max_length=9, model_max_length=8)


def test_a_long_target_leaves_half_for_the_prompt():
    found = sample({"prompt": "a b c d", "target": "d d d d d d"}, max_length=6)
    assert found == Sample([A, B, C, D, D, D], [-100, -100, -100, D, D, D])


def test_prompt_and_target_of_an_encoder_decoder_are_cut_apart():
    row = {"prompt": "a b c d", "target": "d d d d"}
    assert sample(row, kind="seq2seq", max_length=3) == Sample([A, B, C], [D, D, D])


def test_batches_are_padded_on_the_tokenizers_side():
    samples = [Sample([A, B, C], [-100, B, C]), Sample([A], None)]
    right, left = (pad_samples(samples, encoder(padding_side=side)) for side in ("right", "left"))
    assert right["input_ids"].tolist() == [[A, B, C], [A, 0, 0]]
    assert right["labels"].tolist() == [[-100, B, C], [-100] * 3]
    assert left["input_ids"].tolist() == [[A, B, C], [0, 0, A]]
    assert left["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


def test_targets_of_an_encoder_decoder_are_padded_on_the_right():
    samples = [Sample([A, B], [C, D, END]), Sample([A], [C, END])]
    batch = pad_samples(samples, encoder("seq2seq", padding_side="left"))
    assert batch["labels"].tolist() == [[C, D, END], [C, END, -100]]
    assert batch["input_ids"].tolist() == [[A, B], [0, A]]


def test_prompt_leaves_room_for_an_answer():
    causal = encoder(max_length=6)
    prompt = causal.prompt({"prompt": "a b c d e f g h"}, "x", reserved=2)
    assert prompt == [3, 4, 5, 6]
    assert causal.answered(prompt, [A, END], "x") == Sample(
        [3, 4, 5, 6, A, END], [-100] * 4 + [A, END]
    )


def test_text_for_a_classifier_is_read_without_target_and_label():
    kind: TextKind = "classification"
    assert sample({"prompt": "a b", "target": "c"}, kind=kind) == Sample([A, B], None)
    assert sample({"prompt": "a b"}, kind=kind, ends=True) == Sample([A, B, END], None)
    row = {"input_ids": [A, B, END, 0], "attention_mask": [1, 1, 1, 0], "labels": 2, "label": 1}
    assert sample(row, kind=kind) == Sample([A, B, END], None)
    turns = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c d"}]
    asked, answered = (
        sample({"messages": turns[:end]}, kind=kind, chat_template=CHAT) for end in (1, 2)
    )
    assert answered == Sample([UNKNOWN, B, A, C, D], None)
    assert asked == Sample([UNKNOWN, B, A], None)
    batch = pad_samples([asked, answered], encoder(kind))
    assert set(batch) == {"input_ids", "attention_mask"}


TURNS = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
SHARED = [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "c"}]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a b", "completion": "c"},
        {"question": "a b", "answer": "c"},
        {"instruction": "a", "input": "b", "output": "c"},
        {"instruction": "a b", "input": "", "output": "c", "text": "d"},
        {"instruction": "a", "context": "b", "response": "c"},
        {"messages": None, "prompt": "a b", "target": "c"},
    ],
)
def test_prompts_and_answers_of_the_usual_formats(row):
    assert sample(row) == Sample([A, B, C, END], [-100, -100, C, END])


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": SHARED},
        {"messages": SHARED},
        {"prompt": TURNS[:1], "completion": TURNS[1:]},
        {"prompt": TURNS[:1], "completion": "c"},
    ],
)
def test_chats_of_the_usual_formats(row):
    chat = encoder(chat_template=CHAT)
    assert chat.sample(row, "x") == chat.sample({"messages": TURNS}, "x")
    assert not lacks_answer(row, "x")
    asked = {"prompt": TURNS[:1]} if "prompt" in row else {"conversations": SHARED[:1]}
    assert lacks_answer(asked, "x")
    assert chat.prompt(row, "x", 0) == chat.prompt(asked, "x", 0)
