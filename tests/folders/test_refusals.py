"""`featcal calibrate` refuses what cannot work in one line, before any weights are loaded."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from made_folders import classifier_folders, llama_folders, write_adapters, write_rows
from model_names import UNUSABLE_NAMES
from test_calibrate_command import words
from tiny_models import decoder_model
from tiny_texts import WORDS, llama_model, sentences, t5_model, word_tokenizer, write

from fusion_bench_featcal.cli import main
from fusion_bench_featcal.folders.model_folder import ModelFolder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Models and texts; loading a model whole is an error."""
    llama_folders(tmp_path)
    return _unloadable(tmp_path, monkeypatch)


def _unloadable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def load(self, kind=None):
        raise AssertionError(f"{self.option} was loaded")

    monkeypatch.setattr(ModelFolder, "load", load)
    return folder


def refusal(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """The one line that the command prints on stderr; nothing else is left."""
    out = Path(arguments[arguments.index("--out") + 1])
    before = sorted(out.parent.iterdir())
    try:
        assert main(arguments) == 2
    except SystemExit as ended:  # a word that the parser refuses
        assert ended.code == 2
    assert sorted(out.parent.iterdir()) == before
    starts = ("featcal: error", "featcal calibrate: error")
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(starts)]
    assert len(lines) == 1
    return lines[0]


def recipe(folder: Path, base: str, *experts: str) -> None:
    models = [{"model": expert} for expert in experts]
    content = {"merge_method": "ties", "base_model": base, "models": models}
    (folder / "merged" / "mergekit_config.yml").write_text(json.dumps(content))


def unlink_tokenizers(folder: Path) -> None:
    for file in folder.glob("*/*token*"):
        file.unlink()


def swap_tokens(folder: Path) -> None:
    swapped = (*WORDS[:3], WORDS[4], WORDS[3], *WORDS[5:])
    word_tokenizer(words=swapped).save_pretrained(folder / "two")


def widen(folder: Path) -> None:
    model = decoder_model(vocab_size=len(WORDS), hidden_size=16, intermediate_size=12)
    write(model, folder / "two")


def leave(file: Path, content: str = "") -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(content)


def remove_model(folder: Path) -> None:
    shutil.rmtree(folder / "two")


def empty_model(folder: Path) -> None:
    remove_model(folder)
    (folder / "two").mkdir()


def rename_weights(folder: Path) -> None:
    (folder / "two" / "model.safetensors").rename(folder / "two" / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("prepare", "messages"),
    [
        (lambda f: recipe(f, str(f / "two"), str(f / "one")), ["/base is not the base", "/two"]),
        (lambda f: recipe(f, str(f / "base"), str(f / "one")), ["/two is no model that"]),
        (lambda f: write(llama_model(seed=9), f / "base"),
         ["the merged model", "was not tuned from --base"]),
        (lambda f: write(llama_model(seed=9), f / "two"),
         ["--expert two=", "/two was not tuned from --base"]),
        (widen, ["expert 'two'", "--expert two"]),
        (lambda f: write(t5_model(), f / "two"), ["expert 'two' is a 't5' model"]),
        (swap_tokens, ["has another tokenizer", "2 of 23 tokens differ"]),
        (unlink_tokenizers, ["no tokenizer in ", "/merged: name its folder by --tokenizer"]),
        (lambda f: leave(f / "out.blocks" / "one"), ["go on with --resume, or remove it"]),
        (lambda f: leave(f / "out" / "model.safetensors"), ["exists and is not empty"]),
        (lambda f: (f / "two.jsonl").unlink(), ["does not exist"]),
        (lambda f: leave(f / "two.jsonl"), ["two.jsonl' is empty"]),
        (lambda f: leave(f / "one.jsonl", '{"prompt": "a"\nnonsense'),
         ["--data one=", "one.jsonl: data", "is not readable as json"]),
        (remove_model, ["--expert two=", "/two: there is no such file or folder here"]),
        (empty_model, ["has no config.json"]),
        (rename_weights, ["only safetensors are read"]),
        (lambda f: change_config(f / "merged", {"architectures": ["MyOwn"]}),
         ["names the class MyOwn"]),
    ],
)  # fmt: skip
def test_models_and_data_that_do_not_fit(folder, capsys, prepare, messages):
    prepare(folder)
    line = refusal(capsys, words(folder))
    assert all(message in line for message in messages), line


def test_an_expert_of_another_base_may_be_allowed(folder, capsys):
    write(llama_model(seed=9), folder / "two")
    assert main(words(folder, "--any-base")) == 2
    assert "AssertionError" in capsys.readouterr().err  # it would be loaded


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": None, "id": 1}, "a text is a row with prompt (and target), with messages"),
        ({"prompt": 3.5}, "prompt is float, not a text"),
        ({"prompt": " ", "target": "a"}, "the text is empty"),
        ({"prompt": "a", "target": " "}, "the target is empty"),
        ({"prompt": "a", "response": " "}, "the target is empty"),
        ({"prompt": "a", "output": "b", "answer": "c"}, "which of output, answer is the answer?"),
        ({"messages": [{"role": "user", "content": "a"}]}, "--chat-template FILE"),
    ],
)
def test_rows_that_are_no_texts(folder, capsys, row, message):
    write_rows(folder / "one.jsonl", [row] * 10)
    line = refusal(capsys, words(folder))
    assert message in line and "--data one" in line and "item" in line


def test_targets_of_some_rows_only(folder, capsys):
    rows = sentences("one", 10)
    write_rows(folder / "one.jsonl", [*rows[:-1], {"prompt": "a b"}])
    line = refusal(capsys, [*words(folder), "--no-eval"])
    assert "no target, as in 1 of 10 rows" in line and "item 9" in line


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "one.jsonl has the columns q, a, of which none is usual: say what they hold, such as "
         "--columns prompt=q,target=a"),
        (["--columns", "prompt=Q"], "has no column 'Q'"),
        (["--columns", "one:prompt=q,answer=a"], "--columns: unknown key 'answer'"),
        (["--columns", "three:prompt=q"], "no expert is called 'three'. Experts: one, two"),
        (["--columns", "q"], "--columns: expected NAME=VALUE, got 'q'"),
    ],
)  # fmt: skip
def test_columns_of_other_names(folder, capsys, more, message):
    write_rows(folder / "one.jsonl", [{"q": "a b", "a": "c"}] * 10)
    assert message in refusal(capsys, [*words(folder), *more])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--chat-template", "none.jinja"],
            "--chat-template cannot be read: [Errno 2] No such file or directory: 'none.jinja'",
        ),
        (["--set", "ridge_lamda=1"], "nearest: 'ridge_lambda'"),
        (["--set", "ridge_lambda=-1"], "--set ridge_lambda must be"),
        (["--set", "resume=true"], "--set resume: use --resume"),
        (["--set", "family=llamma"], "--set family must be"),
        (["--set", "modules=[nothing]"], "matches no module"),
        (["--prompt", "a photo"], "has no {} for the class name"),
        (["--merge", "simple_average"], "merged already, and --merge merges: leave one of"),
        (["--device", "cuda:99"], "--device cuda:99 cannot be used: "),
        (["--device", "gpu"], "--device gpu cannot be used: "),
        (["--prompt", "a {}"], "--prompt is for CLIP, these models read texts"),
        (["--text-tower", "base"], "--text-tower is for CLIP, these models read texts"),
        (["--base", "./nowhere"], "--base ./nowhere: there is no such file or folder here"),
        (
            ["--data", "thwo=x.jsonl"],
            "--data: no expert is called 'thwo' (nearest: 'two'). ",
        ),
        (["--eval", "one=nothing.jsonl"], "--eval one=nothing.jsonl cannot be loaded: data"),
        (["--eval", "one=nothing.jsnl"], "data 'nothing.jsnl' does not exist: neither a file"),
        (["--expert", "three"], "--expert: expected NAME=VALUE, got 'three'"),
        (["--set", "modules=[&a x, *a]"], "has the alias *a"),
        (["--set", "seed=!!bool x"], "KeyError('x')"),
        (["--base", "one.jsonl"], "one.jsonl is a file: name the folder that the model is in"),
    ],
)
def test_options(folder, capsys, monkeypatch, more, message):
    monkeypatch.chdir(folder)
    assert message in refusal(capsys, [*words(folder), *more])


@pytest.mark.parametrize("name", UNUSABLE_NAMES)
def test_names_that_are_no_file_names(folder, capsys, name):
    named = [word.replace("one=", f"{name}=") for word in words(folder)]
    line = refusal(capsys, named)
    assert "featcal: error: --expert: " in line and repr(name[:100]) in line
    assert "only in case" in line or "has a meaning" in line or "at most 100 bytes" in line


@pytest.mark.parametrize("name", ["base", "merged", "_pretrained_", "Two"])
def test_names_that_are_taken(folder, capsys, name):
    line = refusal(capsys, [word.replace("one=", f"{name}=") for word in words(folder)])
    expected = "only in case" if name == "Two" else "has a meaning already"
    assert expected in line and "Choose another" in line


def test_names_of_mergekit_are_checked_as_well(folder, capsys):
    (folder / "one").rename(folder / "average")
    recipe(folder, str(folder / "base"), str(folder / "average"), str(folder / "two"))
    line = refusal(capsys, ["calibrate", str(folder / "merged"), "--out", str(folder / "out")])
    assert "the name 'average' has a meaning already" in line


def test_nothing_to_begin_with(folder, capsys):
    line = refusal(capsys, words(folder, merged=None))
    assert "give MERGED, the merged model's folder or a recipe.yaml, or --merge HOW" in line
    assert main(["calibrate"]) == 2
    assert "error: give MERGED, " in capsys.readouterr().err
    line = refusal(capsys, words(folder, "--merge", "task_arithmetik:1", merged=None))
    assert "got 'task_arithmetik:1'" in line and "method@method.base_method=..." in line


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "merged/config.json", "merged"])
def test_a_merged_model_without_experts(folder, capsys, monkeypatch, name):
    monkeypatch.chdir(folder)
    line = refusal(capsys, ["calibrate", name, "--out", str(folder / "out")])
    problem = f"MERGED {name}: there is no such folder"
    if name == "merged":
        problem = "has no mergekit_config.yml: give --base"
    assert problem in line and "--expert NAME=" in line


def test_an_expert_without_data(folder, capsys):
    named = words(folder)
    at = named.index(f"two={folder / 'two.jsonl'}")
    assert "no data of two" in refusal(capsys, named[: at - 1] + named[at + 1 :])


def test_an_adapter_that_cannot_be_read(folder, capsys):
    write_adapters(folder, t5_model())
    config = json.loads((folder / "two-lora" / "adapter_config.json").read_text())
    text = json.dumps(config | {"lora_bias": True})
    (folder / "two-lora" / "adapter_config.json").write_text(text)
    named = words(folder)
    named[named.index(f"two={folder / 'two'}")] = f"two={folder / 'two-lora'}"
    line = refusal(capsys, named)
    assert "with {'lora_bias': True} cannot be read" in line and "merge_and_unload" in line


TWINS = {"id2label": {0: "no", 1: "no"}, "label2id": {"no": 1}}


@pytest.mark.parametrize(
    ("labels", "config", "message"),
    [
        ([True], {}, "has no class 'True'; it has no, yes"),
        ([-1], {}, "label -1, but the expert's head has 2 classes"),
        (["perhaps"], {}, "the expert's head has no class 'perhaps'; it has no, yes"),
        ([2], {}, "label 2, but the expert's head has 2 classes"),
        ([-100], {}, "label -100, but the expert's head has 2 classes"),
        (["1", "2"], {}, "label 2, but the expert's head has 2 classes"),
        ([0], {"label2id": {"no": 0, "yes": 0}}, "id2label and label2id of its config.json do not"),
        ([0], {"label2id": {"no": 1, "yes": 0}}, "id2label and label2id of its config.json do not"),
        ([0], {"id2label": {0: "no", 1: "no"}}, "id2label and label2id of its config.json do not"),
        (["no"], TWINS, "the expert's head has several classes 'no'; it has no, no"),
    ],
)
def test_labels_that_do_not_fit_the_head(tmp_path, capsys, monkeypatch, labels, config, message):
    classifier_folders(tmp_path)
    _unloadable(tmp_path, monkeypatch)
    change_config(tmp_path / "one", config)
    write_labels(tmp_path / "one.jsonl", labels)
    line = refusal(capsys, words(tmp_path))
    assert (
        message in line and ("--expert one" if "id2label and" in message else "--data one") in line
    )


@pytest.mark.parametrize(
    ("labels", "config", "note"),
    [
        (["yes", "no"], {}, None),
        (["0", "1"], {}, None),
        (["YES", "No"], {"label2id": {"LABEL_0": 0, "LABEL_1": 1}}, None),
        (["a", "A"], {"id2label": {0: "A", 1: "a"}, "label2id": {"A": 0, "a": 1}}, None),
        (["b", "a"], {"id2label": None, "label2id": None}, "the data's are taken as a=0, b=1"),
        (["c_10", "c_9"], {"id2label": None, "label2id": None}, "are taken as c_9=0, c_10=1"),
        ([0.0, 1.0], {"id2label": None, "label2id": None}, None),
        ([0, 1], TWINS, None),
    ],
)
def test_labels_that_fit_the_head(tmp_path, capsys, monkeypatch, labels, config, note):
    classifier_folders(tmp_path)
    _unloadable(tmp_path, monkeypatch)
    change_config(tmp_path / "one", config)
    write_labels(tmp_path / "one.jsonl", labels)
    main(words(tmp_path))
    printed = capsys.readouterr()
    assert "AssertionError" in printed.err  # by then all checks have passed
    assert ("has no class names" in printed.out) == (note is not None)
    assert note is None or note in printed.out


@pytest.mark.parametrize(
    ("pair", "message"), [(None, "'text_pair': 'NoneType'"), ("a b c " * 500, "AssertionError")]
)
def test_second_texts(tmp_path, capsys, monkeypatch, pair, message):
    classifier_folders(tmp_path)
    _unloadable(tmp_path, monkeypatch)
    rows = [
        {"text": "a", "text_pair": pair, "label": 0},
        {"text": "b", "text_pair": "a", "label": 0},
    ]
    write_rows(tmp_path / "one.jsonl", rows * 8)
    main(words(tmp_path))
    assert message in capsys.readouterr().err


def test_labels_of_adapters_are_those_of_the_base(tmp_path, capsys, monkeypatch):
    write_adapters(tmp_path, classifier_folders(tmp_path)["base"])
    _unloadable(tmp_path, monkeypatch)
    write_labels(tmp_path / "one.jsonl", [0, 1])
    named = words(tmp_path)
    named[named.index(f"one={tmp_path / 'one'}")] = f"one={tmp_path / 'one-lora'}"
    main(named)
    assert "AssertionError" in capsys.readouterr().err  # by then all checks have passed


def change_config(model: Path, changes: dict[str, Any]) -> None:
    """Change keys of a model's config.json; those that become None are removed."""
    content = json.loads((model / "config.json").read_text()) | changes
    kept = {name: value for name, value in content.items() if value is not None}
    (model / "config.json").write_text(json.dumps(kept))


def write_labels(file: Path, labels: list[Any], rows: int = 24) -> None:
    """Write texts of a classifier with these labels in turn."""
    texts = [row["prompt"] for row in sentences("one", rows)]
    write_rows(file, [{"text": t, "label": labels[n % len(labels)]} for n, t in enumerate(texts)])
