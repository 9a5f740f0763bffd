"""Write a Gemma 3 from GGUF as a folder of transformers.

Files have the keys of the published models. Nothing here depends on the installed release.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from convert_weights import (
    CONTROL,
    GGUF_NAMES,
    Arrays,
    decoder_config,
    parameter_name,
    read_gguf,
    save_decoder,
    save_tokenizer,
)

NAMES = GGUF_NAMES | {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
FULL_ATTENTION_EVERY = 6  # blocks
NORMAL, USER_DEFINED = 1, 4  # kinds of tokens in GGUF


def convert_gemma3(source: Path, folder: Path) -> None:
    """Write a text model of Gemma 3 and its tokenizer from a GGUF file, in float32."""
    fields, stored = read_gguf(source)
    save_decoder(gemma3_weights(stored), gemma3_config(fields), folder)
    save_tokenizer(gemma_tokenizer(fields), fields, folder)


def gemma3_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of `config.json` by a GGUF file's fields."""
    head_width, blocks = fields["gemma3.attention.key_length"], fields["gemma3.block_count"]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **decoder_config(fields, head_width),
        "query_pre_attn_scalar": head_width,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": fields["gemma3.attention.sliding_window"],
        "layer_types": [
            "sliding_attention" if block % FULL_ATTENTION_EVERY else "full_attention"
            for block in range(1, blocks + 1)
        ],
        "rope_local_base_freq": 10_000.0,  # of sliding attention
    }


def gemma3_weights(stored: Mapping[str, np.ndarray]) -> Arrays:
    """Return a Gemma 3's tensors in the names of transformers. GGUF adds 1 to those of norms."""
    return {
        parameter_name(name, NAMES): array - 1 if name.endswith("norm.weight") else array
        for name, array in stored.items()
    }


def gemma_tokenizer(fields: Mapping[str, Any]) -> Any:
    """Return Gemma's tokenizer: SentencePiece's BPE, where unknown characters become bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    values = {k.removeprefix("tokenizer.ggml."): v for k, v in fields.items()}
    tokens, kinds = values["tokens"], values["token_type"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    normal = [token for token, kind in zip(tokens, kinds, strict=True) if kind == NORMAL]
    start, unknown = (tokens[values[f"{kind}_token_id"]] for kind in ("bos", "unknown"))
    bpe = models.BPE(
        vocab=vocabulary,
        merges=merges(normal),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")  # type: ignore[assignment]
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts)  # type: ignore[assignment]
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single=[start, "$A"],
        pair=[start, "$A", start, "$B"],
        special_tokens=[(start, vocabulary[start])],
    )
    added = [
        AddedToken(token, normalized=False, special=kind == CONTROL)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    return tokenizer


def merges(tokens: Sequence[str]) -> list[tuple[str, str]]:
    """Return the merges of tokens that are in order of rank, for each the longest start first."""
    vocabulary = set(tokens)
    splits = ((token[:i], token[i:]) for token in tokens for i in range(len(token) - 1, 0, -1))
    return [pair for pair in splits if vocabulary.issuperset(pair)]
