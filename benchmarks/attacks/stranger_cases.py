"""Attacks by names and by code in strangers' files, through pools and `featcal calibrate`."""

import sys
from pathlib import Path
from typing import Any

import attacks.paths  # noqa: F401

# isort: split
from made_folders import llama_folders
from model_names import UNUSABLE_NAMES
from test_code_beside_models import CONFIG, TOKENIZER, plant
from tiny_texts import TASKS

from attacks.files import shown
from attacks.judging import REFUSED, ShownRefusal, case, expect
from attacks.worlds import World


def _calibrate(folder: Path, **names: str) -> None:
    """Run `featcal calibrate` on tiny Llamas, with other names for some tasks."""
    words = [str(folder / "merged"), "--base", str(folder / "base"), "--out", str(folder / "out")]
    for task in TASKS:
        name = names.get(task, task)
        words += ["--expert", f"{name}={folder / task}", "--data", f"{name}={folder / task}.jsonl"]
    shown("calibrate", *words, "--set", "samples_per_task=4")


for _name in UNUSABLE_NAMES:

    @case(f"strangers: a pool's task {_name[:20]!r}", r"modelpool\.models: ", must=REFUSED)
    def _(folder: Path, name: str = _name) -> None:
        world = World(folder)
        world.modelpool["models"][name] = world.modelpool["models"].pop("one")
        world.run()

    @case(f"strangers: featcal calibrate with a task {_name[:20]!r}", "--expert: ", must=REFUSED)
    def _(folder: Path, name: str = _name) -> None:
        llama_folders(folder)
        _calibrate(folder, one=name)


_CODE: dict[tuple[str, str], Any] = {
    ("merged", "config.json"): CONFIG,
    ("merged", "tokenizer_config.json"): TOKENIZER,
    ("two", "tokenizer_config.json"): TOKENIZER,
    ("two", "custom_generate/generate.py"): None,
}
for (_model, _file), _content in _CODE.items():

    @case(f"strangers: code of {_model}'s {_file}", rf"/{_model}\b", must=REFUSED)
    def _(folder: Path, model: str = _model, file: str = _file, content: Any = _content) -> None:
        llama_folders(folder)
        plant(folder / model, file, content)
        (folder / "answers").write_text("y\n" * 9)
        stdin = sys.stdin
        try:
            with (folder / "answers").open() as sys.stdin:
                _calibrate(folder)
        except ShownRefusal:
            expect(not (folder / "ran").exists(), "the code ran")
            raise
        finally:
            sys.stdin = stdin
