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
from made_folders import CLASSES, datasets_on_disk, words, write_rows
from reports import featcal
from tiny_models import model_of
from tiny_texts import (
    WORDS,
    causal_pool,
    llama_model,
    sentences,
    word_tokenizer,
    write,
    write_adapter,
)
from transformers import BartConfig, BartModel

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.experts.model_config import IS_RELEASE_4, open_config
from fusion_bench_featcal.folders import calibrate_folder
from fusion_bench_featcal.fusionbench import PoolModel

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


def encoder_decoder(path: Path) -> None:
    sizes = {f"{side}_{name}": 2 for side in ("encoder", "decoder")
             for name in ("layers", "attention_heads", "ffn_dim")}  # fmt: skip
    BartModel(BartConfig(vocab_size=60, d_model=8, **sizes)).save_pretrained(path)  # type: ignore[arg-type]


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def adapter_beside(path: Path) -> None:
    write_adapter(path, llama_model(), 0)


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
def test_options(made, refusal, monkeypatch, options, message):
    folder, _ = made("llama")
    monkeypatch.chdir(folder)
    assert message in refusal(arguments(folder, options))


def test_keys_of_recipes_and_of_python(made, tmp_path, refusal):
    (tmp_path / "mine.yaml").write_text("bases: base")
    out = str(tmp_path / "out")
    line = refusal(["calibrate", "--config", str(tmp_path / "mine.yaml"), "--out", out])
    assert "mine.yaml: bases is unknown (nearest: 'base')" in line
    folder, _ = made("llama")
    options: Any = {key: {task: str(folder / task) + end for task in ("one", "two")}
                    for key, end in (("expert", ""), ("data", ".jsonl"))}  # fmt: skip
    options |= {"base": folder / "base", "out": out}
    for more, message in (
        ({"bse": "base"}, r"calibrate_folder: bse is unknown \(nearest: 'base'"),
        ({"set": {"modules": ["nothing"]}}, r"^--set modules: 'nothing' matches no module"),
        ({"set": {"samples_per_task": 0}}, r"^--set samples_per_task must be"),
    ):
        with pytest.raises((ValueError, CalibrationError), match=message):
            calibrate_folder(folder / "merged", **options, **more)
    assert not (tmp_path / "out").exists()


# --- files that are changed: kind of models, files, options, parts of the message ---

Refused = tuple[str, dict[str, Any], dict[str, Any], list[str]]
QUANTIZED = {"quantization_config": {"quant_method": "gptq"}}
BACKEND: dict[str, Any] = {"tokenizer_class": "TokenizersBackend", "backend": "tokenizers"}
OF_5 = ["written by transformers 5", '"tokenizer_class": "PreTrainedTokenizerFast"']
THETA = {"rope_type": "default", "rope_theta": 5e5}
MODELS: list[Refused] = [
    ("llama", {"two": wider_llama}, {}, ["expert 'two'", "--expert two"]),
    ("llama", {"two": other_words}, {}, ["has another tokenizer", "2 of 23 tokens differ"]),
    ("llama", {"*/*token*": None}, {},
     ["no tokenizer in ", "/merged: name its folder by --tokenizer"]),
    ("llama", {"out.blocks/one": ""}, {}, ["go on with --resume, or remove it"]),
    ("llama", {"two": None}, {}, ["--expert two=", "/two: there is no such file or folder here"]),
    ("llama", {"two/config.json": pipe}, {}, ["/two/config.json is not a regular file"]),
    ("llama", {"merged/config.json": f'{{"a": {NESTED}}}'}, {}, ["/merged"]),
    ("llama", {"merged": adapter_beside}, {},
     ["merged has two models", "adapter_config.json", "model.safe"]),
    ("llama", {"two": adapter_beside}, {}, ["--expert two=", "two has two models"]),
    ("llama", {"two/config.json": {"architectures": None}}, {},
     ["--expert two=", "config.json has no archit"]),
    ("llama", {"two/config.json": QUANTIZED}, {},
     ["--expert two=", "two/config.json has a quantization_config (gptq)"]),
    *([("llama", {TOKENIZER: BACKEND}, {}, OF_5),
       ("llama", {"two/tokenizer_config.json": BACKEND}, {}, ["two", *OF_5]),
       ("llama", {TOKENIZER: {"extra_special_tokens": ["<a>"]}}, {}, OF_5),
       ("llama", {"merged/config.json": {"rope_parameters": THETA}}, {},
        ["config.json has rope_parameters"])] if IS_RELEASE_4 else []),
]  # fmt: skip

CONFIGS = {
    f"#{'x' * 2**20}\nmodels: [x]": "is larger than 1,024 KiB",
    "models: !!python/name:os.system ''": "line 1: could not determine a constructor",
    "models: 5": "models is 5, not a list",
}
MERGE_CONFIGS: list[Refused] = [
    *[("llama", {MERGE_CONFIG: text}, NO_MODELS, [MERGE_CONFIG, message])
      for text, message in CONFIGS.items()],
    ("llama", merge_config("slerp", "one", "two", base_model="one"),
     NO_MODELS | {"more": "--preset paper"}, ["--base is missing", "--set anchor_rho=1"]),
]  # fmt: skip

TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
TEMPLATES = {
    "{% for i in range(9999999) %}{% endfor %}": "Range too big",
    "{{ messages.__class__.__mro__ }}": "access to attribute '__class__'",
}
ROW = ["--data one", "one.jsonl, line "]
QUESTIONS = {"one.jsonl": [{"q": "a b", "a": "c"}]}
DATA: list[Refused] = [
    ("llama", {"two.jsonl": None}, {}, ["--data two=", "there is no such file or folder here"]),
    ("llama", {"two.jsonl": ""}, {}, ["two.jsonl' is empty"]),
    ("llama", {"one.jsonl": '{"prompt": "a"\nnonsense'}, {},
     ["--data one=", "one.jsonl' is not readable as jsonl: line 1: "]),
    ("llama", {"one.jsonl": [{"prompt": None, "id": 1}]}, {},
     ["one.jsonl, line 1: a text is a row with prompt (and target), with messages"]),
    ("llama", {"one.jsonl": [{"messages": TURNS[:1]}]}, {}, [*ROW, "--chat-template FILE"]),
    ("llama", {"one.jsonl": [*sentences("one", 11), {"prompt": "a b"}]}, {"more": "--no-eval"},
     [*ROW, "no target, as in 1 of 12 rows"]),
    *[("llama", QUESTIONS, {"more": more},
       [f"one.jsonl has the columns q, a{wrong}: name them by --columns "
        "[NAME:]prompt=COLUMN,target=COLUMN"])
      for more, wrong in (("", ""), ("--columns prompt=Q", ", so prompt=Q is wrong"))],
    ("llama", {"saved": lambda path: datasets_on_disk(path, "fit", "more")},
     {"data": ["saved:tests", "two.jsonl"]}, ["has no split 'tests'"]),
    *[("llama", {"*.jsonl": [{"messages": TURNS}], TOKENIZER: {"chat_template": template}}, {},
       [*ROW, "the tokenizer's chat template cannot be used: ", message])
      for template, message in TEMPLATES.items()],
    ("bert", {"one.jsonl": [{"text": "a b", "label": "perhaps"}]}, {},
     ["--data one=", "label 'perhaps' is none of the 2 classes of the expert's head: no, yes"]),
]  # fmt: skip


def labels(*names: Any) -> dict[str, Any]:
    return {"one.jsonl": [{"text": "a", "label": name} for name in names]}


MODULES = [{"path": "", "type": "Transformer"}, {"path": "1_Pooling", "type": "Pooling"}]
CLS = {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}
IN_WORDS = "and encoders are scored by class names"
ENCODERS: list[Refused] = [
    ("encoders", {f"{name}/modules.json": None for name in ("merged", "base")}, {},
     ["/merged and its base have no modules.json", "or give --no-eval"]),
    ("encoders", {"merged/modules.json": json.dumps([*MODULES, {"path": "2", "type": "Dense"}])},
     {}, ["merged/modules.json has a module Dense", "(--no-eval)"]),
    ("encoders", {"two/1_Pooling/config.json": CLS}, {},
     ["--expert two=", "another pooling (cls) than", "(mean)", "--no-eval"]),
    ("encoders", {"merged": encoder_decoder}, {},
     ["the merged model", "is a BartModel; featcal calibrate takes"]),
    ("encoders", labels("0", "1"), {}, ["--data one=", f"the labels are 0, 1, {IN_WORDS}"]),
    ("encoders", labels(0, 1), {}, [f"the labels are 0, 1, {IN_WORDS}"]),
    ("encoders", labels("g"), {}, ["the labels are g", "at least two labels in words"]),
    ("encoders", labels(*CLASSES), {"more": "--text-tower base"},
     ["--text-tower is for CLIP", "these are encoder models"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "files", "options", "messages"), [*MODELS, *MERGE_CONFIGS, *DATA, *ENCODERS]
)
def test_files(copied, refusal, monkeypatch, kind, files, options, messages):
    folder = copied(kind)
    monkeypatch.chdir(folder)
    change(folder, files)
    line = refusal(arguments(folder, options))
    assert all(message in line for message in messages), line
    assert len(line) < 600


def test_pools_refuse_the_same_folders(folder):
    change(folder, {"two/config.json": QUANTIZED, "one": adapter_beside})
    pool = causal_pool({name: str(folder / name) for name in ("one", "two")})
    for name, message in (("one", "two models"), ("two", "quantization_config")):
        with pytest.raises(CalibrationError, match=message):
            PoolModel(pool, name).files  # noqa: B018


# --- config.json, as both releases of transformers write it ---

LLAMA = {"model_type": "llama", "num_hidden_layers": 2}
LINEAR = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
WRITTEN_BY_5 = "has rope_parameters, which were written by transformers 5"
OPENED: list[tuple[dict[str, Any], str]] = [
    ({}, ""), (LINEAR, ""), ({"model_type": "of a later release"}, ""),
    ({"rope_parameters": THETA}, WRITTEN_BY_5 if IS_RELEASE_4 else ""),
    ({"quantization_config": {"quant_method": "awq"}}, "has a quantization_config (awq), and"),
    ({"model_type": "odd", "quantization_config": {"bits": 4}}, "has a quantization_config"),
    ({"layer_types": ["sliding_attention", "full_attention"]}, "has layer_types (full_attention, "),
]  # fmt: skip


@pytest.mark.parametrize(("config", "message"), OPENED)
def test_configs_are_read_in_full_or_refused(config: dict[str, Any], message: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | config))
    if not message:
        assert open_config(tmp_path) == LLAMA | config
        return
    with pytest.raises(CalibrationError) as caught:
        open_config(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/config.json {message}")


# --- files that pass all checks ---

ACCEPTED: list[Refused] = [
    ("llama", {"two": other_llama}, {}, ["expert two may not be tuned from this base"]),
    ("llama", merge_config("linear", "base", "one", "two", base_model="base"), NO_MODELS,
     ["by mergekit_config.yml (linear)"]),
    ("llama",
     {"merged/*token*": None, "base/*token*": None} | merge_config("linear", "one", "two"),
     NO_MODELS, []),
    ("encoders", {"*/config.json": {"architectures": ["BertForMaskedLM"]}}, {},
     ["encoder: BertModel"]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "files", "options", "messages"), ACCEPTED)
def test_files_that_pass_all_checks(copied, monkeypatch, kind, files, options, messages):
    folder = copied(kind)
    monkeypatch.chdir(folder)
    change(folder, files)
    done = featcal(*arguments(folder, options), "--plan")
    assert done.code == 0 and "nothing was run" in done.out, done.err
    assert "read from experts" in done.out and not (folder / "out").exists()
    assert all(message in done.out for message in messages), done.out
