"""Folders of models, finished runs of `featcal calibrate` that several tests inspect, refusals."""

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import made_folders as makers
import pytest
from made_folders import PAPER, ROWS, words, write_rows
from reports import error_of, featcal
from tiny_texts import TASKS, llama_model, sentences, t5_model

from fusion_bench_featcal import results

MAKERS: dict[str, Callable[[Path], Any]] = {
    "llama": lambda folder: makers.language_folders(folder, llama_model()),
    "t5": lambda folder: makers.language_folders(folder, t5_model(), ends=True),
    "bert": makers.classifier_folders,
    "vit": makers.image_classifier_folders,
    "clip": makers.clip_folders,
}


@dataclass(frozen=True)
class Run:
    """A finished run: the folder of its models and data, the models, and the text it printed."""

    folder: Path
    models: dict[str, Any]
    screen: str

    @property
    def out(self) -> Path:
        return self.folder / "out"

    @property
    def report(self) -> results.Run:
        return results.read_run(self.out / "featcal")


def llama(folder: Path) -> list[str]:
    """All rows that are not held out are requested. Columns have other names, data a split."""
    one, two = (sentences(task, ROWS) for task in TASKS)
    rows = [{"q": row["prompt"], "a": row["target"], "prompt": "id"} for row in one]
    write_rows(folder / "one.jsonl", rows)
    table = datasets.Dataset.from_list([{"ask": r["prompt"], "a": r["target"]} for r in two])
    datasets.DatasetDict({"fit": table, "more": table}).save_to_disk(folder / "saved")
    more = ("--columns", "prompt=q,target=a", "--columns", "two:prompt=ask")
    more += ("--set", f"samples_per_task={ROWS}")
    return words(folder, *PAPER, *more, data=("one.jsonl", "saved:fit"))


def lora(folder: Path) -> list[str]:
    makers.write_adapters(folder, llama_model())
    (folder / "chat.jinja").write_text(makers.CHAT)
    more = ("--merge", "simple_average", "--chat-template", "chat.jinja")
    return words(folder, *more, *PAPER, merged=None, experts=("one-lora", "two-lora"))


def missing_targets(folder: Path) -> list[str]:
    write_rows(
        folder / "one.jsonl", [{"prompt": r["prompt"], "id": "a"} for r in sentences("one", ROWS)]
    )
    return words(folder, *PAPER, "--set", "generated_tokens=3")


def images(folder: Path) -> list[str]:
    return words(folder, *PAPER, data="{}-images")


# Run -> models, and the arguments that it has after a change of their folder.
RUNS: dict[str, tuple[str, Callable[[Path], list[str]]]] = {
    "llama": ("llama", llama), "lora": ("llama", lora), "t5": ("t5", missing_targets),
    "bert": ("bert", words), "vit": ("vit", images), "clip": ("clip", images),
}  # fmt: skip


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict[str, Any]]]:
    """Folders of models by kind, which no test changes, and the models."""

    def make(kind: str) -> tuple[Path, dict[str, Any]]:
        folder = tmp_path_factory.mktemp(kind)
        return folder, MAKERS[kind](folder)

    return cache(make)


@pytest.fixture
def copied(made: Any, tmp_path: Path) -> Callable[[str], Path]:
    """Folders of models by kind, which a test may change."""
    return lambda kind: shutil.copytree(made(kind)[0], tmp_path / kind, dirs_exist_ok=True)


@pytest.fixture
def folder(copied: Any) -> Path:
    """Llamas and their texts, which a test may change."""
    return copied("llama")


@pytest.fixture(scope="session")
def finished(made: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """Runs by name, each executed for the first test that needs it."""

    def run(name: str) -> Run:
        kind, prepare = RUNS[name]
        source, models = made(kind)
        folder = shutil.copytree(source, tmp_path_factory.mktemp("run") / name)
        arguments = prepare(folder)
        with contextlib.chdir(folder):
            done = featcal(*arguments)
        assert done.code == 0, done.err
        return Run(folder, models, done.out)

    return cache(run)


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], str]:
    """The one line that a command prints on stderr, without a loaded model or a new file."""

    def refused(arguments: list[str]) -> str:
        folder = Path(arguments[arguments.index("--out") + 1]).parent
        before = sorted(folder.iterdir())
        message = error_of(*arguments)
        assert sorted(folder.iterdir()) == before and "a model was loaded" not in message
        return message

    makers.forbid_loading(monkeypatch)
    return refused
