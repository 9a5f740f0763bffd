"""Names in transformers' models on which this package depends.

Checked with transformers 4.57.6, 5.23.0 and 5.24.0. A release may rename any of them, so
`tests/families/test_transformers_names.py` looks all of them up in the installed release. Blocks
receive their other arguments as the model passes them, under any name.
"""

from typing import Any

# Arguments of blocks and models.
HIDDEN = "hidden_states"
"""Input features of a block that does not receive them as its first positional argument."""
ENCODED = "encoder_outputs"
"""Output of the encoder, an argument of T5 and Whisper."""
T5_BIAS, T5_MASK = "position_bias", "attention_mask"
"""Position bias and mask, arguments of T5's blocks. Release 4.57 adds the mask to the bias."""

# Blocks.
CLIP_BLOCK = r"(vision_model\.)*encoder\.layers\.\d+"
"""CLIP's vision tower. From 5.6 on it is at the root of CLIPVisionModel."""
LLAMA_BLOCK = r"(model\.)?layers\.\d+"
"""Decoder-only language models. The prefix is missing in models without a head."""
T5_BLOCK = r"(encoder|decoder)\.block\.\d+"
WHISPER_BLOCK = r"(model\.)?(encoder|decoder)\.layers\.\d+"

# Modules and attributes.
T5_ENCODER_NORM, WHISPER_ENCODER_NORM = "final_layer_norm", "layer_norm"
"""Last norm of the encoder, by its name there."""
FINAL_NORMS = ("decoder.final_layer_norm", "model.norm")
"""The last norm of T5 and of decoder-only language models."""
T5_KEYS_AND_VALUES = ("EncDecAttention.k", "EncDecAttention.v")
"""Modules of the decoder's cross-attention that receive the encoder's output."""
WHISPER_KEYS_AND_VALUES = ("encoder_attn.k_proj", "encoder_attn.v_proj")
READ_AS_THE_OUTPUT = (
    "q_proj", "query", "q_lin", "out_proj", "out_lin", "attention.output.dense", "output.dense",
    "intermediate.dense", "fc1", "fc2", "lin1", "lin2", "c_fc", "c_proj",
)  # fmt: skip
"""Modules of a block with attention whose rows matter only for the same row of its output. Keys and
values matter for all rows."""
VOCABULARY = ("embed_tokens.weight", "lm_head.weight", "shared.weight", "wte.weight")
"""Matrices with one row per token."""


def t5_bias(block: Any, bias: Any) -> Any:
    """Return the position bias of a T5 block without the mask, in the shape of `bias`."""
    attention = block.layer[0].SelfAttention
    return attention.compute_bias(*bias.shape[-2:], device=bias.device)


def without_cache(value: Any, name: str = "") -> Any:
    """Return an argument of a model or block, or a replacement that switches caches off.

    A cache is identified by the name of its type, because releases have named it `cache`,
    `past_key_values`, `past_key_value` and `layer_past`, and not all types are `Cache`s (LFM2).
    """
    if name == "use_cache":
        return False
    return None if type(value).__name__.endswith("Cache") else value
