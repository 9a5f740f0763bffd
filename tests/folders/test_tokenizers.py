"""Experts whose tokenizers or chat templates read texts otherwise, and copies, are in doubt."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from made_folders import CHAT, change_json, words, write_rows
from reports import error_of, featcal
from tiny_texts import TASKS, word_tokenizer

BEGIN = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<pad>", "type_id": 0}},
               {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<pad>": {"id": "<pad>", "ids": [0], "tokens": ["<pad>"]}},
}  # fmt: skip


def saved(folder: Path, **changes: Any) -> Path:
    """A tokenizer whose tokenizer.json has changes."""
    word_tokenizer().save_pretrained(folder)
    change_json(folder / "tokenizer.json", changes)
    return folder


def with_template(folder: Path, template: str) -> None:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def planned(folder: Path, *more: str) -> str:
    done = featcal(*words(folder, "--plan", *more))
    assert done.code == 0, done.err
    return done.out


ANSWER = {"role": "assistant", "content": "c"}


@pytest.mark.parametrize(("changes", "doubt"), [
    ({}, ""),
    ({"padding": None, "truncation": None}, ""),
    ({"post_processor": BEGIN}, "it has '<pad>' instead of "),
    ({"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": ""}}, "in '"),
])  # fmt: skip
def test_other_tokens_of_a_text_are_in_doubt(folder, changes, doubt):
    start = f"--expert two={saved(folder / 'two', **changes)} has a tokenizer that splits texts "
    start += f"differently from --tokenizer {folder / 'merged'}: in '"
    screen = planned(folder)
    assert (start in screen) == bool(doubt) == ("splits texts" in screen) and doubt in screen


@pytest.mark.parametrize(
    ("token", "row", "doubt"),
    [("<tool>", {"prompt": "a", "target": "c"}, "in '<tool>' it has '<tool>' instead of"),
     ("<pad2>", {"prompt": "a", "target": "c"}, ""),  # a token for padding
     ("<pad2>", {"prompt": "a", "target": "<pad2>"}, "one of its samples gets different tokens"),
     ("<pad2>", {"messages": [{"role": "user", "content": "b <pad2>"}, ANSWER]},
      "one of its samples gets different tokens")],
)  # fmt: skip
def test_tokens_of_an_expert_alone_are_in_doubt(folder, token, row, doubt):
    """Texts of samples are not shown, as the sentence stands in the result's card."""
    other = word_tokenizer()
    other.add_tokens(["<tool>"] * (token == "<tool>"))
    other.add_special_tokens({"pad_token": "<pad2>"} if token == "<pad2>" else {})
    other.save_pretrained(folder / "two")
    with_template(folder / "merged", CHAT)
    write_rows(folder / "two.jsonl", [row] * 30)
    screen = " ".join(planned(folder).split())
    assert doubt in screen and ("splits texts" in screen) == bool(doubt)
    assert "<pad2>" not in screen


def test_an_end_token_and_a_folder_without_a_tokenizer_are_no_doubt(folder):
    word_tokenizer(ends=True).save_pretrained(folder / "one")
    for file in (folder / "two").glob("*token*"):
        file.unlink()
    assert "splits texts" not in planned(folder)


def chats(folder: Path) -> None:
    turns = [{"role": "user", "content": "a b"}, ANSWER]
    for task in TASKS:
        write_rows(folder / f"{task}.jsonl", [{"messages": turns}] * 30)


def test_a_plan_notes_what_strict_refuses(folder):
    chats(folder)
    with_template(folder / "merged", CHAT)
    with_template(folder / "two", CHAT.replace("[0]", ""))
    saved(folder / "one", post_processor=BEGIN)
    screen = " ".join(planned(folder).split())
    assert f"--expert one={folder / 'one'} has a tokenizer that splits texts differently" in screen
    assert (
        f"--expert two={folder / 'two'} has a different chat template from --tokenizer " in screen
    )
    assert "renders 'user a assistant b ' instead of 'u a a b '. Choose one with --chat" in screen
    for template in (CHAT + "{# the same #}", "{{ raise_exception('never') }}"):
        with_template(folder / "two", template)
        assert "a different chat template" not in planned(folder)
    (folder / "mine.jinja").write_text(CHAT)
    chosen = planned(folder, "--chat-template", str(folder / "mine.jinja"))
    assert "a different chat template" not in chosen
    line = error_of(*words(folder, "--strict", "--set", "samples_per_task=4"))
    assert line.startswith("--strict: --data one and --data two are the same data; --expert one=")


def test_copies_are_in_doubt(folder):
    """Copies of files have other names and times, and are found by their content."""
    shutil.rmtree(folder / "two")
    shutil.copytree(folder / "one", folder / "two")
    shutil.copy(folder / "one.jsonl", folder / "two.jsonl")
    line = error_of(*words(folder, "--strict"))
    models = "--expert one and --expert two are the same model"
    assert line.startswith(f"--strict: {models}; --data one and --data two are the same data")
    assert models in planned(folder)
