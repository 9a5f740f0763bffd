"""`featcal calibrate` refuses files and options that cannot work, in one line, and loads nothing.

Files may be by anyone: they are read in bounded time, or refused with their name and the reason.
"""

import json
import os
import shlex
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from made_folders import (
    classifier_folders,
    datasets_on_disk,
    words,
    write_adapters,
    write_rows,
)
from tiny_models import decoder_model, scatter
from tiny_texts import TASKS, WORDS, llama_model, sentences, t5_model, word_tokenizer, write
from transformers import AutoModelForCausalLM

from fusion_bench_featcal.cli import main
from fusion_bench_featcal.folders import calibrate_folder

Prepare = Callable[[Path], Any]
MERGE_CONFIG = "merged/mergekit_config.yml"
TOKENIZER = "merged/tokenizer_config.json"
NESTED = "[" * 5000 + "]" * 5000  # deeper than Python's parsers go
NO_MODELS: dict[str, Any] = {"base": None, "experts": ()}


def text(name: str, content: str = "") -> Prepare:
    """Replace a file."""

    def prepare(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_text(content)

    return prepare


def keys(name: str, **changes: Any) -> Prepare:
    """Change keys of a JSON file, and remove keys that become None."""

    def prepare(folder: Path) -> None:
        content = json.loads((folder / name).read_text()) | changes
        text(name, json.dumps({k: v for k, v in content.items() if v is not None}))(folder)

    return prepare


def rows(*content: Any, tasks: tuple[str, ...] = ("one",)) -> Prepare:
    """Replace the rows of tasks, repeated to 24."""

    def prepare(folder: Path) -> None:
        for task in tasks:
            repeated = [content[n % len(content)] for n in range(24)]
            write_rows(folder / f"{task}.jsonl", repeated)

    return prepare


def labels(*values: Any) -> Prepare:
    return rows(*({"text": "a b", "label": value} for value in values))


def both(*steps: Prepare) -> Prepare:
    return lambda folder: [step(folder) for step in steps]


def model(name: str, make: Callable[[], Any]) -> Prepare:
    """Replace a model."""
    return lambda folder: write(make(), folder / name, word_tokenizer())


def gone(*patterns: str) -> Prepare:
    """Remove files or folders."""

    def prepare(folder: Path) -> None:
        for path in [path for pattern in patterns for path in folder.glob(pattern)]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return prepare


def pipe(name: str) -> Prepare:
    return both(gone(name), lambda folder: os.mkfifo(folder / name))


def merge_config(method: str, *experts: Any, **more: Any) -> Prepare:
    """Write a mergekit config."""
    content = {"merge_method": method, "models": [{"model": name} for name in experts]}
    return text(MERGE_CONFIG, json.dumps(content | more))


def adapters(make: Callable[[], Any] = llama_model) -> Prepare:
    return lambda folder: write_adapters(folder, make())


def arguments(folder: Path, options: Mapping[str, Any]) -> list[str]:
    more = shlex.split(options.get("more", ""))
    return words(folder, *more, **{key: v for key, v in options.items() if key != "more"})


# --- options, of models and data that fit ---

OPTIONS = [
    ("--set ridge_lamda=1", "nearest: 'ridge_lambda'"),
    ("--set ridge_lambda=-1", "--set ridge_lambda must be"),
    ("--merge simple_average", "merged already, and --merge merges: leave one of"),
    ("--base ./nowhere", "--base ./nowhere: there is no such file or folder here"),
    ("--data thwo=x.jsonl", "--data: no expert is called 'thwo' (nearest: 'two'). "),
    ("--expert three", "--expert: expected NAME=VALUE, got 'three'"),
    ("--evaluate no_such_module:score", "No module named 'no_such_module'"),
    ("--evaluate lm-eval:arc_easy", "pip install 'fusion_bench_featcal[llm]'"),
]  # fmt: skip
OTHER_WORDS: list[tuple[dict[str, Any], str]] = [
    ({"merged": None}, "give MERGED, the merged model's folder or a recipe.yaml, or --merge HOW"),
    ({"more": "--merge task_arithmetik:1", "merged": None}, "got 'task_arithmetik:1'"),
    ({"data": ["one.jsonl"]}, "no data of two"),
    (NO_MODELS, "has no mergekit_config.yml: give --base"),
    ({"names": ["a/b", "two"]}, "--expert: 'a/b' cannot name a file"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"), [*(({"more": more}, text) for more, text in OPTIONS), *OTHER_WORDS]
)
def test_options(models, refusal, monkeypatch, options, message):
    monkeypatch.chdir(models)
    assert message in refusal(arguments(models, options))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("bases: base", "mine.yaml: unknown key 'bases' (nearest: 'base')"),
        ("eval_rows: many", "mine.yaml: eval_rows must be an integer >= 1, got 'many'"),
    ],
)
def test_recipes_that_cannot_be_read(tmp_path, refusal, content, message):
    (tmp_path / "mine.yaml").write_text(content)
    run = ["calibrate", str(tmp_path / "mine.yaml"), "--out", str(tmp_path / "out")]
    assert message in refusal(run)


def test_without_a_merged_model_or_a_folder_for_the_result(capsys):
    assert main(["calibrate"]) == 2
    assert "error: give MERGED, " in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"calibrate_folder: unknown key 'bse' \(nearest: 'base'"):
        calibrate_folder("merged", bse="base")
    with pytest.raises(ValueError, match="give --out DIR"):
        calibrate_folder("merged", base="base")


# --- files of a Llama that are changed ---

SWAPPED = (*WORDS[:3], WORDS[4], WORDS[3], *WORDS[5:])
Refused = tuple[Prepare, dict[str, Any], list[str]]
MODELS: list[Refused] = [
    (model("base", lambda: llama_model(9)), {}, ["the merged model", "was not tuned from --base"]),
    (model("two", lambda: decoder_model(vocab_size=len(WORDS), hidden_size=16)), {},
     ["expert 'two'", "--expert two"]),
    (lambda f: word_tokenizer(words=SWAPPED).save_pretrained(f / "two"), {},
     ["has another tokenizer", "2 of 23 tokens differ"]),
    (gone("*/*token*"), {}, ["no tokenizer in ", "/merged: name its folder by --tokenizer"]),
    (text("out.blocks/one"), {}, ["go on with --resume, or remove it"]),
    (gone("two"), {}, ["--expert two=", "/two: there is no such file or folder here"]),
    (both(gone("two/model.safetensors"), text("two/pytorch_model.bin")), {},
     ["only safetensors are read"]),
    (both(adapters(t5_model), keys("two-lora/adapter_config.json", lora_bias=True)),
     {"experts": ["one", "two-lora"]}, ["{'lora_bias': True} cannot be read", "merge_and_unload"]),
    (pipe("two/config.json"), {}, ["/two/config.json is not a regular file"]),
    (text("merged/config.json", f'{{"a": {NESTED}}}'), {}, ["/merged"]),
]  # fmt: skip

ALIASES = "\n".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 10))
CONFIGS = [
    (f"l0: &l0 [x]\n{ALIASES}\nmodels: *l9\n", "line 2: has the alias *l0"),  # 9 ** 9 values
    (f"#{'x' * 2**20}\nmodels: [x]", "is larger than 1,024 KiB"),
    ("models: !!python/name:os.system ''", "line 1: could not determine a constructor"),
    ("models: 5", "models is 5, not a list"),
]
MERGE_CONFIGS: list[Refused] = [
    *[(text(MERGE_CONFIG, content), NO_MODELS, [MERGE_CONFIG, message])
      for content, message in CONFIGS],
    (merge_config("slerp", "one", "two", base_model="one"), NO_MODELS | {"more": "--preset paper"},
     ["--base is missing", "--set anchor_rho=1"]),
    (merge_config("passthrough", "one", "two"), {"base": None, "experts": ()},
     ["mergekit's passthrough"]),
]  # fmt: skip

TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
TEMPLATES = {
    "{% for i in range(9999999) %}{% endfor %}": "Range too big",
    "{{ messages.__class__.__mro__ }}": "access to attribute '__class__'",
}
ROW = ["--data one", "item "]
QUESTIONS = rows({"q": "a b", "a": "c"})
DATA: list[Refused] = [
    (gone("two.jsonl"), {}, ["does not exist"]),
    (text("two.jsonl"), {}, ["two.jsonl' is empty"]),
    (text("one.jsonl", '{"prompt": "a"\nnonsense'), {},
     ["--data one=", "one.jsonl: data", "is not readable as json"]),
    (rows({"prompt": None, "id": 1}), {},
     [*ROW, "a text is a row with prompt (and target), with messages"]),
    (rows({"messages": TURNS[:1]}), {}, [*ROW, "--chat-template FILE"]),
    (rows(*sentences("one", 11), {"prompt": "a b"}), {"more": "--no-eval"},
     ["no target, as in 1 of 12 rows", "item "]),
    (QUESTIONS, {}, ["one.jsonl has the columns q, a, of which none is usual: say what they hold, "
                     "such as --columns prompt=q,target=a"]),
    (QUESTIONS, {"more": "--columns prompt=Q"}, ["has no column 'Q'"]),
    (lambda f: datasets_on_disk(f / "saved", "fit", "more"), {"data": ["saved:tests", "two.jsonl"]},
     ["has no split 'tests'"]),
    *[(both(rows({"messages": TURNS}, tasks=TASKS), keys(TOKENIZER, chat_template=template)), {},
       [*ROW, "the tokenizer's chat template cannot be used: ", message])
      for template, message in TEMPLATES.items()],
]  # fmt: skip


@pytest.mark.parametrize(("prepare", "options", "messages"), [*MODELS, *MERGE_CONFIGS, *DATA])
def test_files_of_language_models(folder, refusal, monkeypatch, prepare, options, messages):
    monkeypatch.chdir(folder)
    prepare(folder)
    line = refusal(arguments(folder, options))
    assert all(message in line for message in messages), line
    assert len(line) < 600


# --- files of classifiers that are changed ---

NAMES = ["--expert one", "id2label and label2id of its config.json do not fit together"]


@pytest.mark.parametrize(
    ("values", "config", "messages"),
    [
        (["perhaps"], {}, ["--data one", "head has no class 'perhaps'; it has no, yes"]),
        (["1", "2"], {}, ["label 2, but the expert's head has 2 classes"]),
        ([0], {"label2id": {"no": 1, "yes": 0}}, NAMES),
    ],
)
def test_labels_that_do_not_fit_the_head(tmp_path, refusal, values, config, messages):
    classifier_folders(tmp_path)
    both(keys("one/config.json", **config), labels(*values))(tmp_path)
    line = refusal(words(tmp_path))
    assert all(message in line for message in messages), line


# --- files that pass all checks ---

UNNAMED = {"id2label": None, "label2id": None}


@pytest.mark.parametrize(
    ("values", "config", "note"),
    [
        (("YES", "No"), {"label2id": {"LABEL_0": 0, "LABEL_1": 1}}, None),
        (("c_10", "c_9"), UNNAMED, "are taken as c_9=0, c_10=1"),
    ],
)
def test_labels_that_fit_the_head(tmp_path, plan, values, config, note):
    classifier_folders(tmp_path)
    both(keys("one/config.json", **config), labels(*values))(tmp_path)
    screen = plan(words(tmp_path))
    assert ("has no class names" in screen) == (note is not None) and (note or "") in screen


LONG_FORM = {"model": {"path": "base"}, "lora": {"path": "two-lora"}}
ACCEPTED: list[tuple[Prepare, dict[str, Any], list[str]]] = [
    (model("two", lambda: llama_model(9)), {"more": "--any-base"}, []),
    (merge_config("linear", "base", "one", "two", base_model="base"), NO_MODELS,
     ["base by mergekit_config.yml"]),
    (text(MERGE_CONFIG, "models: 5"), {}, ["not read: "]),
    (both(adapters(), merge_config("linear", "base+one-lora", LONG_FORM)),
     {**NO_MODELS, "names": ["one-lora", "two-lora"]},
     ["base by mergekit_config.yml", "  base: base\n",
      "one-lora (LoRA adapter), two-lora=two-lora (LoRA adapter)"]),
    (both(gone("merged/*token*", "base/*token*"), merge_config("linear", "one", "two")),
     NO_MODELS, []),
]  # fmt: skip


@pytest.mark.parametrize(("prepare", "options", "messages"), ACCEPTED)
def test_files_that_pass_all_checks(folder, plan, monkeypatch, prepare, options, messages):
    monkeypatch.chdir(folder)
    prepare(folder)
    screen = plan(arguments(folder, options))
    assert all(message in screen for message in messages), screen


def test_experts_of_a_merge_config_have_the_shortest_names_that_differ(folder, plan, monkeypatch):
    """The models are links, which are named as they are written."""
    monkeypatch.chdir(folder)
    locations, names = ("./math/final", "./code/final"), ["math-final", "code-final"]
    for task, location in zip(TASKS, locations, strict=True):
        (folder / location).parent.mkdir()
        (folder / location).symlink_to(folder / task)
    again = str(folder / locations[0])
    merge_config("ties", *locations, again, "./base", base_model="base")(folder)
    screen = plan(words(folder, names=names, **NO_MODELS))
    experts = screen.split("  experts: ")[1].splitlines()[0]
    assert [word.split("=")[0] for word in experts.split(", ")] == names


def test_a_note_on_a_sibling_in_place_of_the_base(folder, plan):
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    assert "cosine" not in plan(words(folder))
    write(scatter(base, 99, 0.03), folder / "sibling", word_tokenizer())
    note = plan(words(folder, base="sibling")).split("the changes from ")[1]
    start = f"--base {folder / 'sibling'} to experts one and two have a cosine of "
    assert note.startswith(start) and 0.4 < float(note.removeprefix(start).split()[0]) < 0.6
