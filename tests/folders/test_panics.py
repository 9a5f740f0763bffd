"""A panic of tokenizers, which is no Exception, is an error with its place."""

import json
from pathlib import Path

import pytest
from made_folders import words
from reports import error_of

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.errors.place import at

CHARSMAP = {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}  # an empty table


def test_a_panic_names_the_row_and_has_no_traceback(folder: Path) -> None:
    for file in folder.glob("*/tokenizer.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"normalizer": CHARSMAP}))
    message = error_of(*words(folder))
    assert "one.jsonl" in message and "PanicException: index out of bounds" in message
    assert not (folder / "out").exists()


class Panic(BaseException):
    pass


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit, Panic])
def test_all_but_the_end_of_a_program_gets_a_place(kind: type[BaseException]) -> None:
    expected = CalibrationError if kind is Panic else kind
    with pytest.raises(expected) as caught, at("--data one=a.csv", task="one"):
        raise kind("index out of bounds")
    if kind is Panic:
        assert str(caught.value) == (
            "--data one=a.csv, task one: a library has failed (Panic: index out of bounds)"
        )
