"""Pools of tiny language models, with texts to calibrate on and texts to test on."""

from pathlib import Path
from typing import Any

import sample_pools
from fusion_bench.modelpool import Seq2SeqLMPool
from omegaconf import OmegaConf
from tiny_texts import (
    TASKS,
    WORDS,
    llama_model,
    load_t5,
    sentences,
    t5_model,
    with_data,
    word_tokenizer,
    write,
)
from torch import Tensor

from fusion_bench_featcal.pools import CausalLMPool

NAMES = ("_pretrained_", *TASKS)
MAKERS: dict[str, Any] = {"seq2seq": t5_model, "causal": llama_model}
NORMS = {"seq2seq": "decoder.final_layer_norm", "causal": "model.norm"}


def text_tokenizer(kind: str) -> Any:
    return word_tokenizer(ends=kind == "seq2seq")


def llamas(folder: Path, rows: dict[str, int]) -> dict[str, str]:
    """A base and two experts. Experts may have more rows of embeddings than there are words."""
    return {
        name: write(llama_model(n, rows.get(name, len(WORDS))).float(), folder / name.strip("_"))
        for n, name in enumerate(NAMES)
    }


def causal_pool(models: dict[str, str], kind: Any = CausalLMPool, **options: Any) -> Any:
    return with_data(kind(OmegaConf.create(models), tokenizer=word_tokenizer(), **options))


def t5_pool(folder: Path) -> Any:
    models = {n: write(t5_model(k).float(), folder / n.strip("_")) for k, n in enumerate(NAMES)}
    tokenizer = text_tokenizer("seq2seq")
    return with_data(Seq2SeqLMPool(OmegaConf.create(load_t5(models)), tokenizer=tokenizer))


def text_pool(kind: str, folder: Path, tests: Any = sentences) -> Any:
    """A base and two experts on disk. `tests` makes a task's test rows."""
    pool = causal_pool(llamas(folder, {})) if kind == "causal" else t5_pool(folder)
    return with_tests(pool, tests)


def with_tests(pool: Any, tests: Any) -> Any:
    """Give a pool the two tasks' texts as test data."""
    pool._test_datasets = {task: {} for task in TASKS}
    pool.load_test_dataset = tests
    return pool


def text_batch(kind: str, *, left: bool = False) -> dict[str, Tensor]:
    """Three texts of unequal length, filled up on the left or right."""
    pairs = ("c d e f", "k"), ("g b", "l m"), ("h i j", "n")
    rows = [{"prompt": prompt, "target": target} for prompt, target in pairs]
    side = "left" if left else "right"
    tokenizer = word_tokenizer(ends=kind == "seq2seq", padding_side=side)
    return sample_pools.text_batch(rows, kind, tokenizer)
