"""Configs of models, compared: models that share tensors but are different functions."""

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from typing import Any

from fusion_bench_featcal.errors import CalibrationError

# Shapes of tensors and tied heads are compared elsewhere. Layers have what `max_window_layers` says
# in their types. The others have an effect on speed alone, or on training.
_UNRELATED = {
    "d_ff", "d_model", "head_dim", "hidden_size", "intermediate_size", "n_embd", "n_inner",
    "projection_dim", "tie_word_embeddings", "vocab_size",
    "apply_spec_augment", "deterministic_flash_attn", "max_window_layers", "pretraining_tp",
    "reference_compile",
}  # fmt: skip
_UNRELATED_STARTS = ("_", "output_", "mask_time_", "mask_feature_")
_UNRELATED_WITHIN = ("drop", "init", "loss", "coef")
_TOKENS = ("_token_id", "_token_ids", "_token_index")
_LIMIT = "max_position_embeddings"
_WITH_LIMIT = re.compile("type': '(dynamic|longrope|yarn)'")  # rotary embeddings that read it


def check_same_function(
    label: str,
    config: object,
    reference: object,
    *,
    other: str = "the merged model",
) -> None:
    """Refuse a model whose config defines another function than the model that runs its weights.

    Keys may differ that change no operation of the model, such as names, dropout rates, keys that
    its class does not know, or a limit of positions if its rotary embedding does not read it. So
    may dtypes, vocabulary sizes, and token ids other than those that stand for images or sounds. A
    key missing in one config has its class's default.

    Args:
        label: Name of the model in messages.
        config: Its transformers config or the content of config.json. None skips the comparison.
        reference: The config of the model that runs its weights, or None. If only one of the two
            contains the other's kind as a part (CLIP's vision tower), the parts are compared.
        other: Name in messages of the model that runs its weights.

    Raises:
        CalibrationError: If they differ, naming keys and values.
    """
    ours, theirs = complete_config(config), complete_config(reference)
    if ours is None or theirs is None:
        return
    parts = _part(ours, theirs.get("model_type")), _part(theirs, ours.get("model_type"))
    differing = dict(_differences(*parts))
    if "model_type" in differing:
        kind, expected = differing["model_type"]
        raise CalibrationError(
            f"{label} is a {kind!r} model, but {other} is a {expected!r} model: experts must share "
            "its architecture. Check its folder"
        )
    text = str(parts)
    is_limit_read = "rope_theta" not in text or _WITH_LIMIT.search(text)
    if any(key.rpartition(".")[2] != _LIMIT or is_limit_read for key in differing):
        pairs = [f"{key}={value!r} instead of {ref!r}" for key, (value, ref) in differing.items()]
        raise CalibrationError(
            f"{label} computes a different function than {other} (differences: "
            f"{', '.join(pairs)}), so its weights would run in the wrong architecture. Check its "
            "folder. To calibrate it anyway, write the other values into its config.json"
        )


def complete_config(config: Any) -> dict[str, Any] | None:
    """Return a config as a dictionary, with its class's defaults for missing keys.

    Args:
        config: A transformers config, the content of config.json, or None.
    """
    if callable(getattr(config, "to_dict", None)):
        return config.to_dict()
    if not isinstance(config, Mapping):
        return None
    return _with_defaults(json.dumps(dict(config)))


def text_config(config: object) -> Mapping[str, Any]:
    """Return the complete config of a model's text part, such as that beside a vision tower."""
    complete = complete_config(config) or {}
    return complete.get("text_config") or complete


@lru_cache
def _with_defaults(text: str) -> dict[str, object]:
    """Return the content of a config.json with its class's defaults for missing keys."""
    from transformers import CONFIG_MAPPING

    values = json.loads(text)
    try:
        return CONFIG_MAPPING[values["model_type"]].from_dict(values).to_dict()
    except Exception:  # an unknown class, or values that it refuses: see the model's loader
        return values


def _differences(
    config: Mapping[str, object], reference: Mapping[str, object], prefix: str = ""
) -> Iterator[tuple[str, tuple[object, object]]]:
    """Yield keys that make two configs different functions, joined with dots, and both values."""
    known = _with_defaults(json.dumps({"model_type": reference.get("model_type")})).keys()
    keys = config.keys() & reference.keys()
    if len(known) > 1:  # else its class is unknown, or it is no model's
        keys &= known
    is_text = not any(isinstance(v, Mapping) and "model_type" in v for v in reference.values())
    for key in filter(_counts, sorted(keys)):
        values = config[key], reference[key]
        value, other = (list(v) if isinstance(v, tuple) else v for v in values)
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            yield from _differences(value, other, f"{prefix}{key}.")
        elif value != other and not (is_text and key.endswith(_TOKENS)):
            yield f"{prefix}{key}", (value, other)


def _part(config: Mapping[str, object], model_type: object) -> Mapping[str, object]:
    """Return the part of a config with a model type (CLIP's vision tower), else all of it."""
    if config.get("model_type") == model_type:
        return config
    nested = (part for part in config.values() if isinstance(part, Mapping))
    return next((part for part in nested if part.get("model_type") == model_type), config)


def _counts(key: str) -> bool:
    """Return whether a key may change the model's function."""
    if key in _UNRELATED or (key != "model_type" and key in _common()):
        return False
    is_of_training = any(part in key for part in _UNRELATED_WITHIN)
    return not is_of_training and not key.startswith(_UNRELATED_STARTS)


@cache
def _common() -> frozenset[str]:
    """Return keys that every config has, or that concern generation."""
    from transformers import GenerationConfig, PretrainedConfig

    return frozenset(PretrainedConfig().to_dict()) | frozenset(GenerationConfig().to_dict())
