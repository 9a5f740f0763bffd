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
    CHAT,
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


def renamed(old: str, new: str) -> Prepare:
    def prepare(folder: Path) -> None:
        (folder / new).parent.mkdir(parents=True, exist_ok=True)
        (folder / old).rename(folder / new)

    return prepare


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


def soup(method: str = "ties", base: str = "base") -> Prepare:
    return merge_config(method, "one", "two", base_model=base)


def adapters(make: Callable[[], Any] = llama_model) -> Prepare:
    return lambda folder: write_adapters(folder, make())


def arguments(folder: Path, options: Mapping[str, Any]) -> list[str]:
    more = shlex.split(options.get("more", ""))
    return words(folder, *more, **{key: v for key, v in options.items() if key != "more"})


# --- options, of models and data that fit ---

OPTIONS = [
    ("--chat-template none.jinja", "--chat-template cannot be read: [Errno 2] No such file"),
    ("--set ridge_lamda=1", "nearest: 'ridge_lambda'"),
    ("--set ridge_lambda=-1", "--set ridge_lambda must be"),
    ("--set resume=true", "--set resume: use --resume"),
    ("--text-tower base", "--text-tower is for CLIP, these models read texts"),
    ("--merge simple_average", "merged already, and --merge merges: leave one of"),
    ("--device cuda:99", "--device cuda:99 cannot be used: "),
    ("--base ./nowhere", "--base ./nowhere: there is no such file or folder here"),
    ("--base one.jsonl", "one.jsonl is a file: name the folder that the model is in"),
    ("--data thwo=x.jsonl", "--data: no expert is called 'thwo' (nearest: 'two'). "),
    ("--eval one=nothing.jsonl", "--eval one=nothing.jsonl cannot be loaded: data"),
    ("--expert three", "--expert: expected NAME=VALUE, got 'three'"),
    ("--shard-size '2 bytes'", "or a size such as 500MB or 2GB, got"),
    ("--as-lora 0", "as_lora must be null or an integer >= 1"),
    ("--strict --no-eval --preset paper", "--set held_out=auto"),
    ("--evaluate no_such_module:score", "No module named 'no_such_module'"),
    ("--evaluate lm-eval:arc_easy", "pip install 'fusion_bench_featcal[llm]'"),
    ("--evaluate layer_scores:rows --no-eval", "--no-eval skips --evaluate"),
]  # fmt: skip
OTHER_WORDS: list[tuple[dict[str, Any], str]] = [
    ({"merged": None}, "give MERGED, the merged model's folder or a recipe.yaml, or --merge HOW"),
    ({"more": "--merge task_arithmetik:1", "merged": None}, "got 'task_arithmetik:1'"),
    ({"more": "--as-lora 2 --preset paper --set anchor_rho=1", "base": None},
     "--as-lora needs --base"),
    ({"data": ["one.jsonl"]}, "no data of two"),
    ({"merged": "none.yaml", **NO_MODELS}, "none.yaml: there is no such file"),
    (NO_MODELS, "has no mergekit_config.yml: give --base"),
    ({"names": ["base", "two"]}, "has a meaning already. Choose another"),
    ({"names": ["Two", "two"]}, "only in case. Choose another"),
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
        ("base: [", "mine.yaml cannot be read"),
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
    (soup(base="two"), {}, ["/base is not the base", " two"]),
    (model("base", lambda: llama_model(9)), {}, ["the merged model", "was not tuned from --base"]),
    (model("two", lambda: llama_model(9)), {}, ["--expert two=", "/two was not tuned from --base"]),
    (model("two", lambda: decoder_model(vocab_size=len(WORDS), hidden_size=16)), {},
     ["expert 'two'", "--expert two"]),
    (model("two", t5_model), {}, ["expert 'two' is a 't5' model"]),
    (lambda f: word_tokenizer(words=SWAPPED).save_pretrained(f / "two"), {},
     ["has another tokenizer", "2 of 23 tokens differ"]),
    (gone("*/*token*"), {}, ["no tokenizer in ", "/merged: name its folder by --tokenizer"]),
    (text("out.blocks/one"), {}, ["go on with --resume, or remove it"]),
    (gone("two"), {}, ["--expert two=", "/two: there is no such file or folder here"]),
    (renamed("two/model.safetensors", "two/pytorch_model.bin"), {}, ["only safetensors are read"]),
    (keys("merged/config.json", architectures=["MyOwn"]), {}, ["names the class MyOwn"]),
    (both(adapters(t5_model), keys("two-lora/adapter_config.json", lora_bias=True)),
     {"experts": ["one", "two-lora"]}, ["{'lora_bias': True} cannot be read", "merge_and_unload"]),
    (pipe("two/config.json"), {}, ["/two/config.json is not a regular file"]),
    *[(text(f"merged/{file}", f'{{"a": {NESTED}}}'), {}, ["/merged"])
      for file in ("config.json", "tokenizer_config.json", "tokenizer.json")],
    (keys(TOKENIZER, model_max_length="abc"), {},
     ["model_max_length in tokenizer_config.json) is 'abc'"]),
]  # fmt: skip

ALIASES = "\n".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 10))
CONFIGS = [
    (f"l0: &l0 [x]\n{ALIASES}\nmodels: *l9\n", "line 2: has the alias *l0"),  # 9 ** 9 values
    (f"#{'x' * 2**20}\nmodels: [x]", "is larger than 1,024 KiB"),
    (f"models: {NESTED}", "RecursionError"),
    ("models: [a", "line 1: expected ',' or ']'"),
    ("models: !!python/name:os.system ''", "line 1: could not determine a constructor"),
    ("models: 5", "models is 5, not a list"),
    ("models: [{model: [a]}]", "a model is ['a'], not a folder or hub id"),
]
FOUR = ("a-b/c/final", "a/b-c/final", "b-c/final", "c/final")
SLICES = [{"model": task, "layer_range": [number, 2]} for number, task in enumerate(TASKS)]
MERGE_CONFIGS: list[Refused] = [
    *[(text(MERGE_CONFIG, content), NO_MODELS, [MERGE_CONFIG, message])
      for content, message in CONFIGS],
    (merge_config("ties", *FOUR, base_model="base"), NO_MODELS,
     ["mergekit_config.yml", "Name the models by --base", *FOUR]),
    (soup("slerp", "one"), NO_MODELS | {"more": "--preset paper"},
     ["--base is missing", "--set anchor_rho=1"]),
    (merge_config("passthrough", "one", "two"), {"base": None, "experts": ()},
     ["mergekit's passthrough"]),
    (merge_config("linear", models=None, slices=[{"sources": SLICES}]), NO_MODELS,
     ["mergekit's linear from slices of different layers"]),
    (both(adapters(), merge_config("linear", "base+one-lora", "one+two-lora")), NO_MODELS,
     ["adds LoRA adapters to base, one"]),
]  # fmt: skip

TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
TEMPLATES = {
    "{% for i in range(9999999) %}{% endfor %}": "Range too big",
    "{{ raise_exception('only two turns') }}": "only two turns",
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
    (rows({"prompt": "a", "output": "b", "answer": "c"}), {},
     [*ROW, "which of output, answer is the answer?"]),
    (rows({"messages": TURNS[:1]}), {}, [*ROW, "--chat-template FILE"]),
    (rows(*sentences("one", 11), {"prompt": "a b"}), {"more": "--no-eval"},
     ["no target, as in 1 of 12 rows", "item "]),
    (QUESTIONS, {}, ["one.jsonl has the columns q, a, of which none is usual: say what they hold, "
                     "such as --columns prompt=q,target=a"]),
    *[(QUESTIONS, {"more": f"--columns {columns}"}, [message]) for columns, message in (
        ("prompt=Q", "has no column 'Q'"),
        ("three:prompt=q", "no expert is called 'three'. Experts: one, two"))],
    (lambda f: datasets_on_disk(f / "saved", "fit", "more"), {"data": ["saved:tests", "two.jsonl"]},
     ["has no split 'tests'"]),
    *[(both(rows({"messages": TURNS}, tasks=TASKS), keys(TOKENIZER, chat_template=template)), {},
       [*ROW, "the tokenizer's chat template cannot be used: ", message])
      for template, message in TEMPLATES.items()],
    (both(rows({"messages": "abc"}, tasks=TASKS), text("chat.jinja", CHAT)),
     {"more": "--chat-template chat.jinja"}, ["--data one=", "messages must be a list of turns"]),
]  # fmt: skip


@pytest.mark.parametrize(("prepare", "options", "messages"), [*MODELS, *MERGE_CONFIGS, *DATA])
def test_files_of_language_models(folder, refusal, monkeypatch, prepare, options, messages):
    monkeypatch.chdir(folder)
    prepare(folder)
    line = refusal(arguments(folder, options))
    assert all(message in line for message in messages), line
    assert len(line) < 600


# --- files of classifiers that are changed ---

TWINS = {"id2label": {0: "no", 1: "no"}, "label2id": {"no": 1}}
NAMES = ["--expert one", "id2label and label2id of its config.json do not fit together"]


@pytest.mark.parametrize(
    ("values", "config", "messages"),
    [
        (["perhaps"], {}, ["--data one", "head has no class 'perhaps'; it has no, yes"]),
        ([-100], {}, ["label -100, but the expert's head has 2 classes"]),
        (["1", "2"], {}, ["label 2, but the expert's head has 2 classes"]),
        ([0], {"label2id": {"no": 1, "yes": 0}}, NAMES),
        (["no"], TWINS, ["--data one", "head has several classes 'no'; it has no, no"]),
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
        (("a", "A"), {"id2label": {0: "A", 1: "a"}, "label2id": {"A": 0, "a": 1}}, None),
        (("c_10", "c_9"), UNNAMED, "are taken as c_9=0, c_10=1"),
        ((0.0, 1.0), UNNAMED, None),
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
    (soup("slerp", "one"), {"more": "--preset paper --set anchor_rho=1", **NO_MODELS},
     ["  one: ", "  two: "]),
    (both(adapters(), merge_config("linear", "base+one-lora", LONG_FORM)),
     {**NO_MODELS, "names": ["one-lora", "two-lora"]},
     ["base by mergekit_config.yml", "  base: base\n",
      "one-lora (LoRA adapter), two-lora=two-lora (LoRA adapter)"]),
    (both(gone("merged/*token*", "base/*token*"), merge_config("linear", "one", "two")),
     NO_MODELS, []),
    (both(text("x1.jsonl", '{"prompt": 3}\n' * 30), renamed("two.jsonl", "x[1].jsonl")),
     {"data": ["one.jsonl", "x[1].jsonl"]}, []),  # no pattern
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
