"""Models as they are found: configs of other releases, vocabularies of other sizes, tied heads."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from made_folders import change_json, llama_folders, words
from reports import error_of, featcal
from safetensors.torch import load_file, save_file
from tiny_texts import llama_model, word_tokenizer
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
)

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.experts import ExpertModel, InMemoryExpert
from fusion_bench_featcal.experts.model_config import IS_RELEASE_4, open_config
from fusion_bench_featcal.experts.vocabulary import VocabularyRows
from fusion_bench_featcal.fusionbench import PoolModel

# --- config.json, as both releases of transformers write it ---

LLAMA = {"model_type": "llama", "num_hidden_layers": 2}
THETA = {"rope_type": "default", "rope_theta": 5e5}
READ: list[dict[str, Any]] = [
    {}, {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"model_type": "of a later release"},
]  # fmt: skip
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quantization_config": {"quant_method": "awq"}}, "has a quantization_config (awq), and"),
    ({"model_type": "odd", "quantization_config": {"bits": 4}}, "has a quantization_config"),
    ({"layer_types": ["sliding_attention", "full_attention"]}, "has layer_types (full_attention, "),
]
OF_5 = ({"rope_parameters": THETA}, "has rope_parameters, which were written by transformers 5")


@pytest.mark.parametrize("config", READ if IS_RELEASE_4 else [*READ, OF_5[0]])
def test_configs_that_are_read_in_full(config: dict[str, Any], tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | config))
    assert open_config(tmp_path) == LLAMA | config


@pytest.mark.parametrize(("config", "message"), [*REFUSED, *([OF_5] if IS_RELEASE_4 else [])])
def test_configs_of_which_a_part_is_ignored(config: dict[str, Any], message: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | config))
    with pytest.raises(CalibrationError) as caught:
        open_config(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/config.json {message}")


# --- folders that are refused before anything is loaded ---

FACTOR = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


def adapter_beside(folder: Path) -> None:
    """Save an adapter in the folder of a whole model."""
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {f"{FACTOR}A.weight": torch.zeros(2, 8), f"{FACTOR}B.weight": torch.zeros(8, 2)}
    save_file(tensors, folder / "adapter_model.safetensors")


BACKEND: dict[str, Any] = {"tokenizer_class": "TokenizersBackend", "backend": "tokenizers"}
RELEASE_5_TOKENIZER = ["written by transformers 5", '"tokenizer_class": "PreTrainedTokenizerFast"']
FOLDERS: list[tuple[str, Any, list[str]]] = [
    ("merged", adapter_beside, ["merged has two models", "adapter_config.json", "model.safe"]),
    ("two", adapter_beside, ["--expert two=", "two has two models"]),
    ("two/config.json", {"architectures": None}, ["--expert two=", "config.json has no archit"]),
    ("merged/config.json", {"architectures": []}, ["merged/config.json has no architectures"]),
    ("two/config.json", {"quantization_config": {"quant_method": "gptq"}},
     ["--expert two=", "two/config.json has a quantization_config (gptq)"]),
    *([("merged/tokenizer_config.json", BACKEND, RELEASE_5_TOKENIZER),
       ("two/tokenizer_config.json", BACKEND, ["two", *RELEASE_5_TOKENIZER]),
       ("merged/tokenizer_config.json", {"extra_special_tokens": ["<a>"]}, RELEASE_5_TOKENIZER),
       ("merged/config.json", {"rope_parameters": THETA}, ["config.json has rope_parameters"])]
      if IS_RELEASE_4 else []),
]  # fmt: skip


@pytest.fixture(scope="module")
def llamas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llamas")
    llama_folders(folder)
    return folder


@pytest.mark.parametrize(("file", "change", "messages"), FOLDERS)
def test_folders_that_are_refused(llamas, tmp_path, file, change, messages):
    folder = Path(shutil.copytree(llamas, tmp_path / "models"))
    change_json(folder / file, change) if isinstance(change, dict) else change(folder / file)
    line = error_of(*words(folder))
    assert all(message in line for message in messages), line
    assert not (folder / "out").exists()


def test_pools_refuse_the_same_configs(tmp_path):
    from tiny_texts import causal_pool

    folders = llama_folders(tmp_path) and {n: str(tmp_path / n) for n in ("one", "two")}
    change_json(tmp_path / "two" / "config.json", {"quantization_config": {"bits": 4}})
    adapter_beside(tmp_path / "one")
    pool = causal_pool(folders)
    for name, message in (("one", "two models"), ("two", "quantization_config")):
        with pytest.raises(CalibrationError, match=message):
            PoolModel(pool, name).files  # noqa: B018


# --- vocabularies and heads ---

SIZE: dict[str, Any] = {"num_attention_heads": 2, "hidden_size": 8, "num_hidden_layers": 1}
MAKERS: dict[str, Any] = {
    "llama": lambda rows: llama_model(rows, rows),
    "bert": lambda rows: BertModel(BertConfig(vocab_size=rows, intermediate_size=12, **SIZE)),
    "gpt2": lambda rows: GPT2LMHeadModel(
        GPT2Config(vocab_size=rows, n_embd=8, n_layer=1, n_head=2)
    ),
    "gpt_neox": lambda rows: GPTNeoXForCausalLM(
        GPTNeoXConfig(vocab_size=rows, intermediate_size=12, **SIZE)
    ),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("rows", [20, 30])
def test_experts_get_the_rows_of_the_merged_model(kind: str, rows: int):
    make = MAKERS[kind]
    merged, expert = make(25), make(rows)
    source = VocabularyRows(InMemoryExpert(expert), 25, InMemoryExpert(merged))
    model, before = ExpertModel("one", source, merged), expert.state_dict()
    for name, tensor in merged.state_dict().items():
        expected = before[name]
        if expected.shape != tensor.shape:
            expected = torch.cat([expected[:25], tensor[rows:]])
        assert torch.equal(model.stored(name), expected), name


def tied(model: Any, **changes: Any) -> Any:
    """Let the source of a model have its embedding as head, or say so in its config."""
    source: Any = InMemoryExpert(model)
    source.config = model.config.to_dict() | {"tie_word_embeddings": True} | changes
    del source._tensors["lm_head.weight"]
    return source


def test_a_tied_head_is_the_embedding_of_its_model():
    merged, expert = llama_model(0), llama_model(1)
    opened = ExpertModel("two", tied(expert), merged)
    embedding = expert.get_parameter("model.embed_tokens.weight")
    assert torch.equal(opened.stored("lm_head.weight"), embedding)
    with pytest.raises(CalibrationError, match=r"no tensor 'lm_head.weight'"):
        ExpertModel("two", tied(expert, tie_word_embeddings=False), merged)


# --- the model that a calibration saves ---


def pad(folder: Path) -> None:
    """Add four rows of zeros to a Llama's vocabulary."""
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.cat([tensors[name], torch.zeros(4, 8)])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    change_json(folder / "config.json", {"vocab_size": len(tensors["lm_head.weight"])})


def drop_head(folder: Path) -> None:
    """Save a Llama again with its embedding as head."""
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    change_json(folder / "config.json", {"tie_word_embeddings": True})


def plant_code(folder: Path) -> None:
    """Name code beside a class of transformers, for the model and its tokenizer."""
    (folder / "modeling_x.py").write_text("raise SystemExit('this code ran')\n")
    code = {"AutoConfig": "modeling_x.X", "AutoModelForCausalLM": "modeling_x.X"}
    change_json(folder / "config.json", {"auto_map": code})
    tokenizer = {"auto_map": {"AutoTokenizer": [None, "modeling_x.X"]}}
    change_json(folder / "tokenizer_config.json", tokenizer)


def calibrated(folder: Path) -> dict[str, torch.Tensor]:
    done = featcal(*words(folder, "--preset", "paper", "--no-eval"))
    assert done.code == 0, done.err
    return load_file(folder / "out" / "model.safetensors")


def test_odd_folders_are_calibrated_as_usual_ones(llamas, tmp_path):
    folder = Path(shutil.copytree(llamas, tmp_path / "odd"))
    usual = calibrated(Path(shutil.copytree(llamas, tmp_path / "usual")))
    for name in ("base", "merged"):
        pad(folder / name)
    drop_head(folder / "two")
    for name in ("base", "one", "two", "merged"):
        plant_code(folder / name)
    for name, tensor in calibrated(folder).items():
        rows = len(usual[name])
        assert torch.equal(tensor[:rows], usual[name]) and not tensor[rows:].any(), name
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder / "out", trust_remote_code=True)
    assert isinstance(loaded, nn.Module) and len(loaded.get_parameter("lm_head.weight")) == 27
    tokenizer = AutoTokenizer.from_pretrained(folder / "out", trust_remote_code=True)
    assert tokenizer.get_vocab() == word_tokenizer().get_vocab()
