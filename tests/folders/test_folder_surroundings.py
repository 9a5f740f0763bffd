"""No state of torch around a run of folders changes the folder that it writes."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
from made_folders import PAPER, words
from reports import featcal
from surroundings import SURROUNDINGS


@pytest.mark.parametrize("around", ["default dtype float64", "default device meta", "autocast"])
def test_surroundings_change_no_bit(around: str, finished: Any, copied: Any) -> None:
    expected = finished("vit").out
    folder: Path = copied("vit")
    with contextlib.chdir(folder), SURROUNDINGS[around]():
        done = featcal(*words(folder, *PAPER, data="{}-images"))
    assert done.code == 0, done.err
    file = "model.safetensors"
    assert (folder / "out" / file).read_bytes() == (expected / file).read_bytes()
