"""Attacks on `featcal calibrate`: models that are not there, a disk that is full, and kills."""

import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import attacks.paths  # noqa: F401

# isort: split
from made_folders import llama_folders
from process_group import in_forks
from test_calibrate_saving import largest_file, words

from attacks.files import shown
from attacks.judging import REFUSED, RIGHT, case, expect

PAPER = ("--preset", "paper", "--no-eval")


def _calibrated(arguments: Sequence[str]) -> str:
    with mock.patch.object(sys, "argv", ["featcal", *arguments]):
        return shown(*arguments)


@case("calibrate: no such merged model", "MERGED", "no such folder", must=REFUSED,
      never=("name the experts",))  # fmt: skip
def _(folder: Path) -> None:
    shown("calibrate", str(folder / "merged"), "--out", str(folder / "out"))


@case("calibrate: a full disk", "--out", "MB are free", "--resume", must=REFUSED)
def _(folder: Path) -> None:
    llama_folders(folder)
    try:
        with largest_file((folder / "merged" / "model.safetensors").stat().st_size - 1):
            _calibrated(words(folder, *PAPER))
    finally:
        expect(not (folder / "out").exists(), "half of a model is left")
        expect(not list(folder.glob(".out*")), "a temporary folder is left")
        expect(any((folder / "out.blocks").iterdir()), "the finished blocks are gone")


for _more in ((), ("--resume",)):

    @case(f"calibrate: killed after saving, then the same command {' '.join(_more)}", must=RIGHT)
    def _(folder: Path, more: Sequence[str] = _more) -> None:
        llama_folders(folder)

        def killed(_: int) -> None:
            remove = shutil.rmtree

            def removed(path: Any, **options: Any) -> None:
                if str(path).endswith(".blocks"):
                    os.kill(os.getpid(), signal.SIGKILL)
                remove(path, **options)

            with mock.patch.object(shutil, "rmtree", removed):
                _calibrated(words(folder, *PAPER))

        expect(in_forks(1, killed) == [-signal.SIGKILL], "the run was not killed")
        _calibrated(words(folder, *PAPER, *more))
        expect((folder / "out" / "model.safetensors").is_file(), "there is no model")
        expect(not (folder / "out.blocks").exists(), "blocks of a finished run are left")
