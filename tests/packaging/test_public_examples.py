"""The examples with public models, as they are typed: a mirror has small ones of their names."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from configs import REPOSITORY
from hub_mirror import Mirror
from stock_pools.stand_ins import write_data
from tiny_texts import llama_model, word_tokenizer, write, write_adapter

EXAMPLES = REPOSITORY / "examples" / "public"
WORDS = "abcdefghijklmnopqrst"
TEMPLATE = (
    "{% for turn in messages %}{{ turn['role'] }} {{ turn['content'] }} </s>{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
pytestmark = [pytest.mark.slow, pytest.mark.ci]


def text(number: int, count: int = 4) -> str:
    return " ".join(WORDS[(number + k * k) % 20] for k in range(count))


def add_data(mirror: Mirror, name: str, folder: Path, rows: Sequence[Mapping[str, Any]],
             config: str = "default", split: str = "train") -> None:  # fmt: skip
    """A data set of one configuration and one split, as the hub stores it."""
    folder = folder / name.replace("/", "--")
    write_data(folder, {split: datasets.Dataset.from_list([*map(dict, rows)])}, config)
    mirror.add(f"datasets/{name}", folder)


def run(mirror: Mirror, folder: Path, example: str) -> str:
    """Run an example in an empty folder, and return what it printed."""
    environment = mirror.environment(folder / "home") | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    environment |= {"HF_HUB_OFFLINE": "0", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(EXAMPLES / f"{example}.py"), "out"]
    done = subprocess.run(
        command, cwd=folder, env=environment, text=True, check=False, capture_output=True
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert (
        "not calibrated on: loss" in done.stdout
        or "MRR@10" in done.stdout
        or "accuracy" in done.stdout
    )
    print(done.stdout, done.stderr)
    return done.stdout


def add_chat_model(mirror: Mirror, name: str, folder: Path, seed: int) -> torch.nn.Module:
    tokenizer = word_tokenizer(
        words=("<pad>", "</s>", "<unk>", "system", "user", "assistant", *WORDS),
        model_max_length=2048,
    )
    tokenizer.chat_template = TEMPLATE
    model: Any = llama_model(seed, rows=len(tokenizer)).bfloat16()
    model.config.max_position_embeddings = 2048
    write(model, folder / name.replace("/", "--"), tokenizer)
    mirror.add(name, folder / name.replace("/", "--"))
    return model


def test_llamas_of_mergebench(tmp_path: Path) -> None:
    with Mirror() as mirror:
        names = ("meta-llama/Llama-3.2-3B-Instruct", *(
            f"MergeBench/Llama-3.2-3B-Instruct_{task}" for task in ("math", "coding", "instruction")
        ))  # fmt: skip
        for seed, name in enumerate(names):
            add_chat_model(mirror, name, tmp_path, seed)
        numbers = range(160)
        solved = [{"problem": text(n), "solution": text(n + 7, 2)} for n in numbers]
        add_data(mirror, "AI-MO/NuminaMath-TIR", tmp_path, solved)
        add_data(mirror, "ise-uiuc/Magicoder-OSS-Instruct-75K", tmp_path, solved[::-1])
        asked = [
            {"prompt": text(n), "messages": [{"role": role, "content": text(n + k, 2)}
                                             for k, role in enumerate(("user", "assistant"))]}
            for n in numbers
        ]  # fmt: skip
        add_data(mirror, "allenai/tulu-3-sft-personas-instruction-following", tmp_path, asked)
        printed = run(mirror, tmp_path, "mergebench_llama")
        assert (tmp_path / "out" / "model.safetensors").is_file()
        assert all(line in printed for line in ("coding ", "math ", "instruction "))


def test_adapters_of_qwen3(tmp_path: Path) -> None:
    with Mirror() as mirror:
        base = add_chat_model(mirror, "Qwen/Qwen3-1.7B", tmp_path, 0)
        adapters = ("GermanovDev/qwen3-pubmed-summarization", "Igriscodes/qwen3-1.7b-tool")
        for seed, name in enumerate(adapters):
            folder = tmp_path / name.replace("/", "--")
            write_adapter(folder, base, seed, base_model_name_or_path="Qwen/Qwen3-1.7B")
            mirror.add(name, folder)
        papers = [{"article": text(n, 30), "abstract": text(n + 3, 3)} for n in range(120)]
        add_data(mirror, "ccdv/pubmed-summarization", tmp_path, papers, "section")
        turns = ("system", "human", "gpt", "human")
        calls = [
            {"conversations": [{"from": who, "value": text(n + k)} for k, who in enumerate(turns)]}
            for n in range(120)
        ]
        name = "NousResearch/hermes-function-calling-v1"
        add_data(mirror, name, tmp_path, calls, "func_calling_singleturn")
        printed = run(mirror, tmp_path, "qwen3_lora")
        assert all(line in printed for line in ("summary ", "tools ", "average "))


def test_encoders_of_bge(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers", "6.2", reason="extra `encoders`")
    import sentence_models as kit

    with Mirror() as mirror:
        base = kit.sentence_model(kit.backbone(tmp_path / "plain"))
        experts = ("philschmid/bge-base-financial-matryoshka", "abhinand/MedEmbed-base-v0.1")
        for seed, name in enumerate(("BAAI/bge-base-en-v1.5", *experts)):
            model = kit.tuned(base, seed) if seed else base
            folder = tmp_path / name.replace("/", "--")
            model.save(str(folder))
            mirror.add(name, folder)
        texts = [*zip(kit.texts_of(0, 280), kit.texts_of(1, 280), strict=True)]
        reports = [{"question": a, "context": b} for a, b in texts]
        add_data(mirror, "philschmid/finanical-rag-embedding-dataset", tmp_path, reports)
        articles = [{"_id": str(n), "title": a, "text": b} for n, (b, a) in enumerate(texts)]
        add_data(mirror, "mteb/nfcorpus", tmp_path, articles, "corpus", "corpus")
        printed = run(mirror, tmp_path, "bge_encoders")
        assert all(line in printed for line in ("finance ", "medicine ", "MRR@10"))
        assert (tmp_path / "out" / "modules.json").is_file()
