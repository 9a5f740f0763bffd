"""Tiny decoder-only language models of many makes, and sentences with prompts and targets."""

from collections.abc import Sequence
from typing import Any

import torch
from tiny_models import Suite, suite_of
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 30
NO_TARGET = -100

# Two positions of attention in some blocks, all in others, where a make can mix them.
MIXED = {"sliding_window": 2, "layer_types": ["sliding_attention", "full_attention"]}
MAKES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 3},
    "qwen2": MIXED | {"use_sliding_window": True},
    "qwen3": MIXED | {"use_sliding_window": True, "head_dim": 6},
    "gemma": {"head_dim": 6},
    "gemma2": MIXED | {"sliding_window": 5, "head_dim": 6, "query_pre_attn_scalar": 6},
    "granite": {"embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "olmo2": {},
    "phi3": {"sliding_window": 3},
    "smollm3": {"no_rope_layers": [1, 0]},
    "starcoder2": {"sliding_window": 3},
}


def decoder_model(make: str = "llama", *, tied: bool = False, seed: int = 0) -> nn.Module:
    """Two blocks of four heads, of which two share keys and values, on 30 tokens."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        make,
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "intermediate_size": 20,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": tied,
        }
        | MAKES[make],
    )
    return AutoModelForCausalLM.from_config(config).eval()


def sentences(
    lengths: Sequence[int], padded: int, *, side: str = "right", seed: int = 0
) -> dict[str, Tensor]:
    """Sentences of given lengths, filled up on one side; the last third of each is its target."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), padded)
    ids, mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    labels = torch.full(shape, NO_TARGET)
    for row, length in enumerate(lengths):
        words = torch.randint(3, VOCABULARY, (length,), generator=generator)
        start = padded - length if side == "left" else 0
        target = start + length - max(1, length // 3)
        ids[row, start : start + length] = words
        mask[row, start : start + length] = 1
        labels[row, target : start + length] = ids[row, target : start + length]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def decoder_suite(
    make: str = "llama",
    *,
    side: str = "right",
    extra: int = 0,
    tied: bool = False,
    tasks: int = 2,
    seed: int = 0,
) -> Suite:
    """Suite in float64, in batches of unequal length; `extra` positions of padding more."""
    inputs: dict[str, list] = {
        f"task_{index}": [
            sentences(part, max(part) + extra, side=side, seed=seed + 10 * index + i)
            for i, part in enumerate([[5, 9, 7], [6, 3, 4, 6]])
        ]
        for index in range(tasks)
    }
    model = decoder_model(make, tied=tied, seed=seed)
    return suite_of(model, inputs, ["model.layers.0", "model.layers.1"], seed)
