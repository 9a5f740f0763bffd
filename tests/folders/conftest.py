"""Finished runs of `featcal calibrate`, which several tests inspect, and its refusals."""

import contextlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import made_folders as makers
import pytest
import transformers
from made_folders import PAPER, ROWS, words, write_rows
from reports import error_of, featcal
from tiny_texts import TASKS, sentences

from fusion_bench_featcal import results

TEMPLATE = "{{ messages[0]['content'] }}"


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

    @property
    def notes(self) -> list[str]:
        return [note.text for note in self.report.notes]


def llama(folder: Path, _: Any) -> list[str]:
    """All rows that are not held out are requested. Their columns and splits have other names."""
    file = folder / "merged" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"padding_side": "left"}))
    one, two = (sentences(task, ROWS) for task in TASKS)
    rows = [{"q": row["prompt"], "a": row["target"], "prompt": "id"} for row in one]
    write_rows(folder / "one.jsonl", rows)
    rows = [{"ask": row["prompt"], "a": row["target"]} for row in two]
    makers.datasets_on_disk(folder / "saved", "fit", "more", rows=rows)
    more = ("--columns", "prompt=q,target=a", "--columns", "two:prompt=ask")
    more += ("--set", f"samples_per_task={ROWS}")
    return words(folder, *PAPER, *more, data=("one.jsonl", "saved:fit"))


def lora_experts(folder: Path, models: Any) -> list[str]:
    makers.write_adapters(folder, models["base"])
    (folder / "chat.jinja").write_text(TEMPLATE)
    more = ("--merge", "simple_average", "--chat-template", "chat.jinja")
    return words(folder, *more, *PAPER, merged=None, experts=("one-lora", "two-lora"))


def missing_targets(folder: Path, _: Any) -> list[str]:
    rows = [{"prompt": row["prompt"]} for row in sentences("one", ROWS)]
    write_rows(folder / "one.jsonl", rows)
    return words(folder, *PAPER, "--set", "generated_tokens=3")


def image_table(folder: Path, _: Any) -> list[str]:
    """One task's images in a table, the other's in folders of classes."""
    files = sorted((folder / "one-images").rglob("*.png"))
    rows = [{"picture": str(file), "shape": file.parent.name} for file in files]
    write_rows(folder / "one.jsonl", rows)
    columns = ("--columns", "one:image=picture,label=shape")
    return words(folder, *PAPER, *columns, data=("one.jsonl", "two-images"))


RUNS: dict[str, tuple[Callable[[Path], Any], Callable[[Path, Any], list[str]]]] = {
    "llama": (makers.llama_folders, llama),
    "lora": (makers.llama_folders, lora_experts),
    "t5": (makers.t5_folders, missing_targets),
    "bert": (makers.classifier_folders, lambda folder, _: words(folder)),
    "vit": (makers.image_classifier_folders, image_table),
    "clip": (makers.clip_folders, lambda folder, _: words(folder, *PAPER, data="{}-images")),
}


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """Runs by name, each executed for the first test that needs it."""

    @cache
    def run(name: str) -> Run:
        make, prepare = RUNS[name]
        folder = tmp_path_factory.mktemp(name)
        models = make(folder)
        arguments = prepare(folder, models)
        with contextlib.chdir(folder):
            done = featcal(*arguments)
        assert done.code == 0, done.err
        return Run(folder, models, done.out)

    return run


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llamas and their texts, which no test changes."""
    folder = tmp_path_factory.mktemp("models")
    makers.llama_folders(folder)
    return folder


@pytest.fixture
def folder(models: Path, tmp_path: Path) -> Path:
    """Llamas and their texts, which a test may change."""
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], str]:
    """The one line that a command prints on stderr, without a loaded model or a new file."""

    def loaded(*_: Any, **__: Any) -> Any:
        raise AssertionError("a model was loaded")

    def refused(arguments: list[str]) -> str:
        folder = Path(arguments[arguments.index("--out") + 1]).parent
        before = sorted(folder.iterdir())
        message = error_of(*arguments)
        assert sorted(folder.iterdir()) == before and "a model was loaded" not in message
        return message

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", loaded)
    return refused
