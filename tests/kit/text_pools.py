"""Pools of tiny language models, with texts to calibrate on and texts to test on."""

from pathlib import Path
from typing import Any

import torch
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
    prompts, targets = [[5, 6, 7, 8], [9, 4], [10, 11, 12]], [[13, 1], [14, 15, 1], [16, 1]]
    ids, labels = prompts, targets
    if kind == "causal":
        ids = [p + t for p, t in zip(prompts, targets, strict=True)]
        labels = [[-100] * len(p) + t for p, t in zip(prompts, targets, strict=True)]

    def padded(rows: list[list[int]], fill: int, before: bool) -> Tensor:
        width = max(map(len, rows))
        filled = [[fill] * (width - len(row)) for row in rows]
        return torch.tensor([f + r if before else r + f for r, f in zip(rows, filled, strict=True)])

    return {
        "input_ids": padded(ids, 0, left),
        "attention_mask": padded([[1] * len(row) for row in ids], 0, left),
        "labels": padded(labels, -100, left and kind == "causal"),
    }
