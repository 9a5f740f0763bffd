"""A panic of tokenizers, which is no Exception, is an error with its place."""

import asyncio
import json
from pathlib import Path

import pytest
from made_folders import words
from reports import error_of

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.errors.place import error_context

CHARSMAP = {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}  # an empty table


def test_a_panic_names_the_row_and_has_no_traceback(folder: Path) -> None:
    for file in folder.glob("*/tokenizer.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"normalizer": CHARSMAP}))
    message = error_of(*words(folder))
    assert "one.jsonl" in message and "PanicException: index out of bounds" in message
    assert not (folder / "out").exists()


class PanicException(BaseException):
    """As the class of tokenizers, which has no importable name."""


ENDS = [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError]


@pytest.mark.parametrize("kind", [*ENDS, PanicException])
def test_panics_get_a_place_and_ends_of_programs_and_tasks_pass(kind: type[BaseException]) -> None:
    expected = CalibrationError if kind is PanicException else kind
    with pytest.raises(expected) as caught, error_context("--data one=a.csv", task="one"):
        raise kind("index out of bounds")
    if kind is PanicException:
        reason = "a library has failed (PanicException: index out of bounds)"
        assert str(caught.value) == f"--data one=a.csv, task one: {reason}"
