"""Files that others wrote are read in bounded time, or refused with their name and the reason."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_folders import CHAT, llama_folders, write_rows
from test_calibrate_command import words
from test_refusals import refusal
from tiny_texts import TASKS, sentences

from fusion_bench_featcal.cli import main
from fusion_bench_featcal.data.images import load_images
from fusion_bench_featcal.data.tables import load_texts
from fusion_bench_featcal.folders.model_folder import ModelFolder
from fusion_bench_featcal.results import Report, ReportError
from fusion_bench_featcal.tasks.text_rows import load_chats, load_glue

SECONDS = 30
RECIPE, CONFIG = "merged/mergekit_config.yml", "merged/config.json"
NESTED = "[" * 5000 + "]" * 5000
AVERAGE = {"_target_": "fusion_bench.method.SimpleAverageAlgorithm"}


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stop a test that does not end; loading a model whole is an error."""

    def stop(*_: object) -> None:
        raise AssertionError(f"no end after {SECONDS} s")

    def load(self: ModelFolder, kind: Any = None) -> None:
        raise AssertionError(f"{self.option} was loaded")

    monkeypatch.setattr(ModelFolder, "load", load)
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Models and texts whose files may be replaced."""
    llama_folders(tmp_path)
    return tmp_path


def replace(file: Path, content: str) -> None:
    file.unlink(missing_ok=True)
    file.write_text(content)


def bomb() -> str:
    """Return nine lists of nine aliases each: 9**9 values."""
    lists = [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 10)]
    return "\n".join(["l0: &l0 [x]", *lists, "models: *l9", ""])


RECIPES = [
    (bomb(), "line 2: has the alias *l0"),
    ("models: &a [*a]", "line 1: has the alias *a"),
    (f"#{'x' * 2**20}\nmodels: [x]", "is larger than 1,024 KiB"),
    (f"models: {NESTED}", "RecursionError"),
    ("models: [a", "line 1: expected ',' or ']'"),
    ("models: !!python/name:os.system ''", "line 1: could not determine a constructor"),
    ("models: !!bool x", "KeyError('x')"),
    ("models: 5", "models is 5, not a list"),
    ("models: abc", "models is 'abc', not a list"),
    ("models: {a: b}", "models is {'a': 'b'}, not a list"),
    ("slices: 3", "slices is 3, not a list"),
    ("slices: [5]", "a slice or module is 5, not a mapping"),
    ("slices: [{sources: x}]", "sources is 'x', not a list"),
    ("modules: [a]", "modules is ['a'], not a mapping"),
    ("modules: {text: 5}", "a slice or module is 5, not a mapping"),
    ("models: [{model: [a]}]", "a model is ['a'], not a folder or hub id"),
    ("models: [{weight: 1}]", "a model is None, not a folder or hub id"),
    ("models: [2024-01-01]", "a model is datetime.date"),
    (f"models: [{'x' * 5000}]", "not a folder or hub id"),
    ("base_model: 5\nmodels: [a]", "a model is 5, not a folder or hub id"),
]


def without_models(folder: Path) -> list[str]:
    """Return the command's words without base and experts, which the merge config then names."""
    named = words(folder)
    options = [n for n, word in enumerate(named) if word in ("--base", "--expert")]
    return [word for n, word in enumerate(named) if n not in options and n - 1 not in options]


@pytest.mark.parametrize(("content", "message"), RECIPES, ids=[m for _, m in RECIPES])
def test_merge_configs(folder, capsys, content, message):
    (folder / RECIPE).write_text(content)
    line = refusal(capsys, without_models(folder))
    assert f"{folder / RECIPE}" in line and message in line and len(line) < 400


@pytest.mark.parametrize("file", [RECIPE, CONFIG, "two/config.json"])
def test_pipes_are_not_waited_for(folder, capsys, file):
    (folder / file).unlink(missing_ok=True)
    os.mkfifo(folder / file)
    arguments = without_models(folder) if file == RECIPE else words(folder)
    assert f"{folder / file} is not a regular file" in refusal(capsys, arguments)


def test_a_report_that_is_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "report.json")
    with pytest.raises(ReportError, match=r"report\.json is not a regular file"):
        Report.load(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize("who", ["merged", "two"])
def test_nested_json(folder, capsys, who, file):
    replace(folder / who / file, f'{{"a": {NESTED}}}')
    assert str(folder / who) in refusal(capsys, words(folder))


@pytest.mark.parametrize("limit", ["abc", [1], 0, True])
def test_limits_of_tokenizers(folder, capsys, limit):
    file = folder / "merged" / "tokenizer_config.json"
    replace(file, json.dumps(json.loads(file.read_text()) | {"model_max_length": limit}))
    line = refusal(capsys, words(folder))
    assert f"model_max_length in tokenizer_config.json) is {limit!r}" in line


# --- tables ---

MAGIC = [("one[1].jsonl", "one1.jsonl"), ("one*.jsonl", "one1.jsonl"), ("[o]/x.jsonl", "o/x.jsonl")]


@pytest.mark.parametrize("option", ["--data", "--eval"])
@pytest.mark.parametrize(("name", "other"), MAGIC)
def test_paths_are_no_patterns(folder, capsys, name, other, option):
    for file, rows in ((name, sentences("one", 30)), (other, [{"prompt": 3}] * 30)):
        (folder / file).parent.mkdir(exist_ok=True)
        write_rows(folder / file, rows)
    named = words(folder)
    if option == "--data":
        named[named.index(f"one={folder / 'one.jsonl'}")] = f"one={folder / name}"
    else:
        named += ["--eval", f"one={folder / name}"]
    main(named)
    assert "AssertionError" in capsys.readouterr().err  # by then all rows have been read


def test_paths_of_pools_are_no_patterns(tmp_path):
    for number, name in enumerate(("x[1].jsonl", "x1.jsonl")):
        write_rows(tmp_path / name, [{"text": name, "image": f"{number}.png"}] * 2)
    (tmp_path / "0.png").touch()
    assert load_texts(str(tmp_path / "x[1].jsonl"))["text"] == ["x[1].jsonl"] * 2
    assert len(load_images(str(tmp_path / "x[1].jsonl"))) == 2
    for name in ("chats[1]", "chats1"):
        (tmp_path / name).mkdir()
        write_rows(tmp_path / name / "train.jsonl", [{"prompt": name, "answer": "b"}])
    with pytest.raises(ValueError, match=r"chats\[1\]'.*rename the folder"):
        load_chats(str(tmp_path / "chats[1]"), "train", prompt="prompt", answer="answer")
    with pytest.raises(ValueError, match=r"chats\[1\]'.*rename the folder"):
        load_glue("cola", "train", str(tmp_path / "chats[1]"))


# --- chat templates ---

TEMPLATES = {
    "{% for i in range(9999999) %}{% endfor %}": "Range too big",
    "{% for": "unexpected 'end of template'",
    "{{ nothing.at.all }}": "'nothing' is undefined",
    "{{ raise_exception('only two turns') }}": "only two turns",
    "{{ 1 / 0 }}": "division by zero",
    "{% include '/etc/passwd' %}": "no loader for this environment",
    "{{ messages.__class__.__mro__ }}": "access to attribute '__class__'",
}


def chats(folder: Path, messages: Any) -> None:
    for task in TASKS:
        (folder / f"{task}.jsonl").unlink()
        write_rows(folder / f"{task}.jsonl", [{"messages": messages}] * 20)


@pytest.mark.parametrize("template", TEMPLATES, ids=list(TEMPLATES.values()))
def test_templates(folder, capsys, template):
    chats(folder, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    file = folder / "merged" / "tokenizer_config.json"
    replace(file, json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    line = refusal(capsys, words(folder))
    assert "--data one=" in line and "item" in line
    assert "the tokenizer's chat template cannot be used: " in line and TEMPLATES[template] in line


@pytest.mark.parametrize("messages", ["abc", [1, 2], [[{"role": "user", "content": "a"}]]])
def test_messages_that_are_no_turns(folder, capsys, messages):
    chats(folder, messages)
    (folder / "t.jinja").write_text(CHAT)
    line = refusal(capsys, [*words(folder), "--chat-template", str(folder / "t.jinja")])
    assert "--data one=" in line and "messages must be a list of turns" in line
