"""Pools of tiny language models, with texts to calibrate on and texts to test on."""

from pathlib import Path
from typing import Any

from fusion_bench.modelpool import Seq2SeqLMPool
from omegaconf import OmegaConf
from tiny_texts import TASKS, llama_model, sentences, t5_model, with_data, word_tokenizer, write

from fusion_bench_featcal.pools import CausalLMPool

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
