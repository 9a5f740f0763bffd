"""A tokenizer of a few words, tiny language models that speak it, and pools of them on disk."""

from pathlib import Path
from typing import Any

import tiny_models
from tiny_models import scatter
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import PreTrainedTokenizerFast

WORDS = ("<pad>", "</s>", "<unk>", *"abcdefghijklmnopqrst")
TASKS = ("one", "two")


def word_tokenizer(*, ends: bool = False, words: tuple[str, ...] = WORDS, **options: Any) -> Any:
    """One token a word. With `ends` every text ends in `</s>`, as T5's do."""
    tokenizer = Tokenizer(
        models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    if ends:
        tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single="$A </s>", special_tokens=[("</s>", 1)]
        )
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **(special | options))


def t5_model(seed: int = 0) -> nn.Module:
    """A gated T5 of two blocks a side, whose head is a separate matrix."""
    model = tiny_models.t5_model(
        untied=True, seed=seed, vocab_size=len(WORDS), d_kv=4, d_ff=12, tie_word_embeddings=False
    )
    return scatter(model, seed, 0.05)


def llama_model(seed: int = 0, rows: int = len(WORDS)) -> nn.Module:
    """A Llama of two blocks with grouped heads."""
    model = tiny_models.model_of(
        seed=seed, vocab_size=rows, hidden_size=8, intermediate_size=12, num_attention_heads=2,
        num_key_value_heads=1, bos_token_id=2, eos_token_id=1,
    )  # fmt: skip
    return scatter(model, seed, 0.05)


def sentences(task: str, number: int = 12) -> list[dict[str, str]]:
    """Prompts of unequal length with answers of one or two words."""
    letters = WORDS[3:]
    start = 7 * TASKS.index(task)
    return [
        {
            "prompt": " ".join(letters[(start + n * k) % 20] for k in range(1, 3 + n % 5)),
            "target": " ".join(letters[(start + n) % 20] for _ in range(1 + n % 2)),
        }
        for n in range(number)
    ]


def write(model: Any, folder: Path, tokenizer: Any = None) -> str:
    """Save a model, and a tokenizer beside it."""
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return str(folder)


def load_t5(paths: dict[str, str]) -> dict[str, dict[str, str]]:
    """Entries of a pool that load T5s."""
    target = "transformers.AutoModelForSeq2SeqLM.from_pretrained"
    return {n: {"_target_": target, "pretrained_model_name_or_path": p} for n, p in paths.items()}


def with_data(pool: Any, rows: Any = sentences) -> Any:
    """Give a pool the two tasks' texts as training data."""
    pool._train_datasets = {task: {} for task in TASKS}
    pool.load_train_dataset = rows
    return pool
