"""A misspelt name is refused before torch and transformers are imported, which takes seconds."""

import subprocess
import sys
from pathlib import Path

import pytest
from made_folders import write_rows

from fusion_bench_featcal.files import can_be_hub_id
from fusion_bench_featcal.models.hub import hub_error

CODE = """
import sys
from fusion_bench_featcal.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as error:
    code = error.code
print(code, *{"torch", "transformers", "datasets", "sentence_transformers"} & set(sys.modules))
"""
MISTAKES = {
    "--bse x": "no option --bse (nearest: '--base')",
    "--set sampels_per_task=8": "sampels_per_task is unknown (nearest: 'samples_per_task')",
    "--set samples_per_task=0": "--set samples_per_task must be an integer >= 1, got 0",
    "--merge simple_averge": "leave one of them out",
    "--data twoo=two.jsonl": "--data: expert twoo is unknown (nearest: 'two')",
    "--data two=./tow.jsonl": "--data two=./tow.jsonl: there is no such file or folder here",
    "--eval two=tow.jsonl": "--eval two=tow.jsonl: there is no such file or folder here",
    "--base ./bse": "--base ./bse: there is no such file or folder here",
    "--base bse": "--base bse (nearest: 'base'): there is no such file or folder here. HF_HUB_OFF",
    "--tokenizer ./there": "--tokenizer ./there: there is no such file or folder here",
    "--tokenizer bse": "--tokenizer bse (nearest: 'base'): there is no such file or folder here",
    "--chat-template chat": "--chat-template chat: there is no such file here",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_costs_no_import(tmp_path: Path, mistake):
    for name in ("merged", "base", "one", "two"):
        (tmp_path / name).mkdir()
    for task in ("one", "two"):
        write_rows(tmp_path / f"{task}.jsonl", [{"text": "a"}])
    usual = "calibrate merged --base base --expert one=one --expert two=two --out out"
    usual += " --data one=one.jsonl"
    if not mistake.startswith("--data two="):  # a name given twice is another mistake
        usual += " --data two=two.jsonl"
    command = [sys.executable, "-c", CODE, *usual.split(), *mistake.split()]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, check=True)
    assert MISTAKES[mistake] in done.stderr and "download resumes" not in done.stderr
    assert done.stdout.split() == ["2"], done.stderr


@pytest.mark.parametrize("is_lookup", [False, True])
def test_only_a_download_resumes(is_lookup):
    error = hub_error(TimeoutError(), "--base org/model", is_lookup=is_lookup)
    assert str(error).endswith("run the command again") == is_lookup
    assert str(error).endswith("The download resumes") != is_lookup


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
