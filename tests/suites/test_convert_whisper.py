"""Whisper in CTranslate2's format, as a folder of transformers."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import convert_whisper
import numpy as np
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration, WhisperProcessor

TEXT = ("Ġ", "t", "Ġt", "o")
SPECIAL = ("endoftext", "startoftranscript", "en", "translate", "transcribe", "startofprev",
           "notimestamps")  # fmt: skip
WORDS = len(TEXT) + len(SPECIAL) + 1501
STEMS = {
    "encoder": {"conv1": "conv1", "conv2": "conv2", "layer_norm": "layer_norm"},
    "decoder": {"embeddings": "embed_tokens", "layer_norm": "layer_norm"},
}
BLOCKS = {
    "encoder": {
        "self_attention/layer_norm": "self_attn_layer_norm",
        "self_attention/linear_0": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        "self_attention/linear_1": "self_attn.out_proj",
        "ffn/layer_norm": "final_layer_norm",
        "ffn/linear_0": "fc1",
        "ffn/linear_1": "fc2",
    },
}
BLOCKS["decoder"] = BLOCKS["encoder"] | {
    "attention/layer_norm": "encoder_attn_layer_norm",
    "attention/linear_0": "encoder_attn.q_proj",
    "attention/linear_1": "encoder_attn.k_proj encoder_attn.v_proj",
    "attention/linear_2": "encoder_attn.out_proj",
}


def tiny_whisper() -> WhisperForConditionalGeneration:
    """Return a random model with numbers of float16."""
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=WORDS, num_mel_bins=4, d_model=8, pad_token_id=4,
        max_source_positions=30, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=12,
        max_target_positions=16, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=12,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter).half().float()
    return model


def ctranslate2_arrays(model: WhisperForConditionalGeneration) -> dict[str, np.ndarray]:
    """Return a model's tensors as CTranslate2 stores them."""
    state = {k.removeprefix("model."): v for k, v in model.state_dict().items()}
    arrays = {}
    for side in ("encoder", "decoder"):
        arrays[f"{side}/num_heads"] = np.array(2, np.int16)
        positions = state[f"{side}.embed_positions.weight"]
        arrays[f"{side}/position_encodings/encodings"] = positions.half().numpy()
        modules = {f"{side}/{name}": [f"{side}.{m}"] for name, m in STEMS[side].items()}
        for block in range(2):
            for name, joined in BLOCKS[side].items():
                full = [f"{side}.layers.{block}.{module}" for module in joined.split()]
                modules[f"{side}/layer_{block}/{name}"] = full
        for name, full in modules.items():
            kinds = ("gamma", "beta") if name.endswith("layer_norm") else ("weight", "bias")
            for kind, parameter in zip(kinds, ("weight", "bias"), strict=True):
                tensors = [state.get(f"{m}.{parameter}", torch.zeros(8)) for m in full]
                arrays[f"{name}/{kind}"] = torch.cat(tensors).half().numpy()
    del arrays["decoder/embeddings/bias"]
    return arrays


def write_ctranslate2(arrays: Mapping[str, np.ndarray], file: Path) -> None:
    """Write a `model.bin` of version 6 with one alias."""

    def text(content: str) -> bytes:
        return struct.pack("<H", len(content) + 1) + content.encode() + b"\0"

    parts = [struct.pack("<I", 6), text("WhisperSpec"), struct.pack("<II", 3, len(arrays))]
    for name, array in arrays.items():
        kind = {"int16": 2, "float16": 4}[array.dtype.name]
        shape = struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape)
        parts += [text(name), shape, struct.pack("<BI", kind, array.nbytes), array.tobytes()]
    parts += [struct.pack("<I", 1), text("decoder/projection/weight"), text("decoder/embeddings")]
    file.write_bytes(b"".join(parts))


def write_texts(folder: Path) -> None:
    """Write the other files of CTranslate2's folder. `tokenizer.json` lacks the first merge."""
    added = [
        {"id": number, "content": f"<|{name}|>", "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for number, name in enumerate(SPECIAL, len(TEXT))
    ]
    vocabulary = {token: number for number, token in enumerate(TEXT)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    ids = {
        "lang_ids": [6],
        "suppress_ids": [1],
        "suppress_ids_begin": [0],
        "alignment_heads": [[1, 0]],
    }
    (folder / "config.json").write_text(json.dumps(ids))


def test_a_converted_whisper_is_the_same_model(tmp_path: Path) -> None:
    model, out = tiny_whisper(), tmp_path / "whisper"
    out.mkdir()
    write_ctranslate2(ctranslate2_arrays(model), tmp_path / "model.bin")
    write_texts(tmp_path)
    convert_whisper.convert_whisper(tmp_path / "model.bin", out)
    loaded: Any = WhisperForConditionalGeneration.from_pretrained(out, output_loading_info=True)
    converted, info = loaded
    assert not any(info.values())
    expected = model.state_dict()
    assert all(torch.equal(v, expected[k]) for k, v in converted.state_dict().items())
    tokens = converted.generation_config
    assert tokens.lang_to_id == {"<|en|>": 6}
    assert (tokens.begin_suppress_tokens, tokens.no_timestamps_token_id) == ([0], 10)

    processor = WhisperProcessor.from_pretrained(out)
    assert len(processor.tokenizer) == converted.config.vocab_size
    assert processor.tokenizer.tokenize(" to <|30.00|>") == ["Ġt", "o", "Ġ", "<|30.00|>"]
    features = processor(np.zeros(160, np.float32), sampling_rate=16000, return_tensors="pt")
    assert features["input_features"].shape == (1, 4, 3000)
