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
    sentences,
    t5_model,
    with_data,
    word_tokenizer,
    write,
)
from torch import Tensor

from fusion_bench_featcal.pools import CausalLMPool

LOAD_T5 = "transformers.AutoModelForSeq2SeqLM.from_pretrained"
MAKERS: dict[str, Any] = {"seq2seq": t5_model, "causal": llama_model}
NORMS = {"seq2seq": "decoder.final_layer_norm", "causal": "model.norm"}


def text_tokenizer(kind: str) -> Any:
    return word_tokenizer(ends=kind == "seq2seq")


def text_pool(kind: str, folder: Path, tests: Any = sentences) -> Any:
    """A base and two experts on disk; `tests` makes a task's test rows."""
    paths = {
        name: write(MAKERS[kind](number).float(), folder / name.strip("_"))
        for number, name in enumerate(("_pretrained_", *TASKS))
    }
    if kind == "causal":
        pool: Any = CausalLMPool(OmegaConf.create(paths), tokenizer=text_tokenizer(kind))
    else:
        load = {"_target_": "transformers.AutoModelForSeq2SeqLM.from_pretrained"}
        models = {
            name: load | {"pretrained_model_name_or_path": path} for name, path in paths.items()
        }
        pool = Seq2SeqLMPool(OmegaConf.create(models), tokenizer=text_tokenizer(kind))
    return with_tests(with_data(pool), tests)


def with_tests(pool: Any, tests: Any) -> Any:
    """Give a pool the two tasks' texts as test data."""
    pool._test_datasets = {task: {} for task in TASKS}
    pool.load_test_dataset = tests
    return pool


def text_batch(kind: str, *, extra: int = 0, left: bool = False) -> dict[str, Tensor]:
    """Three texts of unequal length, with as much padding more as asked, before them if `left`."""
    prompts, targets = [[5, 6, 7, 8], [9, 4], [10, 11, 12]], [[13, 1], [14, 15, 1], [16, 1]]
    ids, labels = prompts, targets
    if kind == "causal":
        ids = [p + t for p, t in zip(prompts, targets, strict=True)]
        labels = [[-100] * len(p) + t for p, t in zip(prompts, targets, strict=True)]

    def padded(rows: list[list[int]], fill: int, before: bool) -> Tensor:
        width = max(map(len, rows)) + extra
        filled = [[fill] * (width - len(row)) for row in rows]
        return torch.tensor([f + r if before else r + f for r, f in zip(rows, filled, strict=True)])

    return {
        "input_ids": padded(ids, 0, left),
        "attention_mask": padded([[1] * len(row) for row in ids], 0, left),
        "labels": padded(labels, -100, left and kind == "causal"),
    }


def llamas(folder: Path, rows: dict[str, int]) -> dict[str, str]:
    """A base and two experts; experts may have more rows of embeddings than there are words."""
    names = ("_pretrained_", *TASKS)
    return {
        name: write(llama_model(n, rows.get(name, len(WORDS))).float(), folder / name.strip("_"))
        for n, name in enumerate(names)
    }


def causal_pool(models: dict[str, str], kind: Any = CausalLMPool, **options: Any) -> Any:
    tokenizer = word_tokenizer()
    return with_data(kind(OmegaConf.create(models), tokenizer=tokenizer, **options))


def t5_pool(folder: Path) -> Any:
    models = {
        name: {
            "_target_": LOAD_T5,
            "pretrained_model_name_or_path": write(t5_model(n).float(), folder / name.strip("_")),
        }
        for n, name in enumerate(("_pretrained_", *TASKS))
    }
    return with_data(Seq2SeqLMPool(OmegaConf.create(models), tokenizer=word_tokenizer(ends=True)))
