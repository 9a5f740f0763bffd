"""Models as they are found: vocabularies of other sizes, tied heads, code that must not run."""

import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from made_folders import change_json, words
from reports import featcal
from safetensors.torch import load_file, save_file
from tiny_texts import causal_pool, llama_model, word_tokenizer
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

import fusion_bench_featcal
from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.experts import ExpertModel, InMemoryExpert
from fusion_bench_featcal.experts.vocabulary import VocabularyRows
from fusion_bench_featcal.fusionbench import PoolModels, load_input_processor, load_pool_model

# --- vocabularies and heads ---

SIZE: dict[str, Any] = {"num_attention_heads": 2, "hidden_size": 8, "num_hidden_layers": 1}
NARROW: dict[str, Any] = SIZE | {"intermediate_size": 12}
MAKERS: dict[str, Any] = {
    "llama": lambda rows: llama_model(rows, rows),
    "bert": lambda rows: BertModel(BertConfig(vocab_size=rows, **NARROW)),
    "gpt2": lambda rows: GPT2LMHeadModel(
        GPT2Config(vocab_size=rows, n_embd=8, n_layer=1, n_head=2)
    ),
    "gpt_neox": lambda rows: GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=rows, **NARROW)),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("rows", [20, 30])
def test_experts_get_the_rows_of_the_merged_model(kind: str, rows: int):
    merged, expert = MAKERS[kind](25), MAKERS[kind](rows)
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


def change_weights(folder: Path, change: Any, **config: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    change_json(folder / "config.json", config)


def pad(tensors: Any) -> None:
    """Add four rows of zeros to the vocabulary."""
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.cat([tensors[name], torch.zeros(4, 8)])


def name_code(folder: Path) -> None:
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


def test_odd_folders_are_calibrated_as_usual_ones(folder):
    usual = calibrated(folder)
    (folder / "out").rename(folder / "usual")
    for name in ("base", "merged"):
        change_weights(folder / name, pad, vocab_size=27)
    change_weights(folder / "two", lambda t: t.pop("lm_head.weight"), tie_word_embeddings=True)
    for name in ("base", "one", "two", "merged"):
        name_code(folder / name)
    for name, tensor in calibrated(folder).items():
        rows = len(usual[name])
        assert torch.equal(tensor[:rows], usual[name]) and not tensor[rows:].any(), name
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder / "out", trust_remote_code=True)
    assert len(loaded.get_parameter("lm_head.weight")) == 27
    tokenizer = AutoTokenizer.from_pretrained(folder / "out", trust_remote_code=True)
    assert tokenizer.get_vocab() == word_tokenizer().get_vocab()


# --- code that only a confirmation would run ---

LOADING = re.compile(
    r"\w(?<!CLIPModel)(?<!CLIPVisionModel)(?<!PeftModel)\.from_(?:pretrained|config)[(,]"
)
"""CLIPs load as they are, whatever a config names, and adapters have no code of their own."""
GENERATION = "custom_generate/generate.py"
CODE: dict[str, dict[str, Any]] = {
    "config.json": {"model_type": "odd", "auto_map": {"AutoConfig": "odd.Odd"}},
    "tokenizer_config.json": {
        "tokenizer_class": "Odd",
        "auto_map": {"AutoTokenizer": ["odd.Odd", None]},
    },
}


def test_every_call_that_could_run_code_forbids_it():
    for file in Path(fusion_bench_featcal.__file__).parent.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert len(LOADING.findall(text)) <= text.count("trust_remote_code=False"), file


@pytest.fixture
def watched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Llamas. Questions on the terminal would be answered with yes. No planted code may run."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 20))
    yield folder
    assert not (folder / "ran").exists()


def plant(model: Path, file: str) -> None:
    """Put code beside a model, and the keys that have transformers load it."""
    source = f"open({str(model.parent / 'ran')!r}, 'w').close()\n"
    path = model / file
    if file == GENERATION:
        path.parent.mkdir()
        path.write_text(source + "def generate(model, *args, **options): ...\n")
        return
    (model / "odd.py").write_text(source + "class Odd: ...\n")
    path.write_text(json.dumps(json.loads(path.read_text()) | CODE[file]))


@pytest.mark.parametrize(
    ("model", "file", "message"),
    [
        ("merged", "config.json", "contains custom code"),
        ("one", "tokenizer_config.json", "the tokenizer in "),
        ("one", GENERATION, "code beside a model"),
    ],
)
def test_featcal_calibrate_runs_no_code(watched, model, file, message):
    plant(watched / model, file)
    done = featcal(*words(watched))
    assert done.code == 2 and not (watched / "out").exists() and "[y/N]" not in done.out
    assert str(watched / model) in done.err and message in " ".join(done.err.split())


@pytest.mark.parametrize(
    ("model", "file"), [("one", "config.json"), ("base", "tokenizer_config.json")]
)
def test_pools_run_no_code(watched, capfd, model, file):
    plant(watched / model, file)
    pool = causal_pool({"_pretrained_": str(watched / "base"), "one": str(watched / "one")})
    pool._tokenizer = {"_target_": "transformers.AutoTokenizer.from_pretrained",
                       "pretrained_model_name_or_path": str(watched / "base")}  # fmt: skip
    with pytest.raises(CalibrationError, match=str(watched / model)):
        for name, opened in PoolModels(pool).items():
            opened.config  # noqa: B018
            load_pool_model(pool, name)
        load_input_processor(pool)
    assert "[y/N]" not in capfd.readouterr().out
