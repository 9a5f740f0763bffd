"""Attacks by what others wrote: merge configs, model configs, tables, chat templates, labels."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import attacks.paths  # noqa: F401

# isort: split
from made_folders import classifier_folders, llama_folders, write_rows
from test_calibrate_command import words
from test_untrusted_files import without_models
from tiny_texts import TASKS, sentences

from attacks.files import shown
from attacks.judging import REFUSED, RIGHT, RawTraceback, case, expect

SECONDS = 60
RECIPE = "merged/mergekit_config.yml"
LISTS = [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 10)]
LOOP = "{% for i in range(99999) %}"
CHAT = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
# begins the message of an error that is not the package's own
RAW_WORDS = ("error: unexpected",)


def calibrated(folder: Path, *more: str, given: Any = words) -> str:
    """Output of `featcal calibrate` on models and texts of a folder; it must end."""

    def stop(*_: object) -> None:
        raise RawTraceback(f"no end after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        return shown(*given(folder), "--preset", "paper", "--no-eval", *more)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def edit(file: Path, **values: Any) -> None:
    """Set keys of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


for _name, _content in {
    "aliases that multiply": "\n".join(["l0: &l0 [x]", *LISTS, "models: *l9"]),
    "a comment of 100 MB": f"#{'x' * 10**8}\nmodels: [x]",
    "brackets without end": "models: " + "[" * 10**5,
    "a number for models": "models: 5",
    "a list for modules": "modules: [a]",
    "a list for a model": "models: [{model: [a]}]",
    "a model without a name": "models: [{weight: 1}]",
}.items():

    @case(f"reader: merge config with {_name}", "mergekit_config", must=REFUSED, never=RAW_WORDS)
    def _(folder: Path, content: str = _content) -> None:
        llama_folders(folder)
        (folder / RECIPE).write_text(content)
        calibrated(folder, given=without_models)


for _name in (RECIPE, "two/config.json"):

    @case(f"reader: a pipe for {_name}", "not a regular file", must=REFUSED)
    def _(folder: Path, name: str = _name) -> None:
        llama_folders(folder)
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        calibrated(folder, given=without_models if name == RECIPE else words)


for _key, _value in {
    "num_hidden_layers": 10**7,
    "num_attention_heads": 0,
    "num_key_value_heads": 0,
    "vocab_size": 10**15,
    "num_labels": 10**9,
    "architectures": [5],
}.items():

    @case(f"reader: config.json with {_key} {_value}", "merged/config.json", _key, must=REFUSED,
          never=RAW_WORDS)  # fmt: skip
    def _(folder: Path, key: str = _key, value: Any = _value) -> None:
        llama_folders(folder)
        edit(folder / "merged" / "config.json", **{key: value})
        calibrated(folder)


for _name in ("config.json", "tokenizer_config.json", "one.jsonl"):

    @case(f"reader: {_name} of 100,000 brackets", "one|two", must=REFUSED, never=RAW_WORDS)
    def _(folder: Path, name: str = _name) -> None:
        llama_folders(folder)
        file = folder / name if name == "one.jsonl" else folder / "two" / name
        file.write_text(f'{{"text": {"[" * 10**5}{"]" * 10**5}}}\n')
        calibrated(folder)


for _name in ("one[1].jsonl", "one*.jsonl", "[o]/one.jsonl"):

    @case(f"reader: data in {_name} beside a file that fits the pattern", must=RIGHT)
    def _(folder: Path, name: str = _name) -> None:
        llama_folders(folder)
        other = folder / name.replace("[1]", "1").replace("*", "1").replace("[o]", "o")
        for file, rows in ((folder / name, sentences("one", 7)), (other, sentences("one", 9))):
            file.parent.mkdir(exist_ok=True)
            write_rows(file, rows)
        named = [word.replace(f"{folder}/one.jsonl", f"{folder}/{name}") for word in words(folder)]
        text = shown(*named, "--preset", "paper", "--no-eval")
        expect("one: 7 samples" in text, "the rows of another file")


for _name, _template in {
    "a range of 10**12": "{% for i in range(10**12) %}{% endfor %}",
    "loops in loops": f"{LOOP}{LOOP}{{% endfor %}}{{% endfor %}}",
    "a text that doubles": f"{{% set n = namespace(s='x') %}}{LOOP}"
    "{% set n.s = n.s + n.s %}{% endfor %}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "a mistake": "{% for",
    "an error": "{{ 1 / 0 }}",
    "a file": "{% include '/etc/passwd' %}",
}.items():

    @case(f"reader: chat template with {_name}", "--data one", "chat template", must=REFUSED,
          never=RAW_WORDS)  # fmt: skip
    def _(folder: Path, template: str = _template) -> None:
        llama_folders(folder)
        edit(folder / "merged" / "tokenizer_config.json", chat_template=template)
        for task in TASKS:
            write_rows(folder / f"{task}.jsonl", [{"messages": CHAT}] * 20)
        calibrated(folder)


@case("reader: rows of 1,000,000 characters", must=RIGHT)
def _(folder: Path) -> None:
    llama_folders(folder)
    row = {"prompt": "a" * 10**6, "target": "b"}
    for task in TASKS:
        write_rows(folder / f"{task}.jsonl", [row] * 12)
    calibrated(folder)


for _label in (-1, -100, 2, True, False):

    @case(f"reader: labels {_label}", "--data one", must=REFUSED, never=RAW_WORDS)
    def _(folder: Path, label: Any = _label) -> None:
        classifier_folders(folder)
        write_rows(folder / "one.jsonl", [{"text": "a b", "label": label}] * 20)
        shown(*words(folder))
