"""Configs of models, compared: models that share tensors but are different functions."""

import json
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from typing import Any

from fusion_bench_featcal.errors import CalibrationError

# Names, training, sizes (checked by tensor shapes) and keys that follow from others.
_BOOKKEEPING = {
    "attn_implementation", "auto_map", "d_ff", "d_model", "dtype", "gradient_checkpointing",
    "hidden_size", "intermediate_size", "max_window_layers", "n_embd", "n_inner", "num_labels",
    "pretraining_tp", "projection_dim", "quantization_config", "tie_word_embeddings",
    "torch_dtype", "use_cache", "vocab_size",
}  # fmt: skip
_BOOKKEEPING_STARTS = ("_", "output_", "summary_")
_BOOKKEEPING_ENDS = ("_token_id", "_token_ids", "_token_index")
_BOOKKEEPING_WITHIN = ("drop", "init")  # dropout rates, initialisation
_SHOWN = 4


def check_same_function(
    label: str,
    config: Any,
    reference: Any,
    *,
    other: str = "the merged model",
) -> None:
    """Refuse a model whose config defines another function than the model that runs its weights.

    Names, dtypes, token ids, vocabulary sizes and everything about training or generation may
    differ. A key missing in one config has its class's default.

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
            f"{label} is a {kind!r} model, {other} a {expected!r} one: experts must share "
            "its architecture. Check its folder"
        )
    if differing:
        first = [f"{k}={value!r} (there {ref!r})" for k, (value, ref) in differing.items()][:_SHOWN]
        raise CalibrationError(
            f"{label} is another function than {other}, in whose modules its weights run: "
            f"its config has {', '.join(first)}. Check its folder. To calibrate all "
            "the same, write the other values into its config.json"
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


@lru_cache
def _with_defaults(text: str) -> dict[str, Any]:
    """Return the content of a config.json with its class's defaults for missing keys."""
    from transformers import CONFIG_MAPPING

    values = json.loads(text)
    try:
        return CONFIG_MAPPING[values["model_type"]].from_dict(values).to_dict()
    except Exception:  # an unknown class, or values that it refuses: see the model's loader
        return values


def _differences(
    config: Mapping[str, Any], reference: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield keys that make two configs different functions, joined with dots, and both values."""
    for key in filter(_counts, sorted(config.keys() & reference.keys())):
        values = config[key], reference[key]
        value, other = (list(v) if isinstance(v, tuple) else v for v in values)
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            yield from _differences(value, other, f"{prefix}{key}.")
        elif value != other:
            yield f"{prefix}{key}", (value, other)


def _part(config: Mapping[str, Any], model_type: Any) -> Mapping[str, Any]:
    """Return the part of a config with a model type (CLIP's vision tower), else all of it."""
    if config.get("model_type") == model_type:
        return config
    nested = (part for part in config.values() if isinstance(part, Mapping))
    return next((part for part in nested if part.get("model_type") == model_type), config)


def _counts(key: str) -> bool:
    """Return whether a key changes the model's function."""
    if key in _BOOKKEEPING or (key != "model_type" and key in _common()):
        return False
    return not (
        key.startswith(_BOOKKEEPING_STARTS)
        or key.endswith(_BOOKKEEPING_ENDS)
        or any(part in key for part in _BOOKKEEPING_WITHIN)
    )


@cache
def _common() -> frozenset[str]:
    """Return keys that every config has, or that concern generation."""
    from transformers import GenerationConfig, PretrainedConfig

    return frozenset(PretrainedConfig().to_dict()) | frozenset(GenerationConfig().to_dict())
