"""Experts whose tokenizers or chat templates read texts otherwise, and copies, are in doubt."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from made_folders import CHAT, words, write_rows
from reports import error_of, featcal
from tiny_texts import TASKS, word_tokenizer

from fusion_bench_featcal.data.text_formats import Text
from fusion_bench_featcal.folders.tokenizers import doubts_on_chats, doubts_on_tokens
from fusion_bench_featcal.models.processors import load_tokenizers

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
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


@pytest.mark.parametrize(
    ("changes", "doubt"),
    [
        ({}, ""),
        ({"padding": None, "truncation": None}, ""),
        ({"post_processor": BEGIN}, "it makes '<pad>' where "),
        ({"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": ""}}, "of '"),
    ],
)
def test_other_tokens_of_a_text_are_in_doubt(tmp_path, changes, doubt):
    others = load_tokenizers(word_tokenizer(), "here", {"--expert a=x": saved(tmp_path, **changes)})
    doubts = doubts_on_tokens(word_tokenizer(), "--tokenizer merged", others)
    start = "--expert a=x has a tokenizer that splits texts otherwise than --tokenizer merged: of '"
    assert [text.startswith(start) and doubt in text for text in doubts] == [True] * bool(doubt)


@pytest.mark.parametrize(
    ("token", "row", "has_doubt"),
    [("<tool>", Text("row 1", "prompt", "a", "c"), True),  # other rows may have the token
     ("<pad2>", Text("row 1", "prompt", "a", "c"), False),  # a token for padding
     ("<pad2>", Text("row 1", "prompt", "a", "<pad2>"), True),
     ("<pad2>", Text("row 1", "chat", [{"role": "user", "content": "b <pad2>"}]), True)],
)  # fmt: skip
def test_tokens_of_an_expert_alone_are_in_doubt(token, row, has_doubt):
    other = word_tokenizer()
    other.add_tokens(["<tool>"] * (token == "<tool>"))
    other.add_special_tokens({"pad_token": "<pad2>"} if token == "<pad2>" else {})
    doubts = doubts_on_tokens(word_tokenizer(), "merged", {"a": other}, {"a": [row]})
    assert [f"makes {token!r} where" in doubt for doubt in doubts] == [True] * has_doubt


def test_an_end_token_and_a_folder_without_a_tokenizer_are_no_doubt(tmp_path):
    ending = word_tokenizer(ends=True)
    ending.save_pretrained(tmp_path / "a")
    others = load_tokenizers(word_tokenizer(), "here", {"a": tmp_path / "a", "b": tmp_path})
    assert not doubts_on_tokens(word_tokenizer(), "here", others)


def test_other_chat_templates_are_in_doubt():
    here, there = word_tokenizer(), word_tokenizer()
    here.chat_template, there.chat_template = CHAT, CHAT.replace("[0]", "")
    (doubt,) = doubts_on_chats(here, "--tokenizer merged", {"--expert a=x": there})
    assert doubt.startswith("--expert a=x has another chat template than --tokenizer merged, which")
    assert "writes 'u a a b ' where it has 'user a assistant b '. Choose one by --chat" in doubt
    there.chat_template = CHAT + "{# the same #}"
    assert not doubts_on_chats(here, "here", {"a": there})
    there.chat_template = "{{ raise_exception('never') }}"
    assert not doubts_on_chats(here, "here", {"a": there})


def chats(folder: Path) -> None:
    turns = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
    for task in TASKS:
        write_rows(folder / f"{task}.jsonl", [{"messages": turns}] * 30)


def test_a_plan_notes_what_strict_refuses(folder):
    chats(folder)
    for name, template in (("merged", CHAT), ("two", CHAT.replace("[0]", ""))):
        tokenizer = word_tokenizer()
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder / name)
    saved(folder / "one", post_processor=BEGIN)
    done = featcal(*words(folder, "--plan"))
    assert done.code == 0, done.err
    assert f"--expert one={folder / 'one'} has a tokenizer that splits texts otherwise" in done.out
    assert f"--expert two={folder / 'two'} has another chat template than" in done.out
    (folder / "mine.jinja").write_text(CHAT)
    chosen = featcal(*words(folder, "--plan", "--chat-template", str(folder / "mine.jinja")))
    assert chosen.code == 0 and "another chat template" not in chosen.out
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
    assert models in featcal(*words(folder, "--plan")).out
