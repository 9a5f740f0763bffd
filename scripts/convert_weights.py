"""Write pretrained weights from other formats as folders of transformers.

Files are written directly, in the names and keys of published models, which all supported releases
of transformers read. Nothing here depends on the installed release.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

Arrays = dict[str, np.ndarray]
DINOV2_CONFIG = {
    "architectures": ["Dinov2Model"],
    "model_type": "dinov2",
    "dtype": "float32",
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "image_size": 518,
    "patch_size": 14,
}
# The bundled pictures are small: 84 pixels are 36 patches.
DINOV2_PREPROCESSOR = {
    "image_processor_type": "BitImageProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "size": {"height": 84, "width": 84},
    "resample": 2,  # bilinear
    "do_center_crop": False,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}
GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL = 3  # kind of a token in GGUF


def convert_dinov2(source: Path, folder: Path) -> None:
    """Write a DINOv2 model and its processor from an ONNX file with a `Dinov2Model` `backbone`."""
    import onnx  # type: ignore[import-not-found]

    graph = onnx.load(source).graph
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    products = {
        node.name: name
        for node in graph.node
        if node.op_type == "MatMul"
        for name in node.input
        if name in stored
    }
    save_weights(dinov2_weights(stored, products), folder)
    write_json(folder / "config.json", DINOV2_CONFIG)
    write_json(folder / "preprocessor_config.json", DINOV2_PREPROCESSOR)


def dinov2_weights(stored: Mapping[str, np.ndarray], products: Mapping[str, str]) -> Arrays:
    """Return a backbone's tensors in the names of published DINOv2 models.

    Args:
        stored: Constants of the graph. Those of the backbone have its names, except for the weights
            of products and the position embeddings, which the exporter split into class token and
            patches.
        products: Name of a product, such as `/backbone/encoder/layer.0/mlp/fc1/MatMul`, -> name of
            its weight `[inputs, outputs]`.
    """
    prefix = "backbone."
    weights = {k.removeprefix(prefix): v for k, v in stored.items() if k.startswith(prefix)}
    for product, name in products.items():
        module = product.strip("/").removesuffix("/MatMul").replace("/", ".")
        weights[module.removeprefix(prefix) + ".weight"] = stored[name].T
    width = weights["embeddings.cls_token"].shape[2]
    positions = [v for k, v in stored.items() if k.startswith("onnx::") and v.ndim == 3]
    positions.sort(key=lambda array: array.shape[1])
    weights["embeddings.position_embeddings"] = np.concatenate(positions, axis=1)
    weights["embeddings.mask_token"] = np.zeros((1, width), np.float32)  # only for pretraining
    return weights


def convert_llama(source: Path, folder: Path) -> None:
    """Write a Llama with tied embeddings and SmolLM's tokenizer from a GGUF file, in float32."""
    fields, stored = read_gguf(source)
    head_width = fields["llama.rope.dimension_count"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **decoder_config(fields, head_width),
    }
    save_decoder(llama_weights(stored, head_width), config, folder)
    save_tokenizer(smollm_tokenizer(fields), fields, folder)


def read_gguf(source: Path) -> tuple[dict[str, Any], Arrays]:
    """Return the fields of a GGUF file, and its tensors in float32."""
    import gguf  # type: ignore[import-not-found]

    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return fields, {t.name: gguf.dequantize(t.data, t.tensor_type) for t in reader.tensors}


def decoder_config(fields: Mapping[str, Any], head_width: int) -> dict[str, Any]:
    """Return the entries of `config.json` that decoders with tied embeddings share."""
    prefix = f"{fields['general.architecture']}."
    values = {k.removeprefix(prefix): v for k, v in fields.items() if k.startswith(prefix)}
    return {
        "dtype": "float32",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": values["embedding_length"],
        "intermediate_size": values["feed_forward_length"],
        "num_hidden_layers": values["block_count"],
        "num_attention_heads": values["attention.head_count"],
        "num_key_value_heads": values["attention.head_count_kv"],
        "head_dim": head_width,
        "max_position_embeddings": values["context_length"],
        "rms_norm_eps": float(f"{values['attention.layer_norm_rms_epsilon']:.6g}"),  # of a float32
        "rope_theta": values["rope.freq_base"],
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def llama_weights(stored: Mapping[str, np.ndarray], head_width: int) -> Arrays:
    """Return a Llama's tensors in the names of transformers.

    GGUF interleaves both halves of each head's rows in the query's and the key's weights.
    """
    weights = {}
    for name, array in stored.items():
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            split = array.reshape(-1, head_width // 2, 2, array.shape[1])
            array = split.swapaxes(1, 2).reshape(array.shape)
        weights[parameter_name(name, GGUF_NAMES)] = array
    return weights


def parameter_name(name: str, modules: Mapping[str, str]) -> str:
    """Return the name of a decoder's parameter in transformers by its name in GGUF."""
    *block, module, kind = name.split(".")
    prefix = f"model.layers.{block[1]}." if block else ""
    return f"{prefix}{modules[module]}.{kind}"


def smollm_tokenizer(fields: Mapping[str, Any]) -> Any:
    """Return SmolLM's tokenizer: byte-level, each digit a token of its own."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    values = {k.removeprefix("tokenizer.ggml."): v for k, v in fields.items()}
    tokens = values["tokens"]
    merges = [tuple(merge.split(" ")) for merge in values["merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, to_bytes])  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    is_control = [kind == CONTROL for kind in values["token_type"]]
    special = [token for token, control in zip(tokens, is_control, strict=True) if control]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer


def save_decoder(
    weights: Mapping[str, np.ndarray], config: Mapping[str, Any], folder: Path
) -> None:
    """Write a decoder's weights, its config and its generation config."""
    save_weights(weights, folder)
    write_json(folder / "config.json", config)
    tokens = {f"{kind}_token_id": config[f"{kind}_token_id"] for kind in ("bos", "eos", "pad")}
    write_json(folder / "generation_config.json", tokens)


def save_tokenizer(tokenizer: Any, fields: Mapping[str, Any], folder: Path) -> None:
    """Write a tokenizer and its config, with the special tokens of a GGUF file."""
    tokenizer.save(str(folder / "tokenizer.json"))
    values = {k.removeprefix("tokenizer."): v for k, v in fields.items()}
    kinds = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    tokens = values["ggml.tokens"]
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields[f"{fields['general.architecture']}.context_length"],
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        **{key: values[key] for key in ("chat_template",) if key in values},
        **{f"{kind}_token": tokens[values[f"ggml.{k}_token_id"]] for kind, k in kinds.items()},
    }
    write_json(folder / "tokenizer_config.json", content)


def save_weights(weights: Mapping[str, np.ndarray], folder: Path) -> None:
    """Write `model.safetensors`."""
    arrays = {name: np.ascontiguousarray(array) for name, array in weights.items()}
    content = save(arrays, metadata={"format": "pt"})
    (folder / "model.safetensors").write_bytes(content)  # raises OSError, unlike save_file


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file as transformers does."""
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
