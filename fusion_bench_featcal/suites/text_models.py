"""The untrained models of the text suites: a gated-GELU T5 and a Llama, head and embedding tied."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration


def new_model(suite: str, tokenizer: Any, seed: int) -> Any:
    """Return an untrained model of a suite.

    Args:
        suite: ``flan-t5-mini`` (2 + 2 blocks of 96) or ``llama-mini`` (4 blocks of 128).
        tokenizer: the suite's tokenizer.
        seed: seed of the weights.

    Raises:
        ValueError: for another suite.
    """
    makers = {"flan-t5-mini": _new_t5, "llama-mini": _new_llama}
    if suite not in makers:
        raise ValueError(f"no text suite {suite!r}; there are {', '.join(makers)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return makers[suite](tokenizer)


def _new_t5(tokenizer: Any) -> T5ForConditionalGeneration:
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=96,
        d_kv=24,
        d_ff=192,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        dropout_rate=0.05,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )
    return T5ForConditionalGeneration(config)


def _new_llama(tokenizer: Any) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)
