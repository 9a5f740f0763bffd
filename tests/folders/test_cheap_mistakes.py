"""A misspelt name is refused before torch and transformers are imported, which takes seconds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from made_folders import write_rows

from fusion_bench_featcal.files import can_be_hub_id

CODE = """
import contextlib, io, json, sys
from fusion_bench_featcal.cli import main
for words in json.load(sys.stdin):
    with contextlib.redirect_stderr(io.StringIO()) as screen:
        try:
            code = main(words)
        except SystemExit as error:
            code = error.code
    slow = {"torch", "transformers", "datasets", "sentence_transformers"} & set(sys.modules)
    print(json.dumps([code, screen.getvalue(), *slow]))
"""
MISTAKES = {
    "--bse x": "no option --bse (nearest: '--base')",
    "--set sampels_per_task=8": "sampels_per_task is unknown (nearest: 'samples_per_task')",
    "--set samples_per_task=0": "--set samples_per_task must be an integer >= 1, got 0",
    "--merge simple_averge": "already merged, but --merge makes a new merge: leave one of them out",
    "--data twoo=two.jsonl": "--data: expert twoo is unknown (nearest: 'two')",
    "--data two=./tow.jsonl": "--data two=./tow.jsonl: there is no such file or folder here",
    "--eval two=tow.jsonl": "--eval two=tow.jsonl: there is no such file or folder here",
    "--base ./bse": "--base ./bse: there is no such file or folder here",
    "--base bse": "--base bse (nearest: 'base'): there is no such file or folder here. HF_HUB_OFF",
    "--tokenizer ./there": "--tokenizer ./there: there is no such file or folder here",
    "--tokenizer bse": "--tokenizer bse (nearest: 'base'): there is no such file or folder here",
    "--chat-template chat": "--chat-template chat: there is no such file here",
}


def test_mistakes_cost_no_import(tmp_path: Path):
    for name in ("merged", "base", "one", "two"):
        (tmp_path / name).mkdir()
    for task in ("one", "two"):
        write_rows(tmp_path / f"{task}.jsonl", [{"text": "a"}])
    usual = "calibrate merged --base base --expert one=one --expert two=two --out out"
    usual += " --data one=one.jsonl"
    two = " --data two=two.jsonl "  # a name given twice is another mistake
    lines = [usual + (" " if m.startswith("--data two=") else two) + m for m in MISTAKES]
    words, command = json.dumps([line.split() for line in lines]), [sys.executable, "-c", CODE]
    done = subprocess.run(command, cwd=tmp_path, input=words, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    for message, result in zip(MISTAKES.values(), done.stdout.splitlines(), strict=True):
        code, screen, *slow = json.loads(result)
        assert message in screen and "download resumes" not in screen
        assert (code, slow) == (2, []), screen


@pytest.mark.parametrize(
    ("location", "is_id"),
    [
        ("name", True), ("who/what-1.5", True), ("who/what@v1", True), ("w/w@refs/pr/1", True),
        ("../x", False), ("./x", False), (".x", False), ("/a/b", False), ("~/x", False),
        ("a/b/c", False), ("a/../b", False), ("my models/x", False), ("who/x.CSV", False),
    ],
)  # fmt: skip
def test_names_with_at_most_one_owner_can_be_hub_ids(location: str, is_id: bool):
    assert can_be_hub_id(location) == is_id
