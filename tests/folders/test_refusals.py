"""`featcal calibrate` refuses what cannot work in one line, before any weights are loaded."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from made_folders import classifier_folders, llama_folders, write_adapters, write_rows
from model_names import UNUSABLE_NAMES
from test_calibrate_command import words
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
    content = {
        "merge_method": "ties",
        "base_model": base,
        "models": [{"model": e} for e in experts],
    }
    (folder / "merged" / "mergekit_config.yml").write_text(json.dumps(content))


def test_another_base_than_mergekit_names(folder, capsys):
    recipe(folder, str(folder / "two"), str(folder / "one"))
    line = refusal(capsys, words(folder))
    assert f"--base {folder / 'base'} is not the base" in line and str(folder / "two") in line


def test_an_expert_that_mergekit_does_not_name(folder, capsys):
    recipe(folder, str(folder / "base"), str(folder / "one"))
    line = refusal(capsys, words(folder))
    assert f"--expert two={folder / 'two'} is no model" in line


def test_a_merged_model_of_another_base(folder, capsys):
    write(llama_model(seed=9), folder / "base")
    line = refusal(capsys, words(folder))
    assert "the merged model" in line and "was not tuned from --base" in line


def test_an_expert_of_another_base(folder, capsys):
    write(llama_model(seed=9), folder / "two")
    line = refusal(capsys, words(folder))
    assert f"--expert two={folder / 'two'} was not tuned from --base" in line
    assert main(words(folder, "--any-base")) == 2
    assert "AssertionError" in capsys.readouterr().err  # it would be loaded


def test_an_expert_of_another_size(folder, capsys):
    from tiny_models import decoder_model

    wide = decoder_model(vocab_size=len(WORDS), hidden_size=16, intermediate_size=12)
    write(wide, folder / "two")
    line = refusal(capsys, words(folder))
    assert "expert 'two'" in line and "--expert two" in line


def test_an_expert_of_another_architecture(folder, capsys):
    write(t5_model(), folder / "two")
    line = refusal(capsys, words(folder))
    assert "expert 'two' is a 't5' model" in line


def test_another_tokenizer(folder, capsys):
    swapped = (*WORDS[:3], WORDS[4], WORDS[3], *WORDS[5:])
    word_tokenizer(words=swapped).save_pretrained(folder / "two")
    line = refusal(capsys, words(folder))
    assert "has another tokenizer" in line and "2 of 23 tokens differ" in line


def test_no_tokenizer(folder, capsys):
    for file in folder.glob("*/*token*"):
        file.unlink()
    line = refusal(capsys, words(folder))
    assert f"no tokenizer in {folder / 'merged'}: name its folder by --tokenizer" in line


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": None, "id": 1}, "a text is a row with prompt (and target), with messages"),
        ({"prompt": 3}, "prompt is int, not a text"),
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
        (["--columns", "three:prompt=q"], "--columns, by expert: unknown key 'three'"),
        (["--columns", "q"], "--columns: expected NAME=VALUE, got 'q'"),
    ],
)  # fmt: skip
def test_columns_of_other_names(folder, capsys, more, message):
    write_rows(folder / "one.jsonl", [{"q": "a b", "a": "c"}] * 10)
    assert message in refusal(capsys, [*words(folder), *more])


def test_rows_of_another_format(folder, capsys):
    (folder / "one.jsonl").write_text('{"prompt": "a"\nnonsense')
    line = refusal(capsys, words(folder))
    assert f"--data one={folder / 'one.jsonl'}: data" in line and "is not readable as json" in line


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--chat-template", "none.jinja"],
            "No such file or directory: 'none.jinja'",
        ),
        (["--set", "ridge_lamda=1"], "nearest: 'ridge_lambda'"),
        (["--set", "ridge_lambda=-1"], "--set ridge_lambda must be"),
        (["--set", "resume=true"], "--set resume: use --resume"),
        (["--set", "family=llamma"], "--set family must be"),
        (["--set", "modules=[nothing]"], "matches no module"),
        (["--prompt", "a photo"], "has no {} for the class name"),
        (["--merge", "simple_average"], "merged already, and --merge merges: leave one of"),
        (["--device", "cuda:99"], "CUDA"),
        (["--data", "thwo=x.jsonl"], "--data, by expert: unknown key 'thwo' (nearest: 'two')"),
        (["--eval", "one=nothing.jsonl"], "--eval one=nothing.jsonl cannot be loaded: data"),
        (["--eval", "one=nothing.jsnl"], "data 'nothing.jsnl' does not exist: neither a file"),
        (["--expert", "three"], "--expert: expected NAME=VALUE, got 'three'"),
    ],
)
def test_options(folder, capsys, more, message):
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
    data = [word for n in ("average", "two") for word in ("--data", f"{n}={folder / 'two.jsonl'}")]
    out = ["--out", str(folder / "out")]
    line = refusal(capsys, ["calibrate", str(folder / "merged"), *data, *out])
    assert "the name 'average' has a meaning already" in line


def test_nothing_to_begin_with(folder, capsys):
    line = refusal(capsys, words(folder, merged=None))
    assert "give MERGED, the merged model's folder or a recipe.yaml, or --merge HOW" in line
    assert main(["calibrate"]) == 2
    assert "error: give MERGED, " in capsys.readouterr().err
    line = refusal(capsys, words(folder, "--merge", "task_arithmetik:1", merged=None))
    assert "got 'task_arithmetik:1'" in line and "method@method.base_method=..." in line


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "merged/config.json"])
def test_a_merged_model_that_is_not_there(folder, capsys, monkeypatch, name):
    monkeypatch.chdir(folder)
    line = refusal(capsys, ["calibrate", name, "--out", str(folder / "out")])
    assert f"MERGED {name}: there is no such folder" in line and "--expert NAME=ID" in line


def test_a_merged_model_without_experts(folder, capsys):
    line = refusal(capsys, ["calibrate", str(folder / "merged"), "--out", str(folder / "out")])
    assert "has no mergekit_config.yml: give --base and --expert NAME=DIR" in line


def test_blocks_of_an_interrupted_run(folder, capsys):
    (folder / "out.blocks").mkdir()
    (folder / "out.blocks" / "one").write_text("")
    assert "go on with --resume, or remove it" in refusal(capsys, words(folder))


def test_an_expert_without_data(folder, capsys):
    named = words(folder)
    at = named.index(f"two={folder / 'two.jsonl'}")
    assert "no data of two" in refusal(capsys, named[: at - 1] + named[at + 1 :])


def test_data_that_is_not_there(folder, capsys):
    (folder / "two.jsonl").unlink()
    assert "does not exist" in refusal(capsys, words(folder))


def test_data_without_rows(folder, capsys):
    (folder / "two.jsonl").write_text("")
    assert "two.jsonl' is empty" in refusal(capsys, words(folder))


def test_a_folder_that_is_not_empty(folder, capsys):
    (folder / "out").mkdir()
    (folder / "out" / "model.safetensors").write_text("")
    assert "exists and is not empty" in refusal(capsys, words(folder))


def test_a_place_that_is_no_model(folder, capsys):
    shutil.rmtree(folder / "two")
    line = refusal(capsys, words(folder))
    assert f"--expert two={folder / 'two'}: there is no such file or folder here" in line
    (folder / "two").mkdir()
    assert "has no config.json" in refusal(capsys, words(folder))


def test_a_file_is_no_model(folder, capsys):
    file = folder / "one" / "model.safetensors"
    line = refusal(capsys, [*words(folder), "--base", str(file)])
    assert f"--base {file} is a file: name the folder that the model is in" in line


def test_weights_of_another_format(folder, capsys):
    (folder / "two" / "model.safetensors").rename(folder / "two" / "pytorch_model.bin")
    assert "only safetensors are read" in refusal(capsys, words(folder))


def test_a_class_that_transformers_lacks(folder, capsys):
    file = folder / "merged" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": ["MyOwn"]}))
    assert "names the class MyOwn" in refusal(capsys, words(folder))


def test_an_adapter_of_another_base(folder, capsys):
    write_adapters(folder, t5_model())
    shutil.copytree(folder / "one-lora", folder / "x-lora")
    config = json.loads((folder / "x-lora" / "adapter_config.json").read_text())
    (folder / "x-lora" / "adapter_config.json").write_text(json.dumps(config | {"lora_bias": True}))
    named = [
        word.replace(f"two={folder / 'two'}", f"two={folder / 'x-lora'}")
        if word == f"two={folder / 'two'}"
        else word
        for word in words(folder)
    ]
    line = refusal(capsys, named)
    assert "with {'lora_bias': True} cannot be read" in line and "merge_and_unload" in line


TWINS = {"id2label": {0: "no", 1: "no"}, "label2id": {"no": 1}}


@pytest.mark.parametrize(
    ("labels", "config", "message"),
    [
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
