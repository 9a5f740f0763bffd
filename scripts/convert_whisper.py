"""Write a Whisper model from CTranslate2's format as a folder of transformers.

Files have the keys of the published Whisper models. Nothing here depends on the installed release.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from convert_weights import Arrays, save_weights, write_json

TYPES = (np.float32, np.int8, np.int16, np.int32, np.float16)  # in the order of their numbers
MODULES = {
    "position_encodings": ("embed_positions",),
    "embeddings": ("embed_tokens",),
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "ffn/layer_norm": ("final_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
}
PARAMETERS = {"gamma": "weight", "beta": "bias", "encodings": "weight"}
END, START = "<|endoftext|>", "<|startoftranscript|>"
TIMESTAMPS = [f"<|{step / 50:.2f}|>" for step in range(1501)]  # of 30 seconds
PREPROCESSOR = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "processor_class": "WhisperProcessor",
    "sampling_rate": 16000,
    "chunk_length": 30,
    "n_fft": 400,
    "hop_length": 160,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": False,
}


def convert_whisper(source: Path, folder: Path) -> None:
    """Write a multilingual Whisper in float32, its processor and its generation config.

    Args:
        source: CTranslate2's `model.bin`. Its folder has `config.json` and `tokenizer.json`.
        folder: Folder to write to.
    """
    stored = read_ctranslate2(source)
    generation, tokenizer = (
        json.loads(source.with_name(name).read_text(encoding="utf-8"))
        for name in ("config.json", "tokenizer.json")
    )
    config = whisper_config(stored)
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    ends = {f"{kind}_token_id": ids[END] for kind in ("bos", "eos", "pad")}
    ends["decoder_start_token_id"] = ids[START]
    save_weights(whisper_weights(stored), folder)
    write_json(folder / "config.json", config | ends)
    write_json(folder / "generation_config.json", generation_config(generation, ids) | ends)
    features = PREPROCESSOR | {"feature_size": config["num_mel_bins"]}
    write_json(folder / "preprocessor_config.json", features)
    write_tokenizer(tokenizer, folder)


def read_ctranslate2(file: Path) -> Arrays:
    """Return the tensors of a `model.bin`, without the aliases at its end."""
    tensors = {}
    with file.open("rb") as stream:

        def number(size: int) -> int:
            return int.from_bytes(stream.read(size), "little")

        def text() -> str:
            return stream.read(number(2)).decode().removesuffix("\0")

        number(4)  # version of the format
        text()  # kind of model
        number(4)  # its revision
        for _ in range(number(4)):
            name = text()
            shape = [number(4) for _ in range(number(1))]
            kind = TYPES[number(1)]
            tensors[name] = np.frombuffer(stream.read(number(4)), kind).reshape(shape)
    return tensors


def whisper_config(stored: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return the content of `config.json` by a model's tensors, without its special tokens."""
    vocabulary, width = stored["decoder/embeddings/weight"].shape
    config = {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "dtype": "float32",
        "is_encoder_decoder": True,
        "vocab_size": vocabulary,
        "d_model": width,
        "num_mel_bins": stored["encoder/conv1/weight"].shape[1],
        "max_source_positions": len(stored["encoder/position_encodings/encodings"]),
        "max_target_positions": len(stored["decoder/position_encodings/encodings"]),
    }
    for side in ("encoder", "decoder"):
        hidden = [
            v for k, v in stored.items() if k.startswith(side) and k.endswith("ffn/linear_0/bias")
        ]
        config[f"{side}_layers"] = len(hidden)
        config[f"{side}_attention_heads"] = int(stored[f"{side}/num_heads"])
        config[f"{side}_ffn_dim"] = len(hidden[0])
    return config


def whisper_weights(stored: Mapping[str, np.ndarray]) -> Arrays:
    """Return a Whisper's tensors in the names of transformers.

    CTranslate2 has the matrices of query, key and value in one, with a bias of zero for the key.
    """
    weights = {}
    for name, array in stored.items():
        if array.ndim == 0:  # a setting
            continue
        side, *path, parameter = name.split("/")
        block = f"{path.pop(0).replace('_', 's.')}." if len(path) > 1 else ""
        modules = MODULES.get("/".join(path), path)
        for module, part in zip(modules, np.split(array, len(modules)), strict=True):
            key = f"model.{side}.{block}{module}.{PARAMETERS.get(parameter, parameter)}"
            weights[key] = part.astype(np.float32)
    return {key: array for key, array in weights.items() if not key.endswith("k_proj.bias")}


def generation_config(source: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, Any]:
    """Return the content of `generation_config.json` by CTranslate2's and the ids of tokens."""
    return {
        "is_multilingual": True,
        "task": "transcribe",
        "max_length": 448,
        "max_initial_timestamp_index": 50,
        "return_timestamps": False,
        "alignment_heads": source["alignment_heads"],
        "suppress_tokens": source["suppress_ids"],
        "begin_suppress_tokens": source["suppress_ids_begin"],
        "lang_to_id": {
            token: number for token, number in ids.items() if number in source["lang_ids"]
        },
        "task_to_id": {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")},
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "prev_sot_token_id": ids["<|startofprev|>"],
    }


def write_tokenizer(tokenizer: dict[str, Any], folder: Path) -> None:
    """Write a tokenizer, with what the published one lacks: its first merge and the timestamps."""
    tokenizer["model"]["merges"].insert(0, "Ġ t")  # without it no word's first token begins with t
    special = [token["content"] for token in tokenizer["added_tokens"]]
    last = tokenizer["added_tokens"][-1]
    tokenizer["added_tokens"] += [
        last | {"id": last["id"] + number, "content": text, "special": False}
        for number, text in enumerate(TIMESTAMPS, 1)
    ]
    write_json(folder / "tokenizer.json", tokenizer)
    content = {
        "tokenizer_class": "WhisperTokenizer",
        "processor_class": "WhisperProcessor",
        "model_max_length": 448,
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": special,
        **{f"{kind}_token": END for kind in ("bos", "eos", "unk", "pad")},
    }
    write_json(folder / "tokenizer_config.json", content)
