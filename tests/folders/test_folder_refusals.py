"""`featcal calibrate` refuses files and options in one line, before it loads a model."""

import json
import math
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_folders import change_json, words, write_rows
from PIL import Image
from reports import error_of, featcal
from safetensors.torch import load_file, save_file
from tiny_models import model_of
from tiny_texts import WORDS, llama_model, sentences, word_tokenizer, write, write_adapter

from fusion_bench_featcal import CalibrationError, calibrate_folder

MERGE_CONFIG = "merged/mergekit_config.yml"
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
                change_json(path, value)
            elif path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def merge_config(method: str, *experts: Any, **more: Any) -> dict[str, str]:
    """A mergekit config beside the merged model."""
    content = {"merge_method": method, "models": [{"model": name} for name in experts]}
    return {MERGE_CONFIG: json.dumps(content | more)}


def wider_llama(path: Path) -> None:
    write(model_of(vocab_size=len(WORDS), hidden_size=16), path, word_tokenizer())


def longer_rows(path: Path) -> None:
    numbers: Any = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 8}
    wider = model_of(vocab_size=len(WORDS), intermediate_size=16, **numbers)
    write(wider, path, word_tokenizer())


def other_words(path: Path) -> None:
    word_tokenizer(words=(*WORDS[:3], WORDS[4], WORDS[3], *WORDS[5:])).save_pretrained(path)


def sixteen_bits(path: Path) -> None:
    Image.fromarray(np.full((28, 28), 5000, np.uint16)).save(path)


def adapter_beside(path: Path) -> None:
    write_adapter(path, llama_model(), 0)


def pointer(path: Path) -> None:
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{64 * 'a'}\nsize 9\n")


def moved(path: Path, inside: str) -> None:
    path.rename(path.with_name("former"))
    (path / inside).parent.mkdir(parents=True)
    path.with_name("former").rename(path / inside)


def arguments(folder: Path, options: Mapping[str, Any]) -> list[str]:
    more = shlex.split(options.get("more", ""))
    return words(folder, *more, **{key: v for key, v in options.items() if key != "more"})


# --- tables of refusals: kind of models, changed files, options, parts of the message ---

Case = tuple[str, dict[str, Any], dict[str, Any], list[str]]
OPTIONS: list[Case] = [
    ("llama", {}, options, [message])
    for options, message in [
        ({"more": "--preset paper --set task_weights='{one: 2}'"}, "or choose --preset plus"),
        ({"more": "--preset plus --set ridge_lambda=1"}, "default, or choose --preset paper"),
        ({"merged": None}, "give MERGED, the merged model's folder, or --merge HOW"),
        ({"more": "--merge task_arithmetik:1", "merged": None}, "got 'task_arithmetik:1'"),
        ({"more": "--merge task_arithmetic:-1", "merged": None}, "with a scale above 0, got "),
        ({"data": ["one.jsonl"]}, "no data for two"),
        ({"more": "--data two=one.jsonl"}, "--data has two twice, "),
        ({"more": "--expert one=two"}, "--expert has one twice, "),
        ({"more": "--eval one=a --eval one=b"}, "--eval has one twice, a and b: leave one of them"),
        ({"more": "--prompt {} --prompt 'a {}'"}, "--prompt has for all tasks twice, {} and a {}"),
        ({"more": "--columns prompt=a --columns prompt=c"}, "--columns has prompt twice, a and c"),
        (NO_MODELS, "has no mergekit_config.yml: give --base"),
    ]
]
MODELS: list[Case] = [
    ("llama", {"two": None}, {}, ["--expert two=", "/two: there is no such file or folder here"]),
    ("llama", {"two": wider_llama}, {},
     ["expert 'two'", "num_attention_heads=4 instead of 2", "Check its folder"]),
    ("llama", {"base": wider_llama}, {},
     ["--base ", "/base computes a different function than the merged"]),
    ("llama", {"base/config.json": {"model_type": "gpt2"}}, {},
     ["--base ", "/base is a 'gpt2' model, but the merged model ", "is a 'llama' model"]),
    ("llama", {"base": wider_llama}, {"merged": None, "more": "--merge simple_average"},
     ["expert 'one' computes a different function than --base ",
      "num_attention_heads=2 instead of 4"]),
    ("llama", {"base": longer_rows}, {},
     ["--base ", "'model.layers.0.mlp.gate_proj.weight' has shape (16, 8), but the merged "]),
    ("llama", {"base": longer_rows}, {"merged": None, "more": "--merge simple_average"},
     ["expert 'one': tensor ", "--base ", "/base's has (16, 8)"]),
    ("bert", {"one/config.json": {"architectures": ["BertModel"]}},
     {"merged": None, "more": "--merge simple_average"},
     ["--expert one=", "/one is of kind encoder, but --base ",
      "/base is of kind text classifier: "]),
    ("llama", {"two": other_words}, {}, ["has a different tokenizer", "2 of 23 tokens differ"]),
    ("llama", {"two": adapter_beside}, {}, ["--expert two=", "two has two models"]),
    ("llama", {"two": lambda path: pointer(path / "model.safetensors")}, {},
     ["--expert two=", "two/model.safetensors is a git-lfs pointer", "run git lfs pull"]),
    ("llama", {"base": lambda path: pointer(path / "tokenizer.json")}, {},
     ["--base ", "base/tokenizer.json is a git-lfs pointer"]),
    ("llama", {"two": lambda path: moved(path, "snapshots/0123abcd")}, {},
     ["no config.json, so it is not a model. Name the model inside: ", "two/snapshots/0123abcd"]),
    ("llama", {"two": lambda path: moved(path, "checkpoint-20")}, {},
     ["no config.json, so it is not a model. Name the model inside: ", "two/checkpoint-20"]),
    ("llama", {"two/*": None, "two/adapter_config.json": '{"peft_type": "PROMPT_TUNING"}'}, {},
     ["--expert two=", "PROMPT_TUNING learns a prompt", "not in the weights", "nothing to merge"]),
    ("llama", {"two/config.json": {"quantization_config": {"quant_method": "gptq"}}}, {},
     ["--expert two=", "two/config.json has a quantization_config (gptq)"]),
    ("llama", {"*/*token*": None}, {},
     ["no tokenizer in ", "/merged: name its folder with --tokenizer"]),
    ("llama", {"out.blocks/one": ""}, {}, ["continue with --resume, or remove it"]),
    ("llama", {MERGE_CONFIG: "models: !!python/name:os.system ''"}, NO_MODELS,
     [MERGE_CONFIG, "line 1: could not determine a constructor"]),
    ("llama", {MERGE_CONFIG: "merge_method: linear\nmodels: [\a]"}, NO_MODELS,
     [MERGE_CONFIG, "special characters are not allowed"]),
    ("llama", {"merged/config.json": {"architectures": 5}}, {},
     ["merged/config.json has no architectures. Write its class there"]),
    ("llama", {"merged/config.json": {"architectures": ["logging"]}}, {},
     ["names the class logging"]),
    ("llama", {"two/config.json": {"layer_types": 5}}, {}, ["two", "layer_types (5)"]),
    ("llama", {"two": None} | merge_config("linear", "one", "two", base_model="base"), NO_MODELS,
     ["--expert two=two (named by ", "--expert NAME=DIR for every expert overrides"]),
    ("llama", merge_config("slerp", "one", "two", base_model="one"),
     NO_MODELS | {"more": "--preset paper"}, ["--base is missing", "--set anchor_rho=1"]),
]  # fmt: skip

EXTREMES: list[Case] = [
    (kind, {}, {"more": f"--set {setting}", "data": data}, [message])
    for kind, data, setting, message in [
        ("vit", "{}-images", "max_length=10", "--set max_length has no effect on a model"),
        ("vit", "{}-images", "generated_tokens=3", "of kind image classifier: leave"),
        ("bert", "{}.jsonl", "calibration_targets=generated", "of kind text classifier: leave"),
        ("vit", "{}-images", "calibration_corruption=null", "is unknown"),
        ("llama", "{}.jsonl", "ridge_lambda=1e13", "ridge_lambda must be a finite number >= 0"),
    ]
]

TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
ROW = ["--data one", "one.jsonl, line "]
DATA: list[Case] = [
    ("llama", {"two.jsonl": None}, {}, ["--data two=", "there is no such file or folder here"]),
    ("llama", {"two.jsonl": ""}, {}, ["two.jsonl has no examples"]),
    *(("llama", {f"two.{end}": pointer}, {"data": ["one.jsonl", f"two.{end}"]},
       ["--data two=", f"two.{end} is a git-lfs pointer", "run git lfs pull in the folder"])
      for end in ("jsonl", "csv", "parquet")),
    ("llama", {"one.jsonl": '{"prompt": "a"\nnonsense'}, {},
     ["--data one=", "one.jsonl' is not readable as jsonl: line 1: "]),
    ("llama", {"one.jsonl": [{"prompt": None, "id": 1}]}, {},
     [*ROW, ": an example needs prompt (and target), messages"]),
    ("llama", {"one.jsonl": [*sentences("one", 11), {"prompt": "a b"}]}, {"more": "--no-eval"},
     [*ROW, "1 of 12 examples have no target"]),
    ("llama", {"one.jsonl": [{"q": "a b", "a": "c"}]}, {"more": "--columns prompt=Q"},
     ["one.jsonl has the columns q, a, so prompt=Q is wrong: name them with --columns "
      "[NAME:]prompt=COLUMN,target=COLUMN"]),
    ("llama", {"one.jsonl": [{"messages": TURNS}]}, {}, [*ROW, "--chat-template FILE"]),
    ("llama", {"*.jsonl": [{"messages": TURNS}], "merged/tokenizer_config.json":
               {"chat_template": "{{ messages.__class__.__mro__ }}"}}, {},
     [*ROW, "the tokenizer's chat template cannot be used: ", "access to attribute '__class__'"]),
    ("llama", {"one.jsonl": [{"prompt": "a", "target": "b \ud800"}]}, {},
     ["--data one", "line 1: ", "surrogates not allowed"]),
    ("llama", {"one.jsonl": '[{"prompt": "a", "target": "\\udC00"}]'}, {},
     ["--data one", "is not readable as jsonl: ", "surrogates not allowed"]),
    ("llama", {"one.jsonl": [{"prompt": "a", "target": ""}]}, {},
     [*ROW, "remove the example, or use --set calibration_targets=generated"]),
    ("vit", {"one-images/circle/00.png": sixteen_bits}, {"data": "{}-images", "more": "--plan"},
     ["data '", "one-images', example ",
      "00.png cannot be read as an image (mode I;16: store it with 8"]),
    ("vit", {"one-images/circle/00.png": lambda p: p.write_bytes(b"GIF")},
     {"data": "{}-images", "more": "--plan"}, ["00.png cannot be read as an image (cannot ident"]),
    ("vit", {"one-images/circle": lambda p: p.rename(p.parent / "fit")},
     {"data": ["one-images:fitt", "two-images"]},
     ["--data one=", "no folder for split 'fitt' (nearest: 'fit')"]),
    ("bert", {"one.jsonl": [{"text": "a b", "label": label} for label in ([0, 1], 0)]}, {},
     [*ROW, "label [0, 1] is not one of the 2 classes"]),
    ("bert", {"one.jsonl": [{"text": "a b", "label": 0.85}]}, {},
     [*ROW, "label 0.85 is not one of the 2 classes"]),
    ("bert", {"one.jsonl": [{"text": "a b", "label": "perhaps"}]}, {},
     ["--data one=", "label 'perhaps' is not one of the 2 classes of the expert's head: no, yes"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "files", "options", "messages"), [*OPTIONS, *MODELS, *DATA, *EXTREMES]
)
def test_refused(copied, refusal, monkeypatch, kind, files, options, messages):
    folder = copied(kind)
    monkeypatch.chdir(folder)
    change(folder, files)
    line = refusal(arguments(folder, options))
    assert all(message in line for message in messages), line
    assert len(line) < 600


@pytest.mark.parametrize(("more", "note"), [
    ("--merge task_arithmetic:30",
     "task_arithmetic:30 moves 30 times as far from the base as each expert"),
    ("--merge task_arithmetic:0.3", ""),
    ("--preset paper --set ridge_lambda=1e9", "--set ridge_lambda=1e+09 is very large: Gram"),
    ("--preset paper --set anchor_rho=-500", "the anchor is 500 times as far from the base"),
    ("--preset paper --set ridge_lambda=0.5", ""),
])  # fmt: skip
def test_numbers_that_are_rarely_meant_are_noted(made, tmp_path, more, note):
    merged = None if "--merge" in more else "merged"
    folder, _ = made("llama")
    out = ["--out", str(tmp_path / "out")]
    done = featcal(*words(folder, *out, "--plan", *more.split(), merged=merged))
    assert done.code == 0, done.err
    texts = ("times as far", "very large")
    assert sum(text in done.out for text in texts) == bool(note) and note in done.out


def test_a_base_with_nan_is_named_as_the_option(folder, capsys):
    file = folder / "base" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = math.nan
    save_file(tensors, file, {"format": "pt"})
    line = error_of(*words(folder, "--no-eval"))
    assert line.startswith("--base: tensor 'model.layers.0.mlp.up_proj.weight' has NaN")


def test_a_column_twice_in_one_word_is_refused(folder):
    done = featcal(*words(folder, "--columns", "one:prompt=a,prompt=c"))
    assert done.code == 2 and "'one:prompt=a,prompt=c' names a column twice" in done.err


def test_a_name_twice_in_a_recipe_is_refused(tmp_path, refusal):
    (tmp_path / "mine.yaml").write_text("data: {one: a, two: b, one: c}")
    out = str(tmp_path / "out")
    line = refusal(["calibrate", "--config", str(tmp_path / "mine.yaml"), "--out", out])
    assert "mine.yaml cannot be read: line 1: the key 'one' appears twice" in line


def test_keys_of_recipes_and_of_python(made, tmp_path, refusal):
    (tmp_path / "mine.yaml").write_text("bases: base")
    out = str(tmp_path / "out")
    line = refusal(["calibrate", "--config", str(tmp_path / "mine.yaml"), "--out", out])
    assert "mine.yaml: bases is unknown (nearest: 'base')" in line
    folder, _ = made("llama")
    options: Any = {"expert": {task: folder / task for task in ("one", "two")}, "out": out}
    options["data"] = {task: folder / f"{task}.jsonl" for task in ("one", "two")}
    options |= {"base": folder / "base", "set": {"modules": ["nothing"]}}
    with pytest.raises(CalibrationError, match=r"^--set modules='nothing' matches no module"):
        calibrate_folder(folder / "merged", **options)
    assert not (tmp_path / "out").exists()
