"""Tiny mixtures of transformers, by model type. Their sizes are odd where the type allows."""

import copy
import importlib
from collections.abc import Sequence
from typing import Any

import torch
import transformers as hf
from calibrations import PLUS, calls_of, distance, run_fast
from plus_slow import calibrated_plus, load, trained
from slots_slow import is_mixture, mixtures_in, ran_slowly
from tiny_models import VOCABULARY, Suite, sentences, suite_of, without_labels
from torch import nn

NUMBERS_OF_SLOTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Sizes by the field of a config, as far as it has one.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY,
    "unpadded_vocab_size": VOCABULARY, "max_position_embeddings": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "tie_word_embeddings": False,
    **dict.fromkeys(("hidden_size", "d_model"), 12), "hidden_size_per_layer_input": 4,
    **dict.fromkeys(("num_hidden_layers", "num_layers", "num_decoder_layers", "n_layers",
                     "encoder_layers", "decoder_layers", "num_sparse_encoder_layers",
                     "num_sparse_decoder_layers"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "intermediate_size_mlp", "d_ff",
                     "encoder_ffn_dim", "decoder_ffn_dim"), 14),
    # attention
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_heads", "encoder_attention_heads",
                     "decoder_attention_heads", "swa_num_attention_heads",
                     "num_sliding_attention_heads", "indexer_n_heads", "index_n_heads"), 2),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "indexer_kv_heads"), 1),
    **dict.fromkeys(("head_dim", "swa_head_dim", "kv_channels", "d_kv", "index_head_dim",
                     "indexer_head_dim", "qk_rope_head_dim", "qk_nope_head_dim"), 4),
    "v_head_dim": 3, "q_lora_rank": 5, "kv_lora_rank": 6, "o_lora_rank": 5, "o_groups": 2,
    "sliding_window": 8, "d_rel": 3, "rel_extent": 8, "indexer_budget": 8,
    "indexer_compress_ratio": 4, "hc_lowrank": 3,
    # linear attention and state spaces
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads",
                     "mamba_n_heads", "mamba_num_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim",
                     "mamba_head_dim", "mamba_d_state", "ssm_state_size"), 4),
    "mamba_d_head": 12, "mamba_dt_rank": 3, "mamba_chunk_size": 8, "chunk_size": 8, "n_groups": 1,
    # experts
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k",
                     "top_k_experts", "zero_expert_num"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 7),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size",
                     "share_expert_dim", "moe_shared_expert_intermediate_size"), 5),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "n_group",
                     "topk_group", "num_expert_group", "first_k_dense_replace",
                     "num_dense_layers", "encoder_sparse_step", "decoder_sparse_step"), 1),
    "moe_hidden_size": 10, "router_hidden_size": 6,
}  # fmt: skip
FULL: dict[str, Any] = {"num_key_value_heads": 2}
SECOND: dict[str, Any] = {"mlp_layer_types": ["dense", "sparse"]}
HYBRID: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}
INDEXED: dict[str, Any] = {"layer_types": ["linear_attention", "indexed_attention"]}
ROTARY: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
# What a type has more, or otherwise.
OTHER: dict[str, dict[str, Any]] = {
    "granitemoe": {"intermediate_size": 3},  # fewer outputs than inputs in front of the gate
    "olmoe": {"intermediate_size": 25},  # and behind it
    "qwen2_moe": FULL,
    "llama4_text": {"interleave_moe_layer_step": 1, "num_experts_per_tok": 1},
    "nemotron_h": {"layers_block_type": ["moe", "full_attention", "moe", "mlp"]},
    "bailing_hybrid": HYBRID | SECOND, "kimi_linear": HYBRID | SECOND,
    "qwen3_next": HYBRID, "qwen3_5_moe_text": HYBRID, "lara_mini": HYBRID,
    "granitemoehybrid": HYBRID, "qwen4_exp_text": INDEXED,
    "glm5_next_text": INDEXED | SECOND | {"qk_rope_head_dim": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "beam": SECOND, "deepseek_ocr2_text": SECOND | FULL, "step3p5": SECOND,
    "flint": {"mlp_only_layers": [0]},
    "gemma4_text": {"enable_moe_block": True},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [7, 7], "hidden_size": 24,
                             "rope_parameters": ROTARY | {"mrope_section": [2, 2, 2]}},
    "glm4v_moe_text": {"rope_parameters": ROTARY | {"mrope_section": [1, 1, 0]}},
    "hy_v4_vl_text": {"rope_parameters": ROTARY | {"mrope_section": [1, 1, 0]}},
    "inkling2_text": {"n_layers_per_attn_res_block": 1},
    "inkling2_loop_text": {"num_hidden_layers": 3, "n_layers_per_attn_res_block": 1,
                           "loop_layer_index_start": 1, "loop_layer_index_end": 2,
                           "loop_num_passes": 2, "loop_gate_rank": 3},
    "zaya": {"num_experts_per_tok": 1},
    "switch_transformers": {"decoder_start_token_id": 1},
    "doge": {"is_moe": True, "num_experts": 4, "head_dim": 6},
    "dbrx": {"attn_config": {"kv_n_heads": 1, "rope_theta": 1e4, "clip_qkv": 8.0},
             "ffn_config": {"ffn_hidden_size": 7, "moe_num_experts": 5, "moe_top_k": 2}},
}  # fmt: skip
# Products of routed experts in float32 want matrices whose rows are multiples of 16 bytes.
ALIGNED = {"intermediate_size": 16, "moe_intermediate_size": 8}
IN_FLOAT32 = ("inkling2_text", "inkling2_loop_text")  # whose routers have no float64


def mixture(model_type: str, slots: int = 5, **given: Any) -> nn.Module:
    """Random model of a type, with a head if there is one. Its slots run one by one."""
    defaults = hf.AutoConfig.for_model(model_type).to_dict()
    wanted = SIZES | dict.fromkeys(NUMBERS_OF_SLOTS, slots)
    sizes = {name: value for name, value in wanted.items() if name in defaults}
    if "kv_lora_rank" in defaults:  # every head has keys of its own
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    config = hf.AutoConfig.for_model(model_type, **(sizes | OTHER.get(model_type, {}) | given))
    model = _class_of(config)._from_config(config)
    mixtures: Any = filter(is_mixture, model.modules())
    for module in mixtures:
        module.config._experts_implementation = "eager"  # others have no float64
    return model


def _class_of(config: Any) -> Any:
    """The class of a config's language model, or else of its model."""
    kind = type(config)
    for heads in ("MODEL_FOR_CAUSAL_LM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "MODEL"):
        if kind in (classes := getattr(hf, f"{heads}_MAPPING")):
            return classes[kind]
    module = importlib.import_module(kind.__module__.replace(".configuration_", ".modeling_"))
    models = (m for m in vars(module).values() if getattr(m, "config_class", None) is kind)
    return next(model for model in models if model.forward is not nn.Module.forward)


def plus_gap(suite: Suite) -> float:
    """Distance of FeatCal+ to its slow reference."""
    suite = trained(suite)
    expected = copy.deepcopy(suite.merged)
    load(expected, calibrated_plus(suite))
    return distance(run_fast(suite, **PLUS).model, expected)


def slots_gap(suite: Suite) -> float:
    """Largest relative distance of a mixture's output to the sum of its slots', run slowly."""
    batch, gaps = next(iter(suite.inputs.values()))[0], [0.0]
    for name in mixtures_in(suite.merged, suite.blocks):
        for args, output in calls_of(suite.merged, name, lambda: suite.merged(**batch)):
            expected = ran_slowly(suite.merged.get_submodule(name), *args)
            gaps.append(float((output - expected).norm() / expected.norm()))
    return max(gaps)


def mixture_suite(
    model_type: str, *lengths: Sequence[Sequence[int]], labels: bool = False, slots: int = 5
) -> Suite:
    """Suite of tasks whose batches have sentences of given lengths and a position of padding."""
    inputs = dict[str, list]()
    for task, sizes in enumerate(lengths):
        seed = 100 * task
        rows = (sentences(size, max(size) + 1, seed=seed + n) for n, size in enumerate(sizes))
        inputs[f"task_{task}"] = [batch if labels else without_labels(batch) for batch in rows]
    torch.manual_seed(1)
    model = mixture(model_type, slots).eval()
    return suite_of(model, inputs, [f"model.layers.{layer}" for layer in range(2)], 1)
