"""`featcal calibrate` refuses files and options that cannot work, in one line, and loads nothing.

Files may be by anyone: they are read in bounded time, or refused with their name and the reason.
"""

import json
import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from made_folders import classifier_folders, datasets_on_disk, words, write_rows
from reports import featcal
from tiny_models import model_of
from tiny_texts import WORDS, llama_model, sentences, word_tokenizer, write

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.folders import calibrate_folder

MERGE_CONFIG = "merged/mergekit_config.yml"
TOKENIZER = "merged/tokenizer_config.json"
NESTED = "[" * 5000 + "]" * 5000  # deeper than Python's parsers go
NO_MODELS: dict[str, Any] = {"base": None, "experts": ()}


def change(folder: Path, files: Mapping[str, Any]) -> None:
    """Change files of a folder, which are named by patterns.

    The value is a file's new text, its rows, repeated to 24, or changes of its JSON. Without a
    value the file or folder is removed. A function is called with the path.
    """
    for pattern, value in files.items():
        for path in [*folder.glob(pattern)] or [folder / pattern]:
            if callable(value):
                value(path)
            elif isinstance(value, str):
                path.parent.mkdir(exist_ok=True)
                path.write_text(value)
            elif isinstance(value, list):
                write_rows(path, [value[n % len(value)] for n in range(24)])
            elif isinstance(value, dict):
                path.write_text(json.dumps(json.loads(path.read_text()) | value))
            elif path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def merge_config(method: str, *experts: Any, **more: Any) -> dict[str, str]:
    """A mergekit config beside the merged model."""
    content = {"merge_method": method, "models": [{"model": name} for name in experts]}
    return {MERGE_CONFIG: json.dumps(content | more)}


def other_llama(path: Path) -> None:
    write(llama_model(9), path, word_tokenizer())


def wider_llama(path: Path) -> None:
    write(model_of(vocab_size=len(WORDS), hidden_size=16), path, word_tokenizer())


def other_words(path: Path) -> None:
    word_tokenizer(words=(*WORDS[:3], WORDS[4], WORDS[3], *WORDS[5:])).save_pretrained(path)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def arguments(folder: Path, options: Mapping[str, Any]) -> list[str]:
    more = shlex.split(options.get("more", ""))
    return words(folder, *more, **{key: v for key, v in options.items() if key != "more"})


# --- options, of models and data that fit ---

OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"more": "--set ridge_lamda=1"}, "nearest: 'ridge_lambda'"),
    ({"more": "--merge simple_average"}, "merged already, and --merge merges: leave one of"),
    ({"more": "--base ./nowhere"}, "--base ./nowhere: there is no such file or folder here"),
    ({"more": "--data thwo=x.jsonl"}, "--data: expert thwo is unknown (nearest: 'two')"),
    ({"merged": None}, "give MERGED, the merged model's folder, or --merge HOW"),
    ({"more": "--merge task_arithmetik:1", "merged": None}, "got 'task_arithmetik:1'"),
    ({"data": ["one.jsonl"]}, "no data of two"),
    (
        {"more": "--merge simple_average --set expert_read_budget=50%", "merged": None},
        "--merge reads all of each expert: leave expert_read_budget out",
    ),
    ({"more": "--set resume=true"}, "--set resume is unknown"),
    (NO_MODELS, "has no mergekit_config.yml: give --base"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS)
def test_options(models, refusal, monkeypatch, options, message):
    monkeypatch.chdir(models)
    assert message in refusal(arguments(models, options))


def test_keys_of_recipes_and_of_python(tmp_path, refusal):
    (tmp_path / "mine.yaml").write_text("bases: base")
    line = refusal(
        ["calibrate", "--config", str(tmp_path / "mine.yaml"), "--out", str(tmp_path / "out")]
    )
    assert "mine.yaml: bases is unknown (nearest: 'base')" in line
    with pytest.raises(ValueError, match=r"calibrate_folder: bse is unknown \(nearest: 'base'"):
        calibrate_folder("merged", bse="base")


def test_messages_in_python_name_the_commands_options(models, tmp_path):
    files: dict[str, Any] = {task: models / f"{task}.jsonl" for task in ("one", "two")}
    options = {"expert": {task: models / task for task in files}, "data": files}
    options |= {"base": models / "base", "out": tmp_path / "out"}
    for settings, message in (
        ({"modules": ["nothing"]}, r"^--set modules: 'nothing' matches no module"),
        ({"samples_per_task": 0}, r"^--set samples_per_task must be"),
    ):
        with pytest.raises((ValueError, CalibrationError), match=message):
            calibrate_folder(models / "merged", **options, set=settings)
    assert not (tmp_path / "out").exists()


# --- files of a Llama that are changed ---

Refused = tuple[dict[str, Any], dict[str, Any], list[str]]
MODELS: list[Refused] = [
    ({"two": wider_llama}, {}, ["expert 'two'", "--expert two"]),
    ({"two": other_words}, {}, ["has another tokenizer", "2 of 23 tokens differ"]),
    ({"*/*token*": None}, {}, ["no tokenizer in ", "/merged: name its folder by --tokenizer"]),
    ({"out.blocks/one": ""}, {}, ["go on with --resume, or remove it"]),
    ({"two": None}, {}, ["--expert two=", "/two: there is no such file or folder here"]),
    ({"two/config.json": pipe}, {}, ["/two/config.json is not a regular file"]),
    ({"merged/config.json": f'{{"a": {NESTED}}}'}, {}, ["/merged"]),
]  # fmt: skip

CONFIGS = {
    f"#{'x' * 2**20}\nmodels: [x]": "is larger than 1,024 KiB",
    "models: !!python/name:os.system ''": "line 1: could not determine a constructor",
    "models: 5": "models is 5, not a list",
}
MERGE_CONFIGS: list[Refused] = [
    *[({MERGE_CONFIG: text}, NO_MODELS, [MERGE_CONFIG, message])
      for text, message in CONFIGS.items()],
    (merge_config("slerp", "one", "two", base_model="one"), NO_MODELS | {"more": "--preset paper"},
     ["--base is missing", "--set anchor_rho=1"]),
]  # fmt: skip

TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
TEMPLATES = {
    "{% for i in range(9999999) %}{% endfor %}": "Range too big",
    "{{ messages.__class__.__mro__ }}": "access to attribute '__class__'",
}
ROW = ["--data one", "one.jsonl, line "]
QUESTIONS = {"one.jsonl": [{"q": "a b", "a": "c"}]}
DATA: list[Refused] = [
    ({"two.jsonl": None}, {}, ["--data two=", "there is no such file or folder here"]),
    ({"two.jsonl": ""}, {}, ["two.jsonl' is empty"]),
    ({"one.jsonl": '{"prompt": "a"\nnonsense'}, {},
     ["--data one=", "one.jsonl' is not readable as jsonl: line 1: "]),
    ({"one.jsonl": [{"prompt": None, "id": 1}]}, {},
     ["one.jsonl, line 1: a text is a row with prompt (and target), with messages"]),
    ({"one.jsonl": [{"messages": TURNS[:1]}]}, {}, [*ROW, "--chat-template FILE"]),
    ({"one.jsonl": [*sentences("one", 11), {"prompt": "a b"}]}, {"more": "--no-eval"},
     [*ROW, "no target, as in 1 of 12 rows"]),
    *[(QUESTIONS, {"more": more}, [f"one.jsonl has the columns q, a{wrong}: name them by "
                                   "--columns [NAME:]prompt=COLUMN,target=COLUMN"])
      for more, wrong in (("", ""), ("--columns prompt=Q", ", so prompt=Q is wrong"))],
    ({"saved": lambda path: datasets_on_disk(path, "fit", "more")},
     {"data": ["saved:tests", "two.jsonl"]}, ["has no split 'tests'"]),
    *[({"*.jsonl": [{"messages": TURNS}], TOKENIZER: {"chat_template": template}}, {},
       [*ROW, "the tokenizer's chat template cannot be used: ", message])
      for template, message in TEMPLATES.items()],
]  # fmt: skip


@pytest.mark.parametrize(("files", "options", "messages"), [*MODELS, *MERGE_CONFIGS, *DATA])
def test_files_of_language_models(folder, refusal, monkeypatch, files, options, messages):
    monkeypatch.chdir(folder)
    change(folder, files)
    line = refusal(arguments(folder, options))
    assert all(message in line for message in messages), line
    assert len(line) < 600


# --- files of classifiers that are changed ---


def test_labels_that_do_not_fit_the_head(tmp_path, refusal):
    classifier_folders(tmp_path)
    change(tmp_path, {"one.jsonl": [{"text": "a b", "label": "perhaps"}]})
    line = refusal(words(tmp_path))
    assert "--data one=" in line
    assert "label 'perhaps' is none of the 2 classes of the expert's head: no, yes" in line


# --- files that pass all checks ---

ACCEPTED: list[Refused] = [
    ({"two": other_llama}, {}, ["expert two may not be tuned from this base"]),
    (merge_config("linear", "base", "one", "two", base_model="base"), NO_MODELS,
     ["by mergekit_config.yml (linear)"]),
    ({"merged/*token*": None, "base/*token*": None} | merge_config("linear", "one", "two"),
     NO_MODELS, []),
]  # fmt: skip


def planned(arguments: list[str]) -> str:
    """The text that a command prints with `--plan`, once all checks have passed."""
    done = featcal(*arguments, "--plan")
    assert done.code == 0 and "nothing was run" in done.out, done.err
    return done.out


@pytest.mark.parametrize(("files", "options", "messages"), ACCEPTED)
def test_files_that_pass_all_checks(folder, monkeypatch, files, options, messages):
    monkeypatch.chdir(folder)
    change(folder, files)
    screen = planned(arguments(folder, options))
    assert "read from experts" in screen and not (folder / "out").exists()
    assert all(message in screen for message in messages), screen
