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

import made_folders as made
import pytest
from made_folders import CHAT, PAPER, datasets_on_disk, words, write_adapters, write_rows
from model_names import UNUSABLE_NAMES
from tiny_models import decoder_model, scatter
from tiny_texts import TASKS, WORDS, llama_model, sentences, t5_model, word_tokenizer, write
from transformers import AutoModelForCausalLM

from fusion_bench_featcal.cli import main
from fusion_bench_featcal.folders import calibrate_folder

Prepare = Callable[[Path], Any]
MERGE_CONFIG = "merged/mergekit_config.yml"
TOKENIZER = "merged/tokenizer_config.json"
NESTED = "[" * 5000 + "]" * 5000
NO_MODELS: dict[str, Any] = {"base": None, "experts": ()}


def text(name: str, content: str = "") -> Prepare:
    """Replace a file."""

    def prepare(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_text(content)

    return prepare


def keys(name: str, **changes: Any) -> Prepare:
    """Change keys of a JSON file; those that become None are removed."""

    def prepare(folder: Path) -> None:
        content = json.loads((folder / name).read_text()) | changes
        kept = {key: value for key, value in content.items() if value is not None}
        text(name, json.dumps(kept))(folder)

    return prepare


def rows(*content: Any, tasks: tuple[str, ...] = ("one",)) -> Prepare:
    """Replace the rows of tasks; they repeat to 24."""

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


def model(name: str, make: Callable[[], Any], **tokenizer: Any) -> Prepare:
    """Replace a model."""
    return lambda folder: write(make(), folder / name, word_tokenizer(**tokenizer))


def gone(*patterns: str) -> Prepare:
    """Remove files or folders."""

    def prepare(folder: Path) -> None:
        for path in [path for pattern in patterns for path in folder.glob(pattern)]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return prepare


def pipe(name: str) -> Prepare:
    return both(gone(name), lambda folder: os.mkfifo(folder / name))


def merge_config(method: str, *experts: Any, **more: Any) -> Prepare:
    """Write a mergekit config, in which {} is the folder."""
    content = {"merge_method": method, "models": [{"model": name} for name in experts]}
    config = json.dumps(content | more)
    return lambda folder: text(MERGE_CONFIG, config.replace("{}", str(folder)))(folder)


def soup(method: str = "ties", base: str = "{}/base") -> Prepare:
    return merge_config(method, "{}/one", "{}/two", base_model=base)


def adapters(make: Callable[[], Any] = llama_model) -> Prepare:
    return lambda folder: write_adapters(folder, make())


def arguments(folder: Path, options: Mapping[str, Any]) -> list[str]:
    more = [word.replace("{}", str(folder)) for word in options.get("more", ())]
    return words(folder, *more, **{key: v for key, v in options.items() if key != "more"})


# --- options, of models and data that fit ---

OPTIONS = [
    ("--chat-template none.jinja", "--chat-template cannot be read: [Errno 2] No such file"),
    ("--set ridge_lamda=1", "nearest: 'ridge_lambda'"),
    ("--set ridge_lambda=-1", "--set ridge_lambda must be"),
    ("--set resume=true", "--set resume: use --resume"),
    ("--set family=llamma", "--set family must be"),
    ("--set modules=[nothing]", "matches no module"),
    ("--set 'modules=[&a x, *a]'", "has the alias *a"),
    ("--set 'seed=!!bool x'", "KeyError('x')"),
    ("--prompt 'a photo'", "has no {} for the class name"),
    ("--prompt 'a {}'", "--prompt is for CLIP, these models read texts"),
    ("--text-tower base", "--text-tower is for CLIP, these models read texts"),
    ("--merge simple_average", "merged already, and --merge merges: leave one of"),
    ("--device cuda:99", "--device cuda:99 cannot be used: "),
    ("--device gpu", "--device gpu cannot be used: "),
    ("--base ./nowhere", "--base ./nowhere: there is no such file or folder here"),
    ("--base one.jsonl", "one.jsonl is a file: name the folder that the model is in"),
    ("--data thwo=x.jsonl", "--data: no expert is called 'thwo' (nearest: 'two'). "),
    ("--eval one=nothing.jsonl", "--eval one=nothing.jsonl cannot be loaded: data"),
    ("--eval one=nothing.jsnl", "data 'nothing.jsnl' does not exist: neither a file"),
    ("--expert three", "--expert: expected NAME=VALUE, got 'three'"),
    ("--shard-size '2 bytes'", "or a size such as 500MB or 2GB, got"),
    ("--as-lora 0", "as_lora must be null or an integer >= 1"),
    ("--strict --no-eval --preset paper", "--set held_out=auto"),
    ("--evaluate nothing", "expected lm-eval:"),
    ("--evaluate my_scores:", "got 'my_scores:'"),
    ("--evaluate :number", "got ':number'"),
    ("--evaluate no_such_module:score", "No module named 'no_such_module'"),
    ("--evaluate lm-eval:arc_easy", "pip install 'fusion_bench_featcal[llm]'"),
    ("--evaluate layer_scores:rows --no-eval", "--no-eval skips --evaluate"),
    ("--evaluate a:b --evaluate a:c", "--evaluate: a is named twice"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "message"), OPTIONS)
def test_options(models, refusal, monkeypatch, more, message):
    monkeypatch.chdir(models)
    assert message in refusal(words(models, *shlex.split(more)))


OTHER_WORDS: list[tuple[dict[str, Any], str]] = [
    ({"merged": None},
     "give MERGED, the merged model's folder or a recipe.yaml, or --merge HOW"),
    ({"more": ["--merge", "task_arithmetik:1"], "merged": None},
     "got 'task_arithmetik:1'. method@method.base_method=..."),
    ({"more": ["--as-lora", "2", "--set", "anchor_rho=1", *PAPER], "base": None},
     "--as-lora needs --base"),
    ({"data": ["one.jsonl"]}, "no data of two"),
    ({"merged": "nowhere", **NO_MODELS}, "/nowhere: there is no such folder"),
    ({"merged": "merged/config.json", **NO_MODELS}, "/config.json: there is no such folder"),
    ({"merged": "none.yaml", **NO_MODELS}, "none.yaml: there is no such file"),
    ({"merged": "merged", **NO_MODELS}, "has no mergekit_config.yml: give --base"),
    ({"merged": "merged", **NO_MODELS}, "--expert NAME="),
    *[({"names": [name, "two"]}, "has a meaning already. Choose another")
      for name in ("base", "merged", "_pretrained_")],
    ({"names": ["Two", "two"]}, "only in case. Choose another"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), OTHER_WORDS)
def test_models_that_are_named_otherwise(models, refusal, options, message):
    line = refusal(arguments(models, options))
    assert all(part in line for part in message.split(". ")), line


@pytest.mark.parametrize("name", UNUSABLE_NAMES)
def test_names_that_are_no_file_names(models, refusal, name):
    line = refusal(words(models, names=[name, "two"]))
    assert "featcal: error: --expert: " in line and repr(name[:100]) in line
    assert "only in case" in line or "has a meaning" in line or "at most 100 bytes" in line


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("bases: base", "mine.yaml: unknown key 'bases' (nearest: 'base')"),
        ("eval_rows: many", "mine.yaml: eval_rows must be an integer >= 1, got 'many'"),
        ("expert: one", "mine.yaml: expert must be a mapping, got 'one'"),
        ("preset: minus", "mine.yaml: preset must be one of plus, paper, got 'minus'"),
        ("- base", "mine.yaml is no recipe"),
        ("{merged: merged, expert: {one: one}, data: {one: x}, columns: {one: [a]}}",
         "--columns: one is ['a'], neither a column nor an expert's mapping"),
        ("base: [", "mine.yaml cannot be read"),
    ],
)  # fmt: skip
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
    (soup(base="{}/two"), {}, ["/base is not the base", "/two"]),
    (merge_config("ties", "{}/one", base_model="{}/base"), {}, ["/two is no model that"]),
    (model("base", lambda: llama_model(9)), {}, ["the merged model", "was not tuned from --base"]),
    (model("two", lambda: llama_model(9)), {}, ["--expert two=", "/two was not tuned from --base"]),
    (model("two", lambda: decoder_model(vocab_size=len(WORDS), hidden_size=16)), {},
     ["expert 'two'", "--expert two"]),
    (model("two", t5_model), {}, ["expert 'two' is a 't5' model"]),
    (lambda f: word_tokenizer(words=SWAPPED).save_pretrained(f / "two"), {},
     ["has another tokenizer", "2 of 23 tokens differ"]),
    (gone("*/*token*"), {}, ["no tokenizer in ", "/merged: name its folder by --tokenizer"]),
    (text("out.blocks/one"), {}, ["go on with --resume, or remove it"]),
    (text("out/model.safetensors"), {}, ["exists and is not empty"]),
    (gone("two"), {}, ["--expert two=", "/two: there is no such file or folder here"]),
    (gone("two/config.json"), {}, ["has no config.json"]),
    (renamed("two/model.safetensors", "two/pytorch_model.bin"), {}, ["only safetensors are read"]),
    (keys("merged/config.json", architectures=["MyOwn"]), {}, ["names the class MyOwn"]),
    (both(adapters(t5_model), keys("two-lora/adapter_config.json", lora_bias=True)),
     {"experts": ["one", "two-lora"]}, ["{'lora_bias': True} cannot be read", "merge_and_unload"]),
    *[(pipe(name), {}, [f"/{name} is not a regular file"])
      for name in ("merged/config.json", "two/config.json")],
    *[(text(f"{name}/{file}", f'{{"a": {NESTED}}}'), {}, [f"/{name}"])
      for name in ("merged", "two")
      for file in ("config.json", "tokenizer_config.json", "tokenizer.json")],
    *[(keys(TOKENIZER, model_max_length=limit), {},
       [f"model_max_length in tokenizer_config.json) is {limit!r}"])
      for limit in ("abc", 0, True)],
]  # fmt: skip

ALIASES = "\n".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 10))
CONFIGS = [
    (f"l0: &l0 [x]\n{ALIASES}\nmodels: *l9\n", "line 2: has the alias *l0"),  # 9 ** 9 values
    ("models: &a [*a]", "line 1: has the alias *a"),
    (f"#{'x' * 2**20}\nmodels: [x]", "is larger than 1,024 KiB"),
    (f"models: {NESTED}", "RecursionError"),
    ("models: [a", "line 1: expected ',' or ']'"),
    ("models: !!python/name:os.system ''", "line 1: could not determine a constructor"),
    ("models: !!bool x", "KeyError('x')"),
    ("models: 5", "models is 5, not a list"),
    ("slices: 3", "slices is 3, not a list"),
    ("slices: [5]", "a slice or module is 5, not a mapping"),
    ("slices: [{sources: x}]", "sources is 'x', not a list"),
    ("modules: [a]", "modules is ['a'], not a mapping"),
    ("models: [{model: [a]}]", "a model is ['a'], not a folder or hub id"),
    (f"models: [{'x' * 5000}]", "not a folder or hub id"),
    ("base_model: 5\nmodels: [a]", "a model is 5, not a folder or hub id"),
]


def slices(*spans: tuple[int, int]) -> Prepare:
    """Merge slices of different layers."""
    pairs = zip(TASKS, spans, strict=True)
    sources = [{"model": f"{{}}/{task}", "layer_range": list(span)} for task, span in pairs]
    return merge_config("linear", models=None, slices=[{"sources": sources}])


CUT = "mergekit's linear from slices of different layers"
FOUR = ("{}/a-b/c/final", "{}/a/b-c/final", "{}/b-c/final", "{}/c/final")
MERGE_CONFIGS: list[Refused] = [
    *[(text(MERGE_CONFIG, content), NO_MODELS, [MERGE_CONFIG, message])
      for content, message in CONFIGS],
    (pipe(MERGE_CONFIG), NO_MODELS, [f"{MERGE_CONFIG} is not a regular file"]),
    *[(text(MERGE_CONFIG, content), NO_MODELS, ["--expert NAME=DIR"])
      for content in ("a: &p 1\nmodels: [*p]", "- 1", "models: 5", "models: []")],
    (merge_config("ties", *FOUR, base_model="base"), NO_MODELS | {"more": PAPER},
     ["mergekit_config.yml", "Name the models by --base", *(name[2:] for name in FOUR)]),
    (soup("slerp", "{}/one"), NO_MODELS | {"more": PAPER},
     ["--base is missing", "--set anchor_rho=1"]),
    *[(merge_config("passthrough", "{}/one", "{}/two"), {"base": base, "experts": ()},
       ["mergekit's passthrough"]) for base in (None, "base")],
    (slices((0, 1), (0, 2)), NO_MODELS, [CUT]),
    (slices((1, 2), (1, 2)), NO_MODELS, [CUT]),
    (both(renamed("one", "average"),
          merge_config("ties", "{}/average", "{}/two", base_model="{}/base")),
     {**NO_MODELS, "data": ()}, ["the name 'average' has a meaning already"]),
    (both(adapters(), merge_config("linear", "base+one-lora", "one+two-lora")), NO_MODELS,
     ["adds LoRA adapters to base, one"]),
]  # fmt: skip

TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
TEMPLATES = {
    "{% for i in range(9999999) %}{% endfor %}": "Range too big",
    "{% for": "unexpected 'end of template'",
    "{{ nothing.at.all }}": "'nothing' is undefined",
    "{{ raise_exception('only two turns') }}": "only two turns",
    "{{ messages.__class__.__mro__ }}": "access to attribute '__class__'",
}
ROW = ["--data one", "item "]
CHATS = ["--chat-template", "{}/chat.jinja"]
QUESTIONS = rows({"q": "a b", "a": "c"})
DATA: list[Refused] = [
    (gone("two.jsonl"), {}, ["does not exist"]),
    (text("two.jsonl"), {}, ["two.jsonl' is empty"]),
    (text("one.jsonl", '{"prompt": "a"\nnonsense'), {},
     ["--data one=", "one.jsonl: data", "is not readable as json"]),
    (rows({"prompt": None, "id": 1}), {},
     [*ROW, "a text is a row with prompt (and target), with messages"]),
    (rows({"prompt": 3.5}), {}, [*ROW, "prompt is float, not a text"]),
    (rows({"prompt": " ", "target": "a"}), {}, [*ROW, "the text is empty"]),
    (rows({"prompt": "a", "target": " "}), {}, [*ROW, "the target is empty"]),
    (rows({"prompt": "a", "output": "b", "answer": "c"}), {},
     [*ROW, "which of output, answer is the answer?"]),
    (rows({"messages": TURNS[:1]}), {}, [*ROW, "--chat-template FILE"]),
    (rows(*sentences("one", 11), {"prompt": "a b"}), {"more": ["--no-eval"]},
     ["no target, as in 1 of 12 rows", "item "]),
    (QUESTIONS, {}, ["one.jsonl has the columns q, a, of which none is usual: say what they hold, "
                     "such as --columns prompt=q,target=a"]),
    *[(QUESTIONS, {"more": ["--columns", columns]}, [message]) for columns, message in (
        ("prompt=Q", "has no column 'Q'"),
        ("one:prompt=q,answer=a", "--columns: unknown key 'answer'"),
        ("three:prompt=q", "no expert is called 'three'. Experts: one, two"),
        ("q", "--columns: expected NAME=VALUE, got 'q'"))],
    (lambda f: datasets_on_disk(f / "saved", "fit", "more"), {"data": ["saved:tests", "two.jsonl"]},
     ["has no split 'tests'"]),
    (lambda f: datasets_on_disk(f / "saved", "fit", "more"), {"data": ["saved", "two.jsonl"]},
     ["has no split 'train'"]),
    *[(both(rows({"messages": TURNS}, tasks=TASKS), keys(TOKENIZER, chat_template=template)), {},
       [*ROW, "the tokenizer's chat template cannot be used: ", message])
      for template, message in TEMPLATES.items()],
    *[(both(rows({"messages": turns}, tasks=TASKS), text("chat.jinja", CHAT)), {"more": CHATS},
       ["--data one=", "messages must be a list of turns"])
      for turns in ("abc", [1, 2], [TURNS[:1]])],
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
RANGE = "the expert's head has 2 classes"
CLASSIFIERS: list[tuple[Prepare, list[str]]] = [
    *[(both(keys("one/config.json", **config), labels(value)), messages)
      for value, config, messages in (
          (True, {}, ["--data one", "has no class 'True'; it has no, yes"]),
          ("perhaps", {}, ["--data one", "head has no class 'perhaps'; it has no, yes"]),
          (-100, {}, [f"label -100, but {RANGE}"]),
          (0, {"label2id": {"no": 0, "yes": 0}}, NAMES),
          (0, {"label2id": {"no": 1, "yes": 0}}, NAMES),
          (0, {"id2label": {0: "no", 1: "no"}}, NAMES),
          ("no", TWINS, ["--data one", "head has several classes 'no'; it has no, no"]))],
    (labels("1", "2"), [f"label 2, but {RANGE}"]),
    (rows({"text": "a", "text_pair": None, "label": 0},
          {"text": "b", "text_pair": "a", "label": 0}), ["'text_pair': 'NoneType'"]),
]  # fmt: skip


@pytest.mark.parametrize(("prepare", "messages"), CLASSIFIERS)
def test_files_of_classifiers(tmp_path, refusal, prepare, messages):
    made.classifier_folders(tmp_path)
    prepare(tmp_path)
    line = refusal(words(tmp_path, data=["one.jsonl", "two.jsonl"]))
    assert all(message in line for message in messages), line


def test_table_without_a_column_of_images(tmp_path, capsys):
    """Newer versions of transformers rename ViT's tensors, so that its models are loaded first."""
    made.image_classifier_folders(tmp_path)
    rows({"picture": "a.png", "shape": "star"})(tmp_path)
    assert main(words(tmp_path, data=["one.jsonl", "two-images"])) == 2
    assert "no image_column 'image'" in capsys.readouterr().err


# --- files that pass all checks ---

UNNAMED = {"id2label": None, "label2id": None}
PAIR = "has no class names"


@pytest.mark.parametrize(
    ("values", "config", "note"),
    [
        (("yes", "no"), {}, None),
        (("0", "1"), {}, None),
        (("YES", "No"), {"label2id": {"LABEL_0": 0, "LABEL_1": 1}}, None),
        (("a", "A"), {"id2label": {0: "A", 1: "a"}, "label2id": {"A": 0, "a": 1}}, None),
        (("b", "a"), UNNAMED, "the data's are taken as a=0, b=1"),
        (("c_10", "c_9"), UNNAMED, "are taken as c_9=0, c_10=1"),
        ((0.0, 1.0), UNNAMED, None),
        ((0, 1), TWINS, None),
    ],
)
def test_labels_that_fit_the_head(tmp_path, plan, values, config, note):
    made.classifier_folders(tmp_path)
    both(keys("one/config.json", **config), labels(*values))(tmp_path)
    shown = plan(words(tmp_path))
    assert (PAIR in shown) == (note is not None) and (note or "") in shown


def test_second_texts_of_any_length_and_labels_of_adapters_by_the_base(tmp_path, plan):
    write_adapters(tmp_path, made.classifier_folders(tmp_path)["base"])
    pair = {"text_pair": "a b c " * 500, "label": 0}
    rows({"text": "a", **pair}, {"text": "b", "text_pair": "a", "label": 1})(tmp_path)
    plan(words(tmp_path, experts=["one-lora", "two"]))


EXPERTS = "  experts: "
LONG_FORM = {"model": {"path": "base"}, "lora": {"path": "two-lora"}}
MAGIC = [("x[1].jsonl", "x1.jsonl"), ("x*.jsonl", "x1.jsonl"), ("[o]/x.jsonl", "o/x.jsonl")]
ACCEPTED: list[tuple[Prepare, dict[str, Any], list[str]]] = [
    (model("two", lambda: llama_model(9)), {"more": ["--any-base"]}, []),
    (merge_config("linear", "{}/base", "{}/one", "{}/two", base_model="{}/base"), NO_MODELS,
     ["base by mergekit_config.yml"]),
    (text(MERGE_CONFIG, "models: 5"), {}, ["not read: "]),
    *[(soup("slerp", "{}/one"), {"more": more, "base": base, "experts": experts},
       ["  one: ", "  two: "])
      for more, base, experts in (
          ([*PAPER, "--set", "anchor_rho=1"], None, ()), ([], "base", ()), ([], "base", TASKS),
          ([*PAPER, "--set", "anchor_rho=1"], None, TASKS))],
    (both(adapters(), merge_config("linear", "base+one-lora", LONG_FORM)),
     {**NO_MODELS, "names": ["one-lora", "two-lora"]},
     ["base by mergekit_config.yml", "  base: base\n",
      "one-lora (LoRA adapter), two-lora=two-lora (LoRA adapter)"]),
    (both(gone("merged/*token*", "base/*token*"), merge_config("linear", "{}/one", "{}/two")),
     NO_MODELS, []),
    *[(both(text(other, '{"prompt": 3}\n' * 30), renamed("two.jsonl", name)),
       options | {"data": ["one.jsonl", data or name]}, [])
      for name, other in MAGIC
      for data, options in ((None, {}), ("one.jsonl", {"more": ["--eval", f"two={name}"]}))],
]  # fmt: skip


@pytest.mark.parametrize(("prepare", "options", "messages"), ACCEPTED)
def test_files_that_pass_all_checks(folder, plan, monkeypatch, prepare, options, messages):
    monkeypatch.chdir(folder)
    prepare(folder)
    shown = plan(arguments(folder, options))
    assert all(message in shown for message in messages), shown


@pytest.mark.parametrize(
    ("locations", "names"),
    [
        (("./math/final", "./code/final"), ("math-final", "code-final")),
        (("a/x/step-500", "b/x/step-500/"), ("a-x-step-500", "b-x-step-500")),
        (("math/final", "code"), ("final", "code")),
        (("math-x/final", "math/x-final"), ("final", "x-final")),
    ],
)
def test_experts_of_a_merge_config_have_the_shortest_names_that_differ(
    folder, plan, monkeypatch, locations, names
):
    monkeypatch.chdir(folder)
    for task, location in zip(TASKS, locations, strict=True):
        renamed(task, location)(folder)
    again = str(folder / locations[0])
    merge_config("ties", *locations, again, "./base", base_model="base")(folder)
    experts = plan(words(folder, names=names, **NO_MODELS)).split(EXPERTS)[1].splitlines()[0]
    assert [word.split("=")[0] for word in experts.split(", ")] == list(names)


def test_links_are_named_as_they_are_written(folder, plan, monkeypatch):
    monkeypatch.chdir(folder)
    for task in TASKS:
        renamed(task, f"store/{task}/checkpoint-500")(folder)
        (folder / task).symlink_to(folder / "store" / task / "checkpoint-500")
    merge_config("ties", *TASKS, "./base", base_model="base")(folder)
    shown = plan(words(folder, **NO_MODELS))
    assert all(f"{task}={task}" in shown for task in TASKS)


def test_a_note_on_a_sibling_in_place_of_the_base(folder, plan):
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    write_adapters(folder, base)
    for experts in (TASKS, ["one-lora", "two-lora"]):
        assert "cosine" not in plan(words(folder, experts=experts))
    write(scatter(base, 99, 0.03), folder / "sibling", word_tokenizer())
    note = plan(words(folder, base="sibling")).split("the changes from ")[1]
    start = f"--base {folder / 'sibling'} to experts one and two have a cosine of "
    assert note.startswith(start) and 0.4 < float(note.removeprefix(start).split()[0]) < 0.6
