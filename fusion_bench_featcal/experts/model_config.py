"""Comparison of the configs of experts and merged model, as far as they change the function."""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.files.untrusted import read_json

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
# Depending on the release, transformers writes these at the top or inside `rope_parameters`.
_ROPE = "rope_parameters"
_OF_ROPE = ("rope_theta", "partial_rotary_factor")
_SHOWN = 4
_GENERATE = "custom_generate/generate.py"


def read_config(folder: Path) -> dict[str, Any] | None:
    """Return a checkpoint's config.json, or None if it has none.

    Args:
        folder: The checkpoint's folder.

    Raises:
        CalibrationError: If the file cannot be read or is damaged, or the checkpoint has code that
            transformers 4 runs without asking.
    """
    if (folder / _GENERATE).is_file():
        raise CalibrationError(
            f"{folder} has {_GENERATE}: code beside a model is not run. Remove the file"
        )
    file = folder / "config.json"
    try:
        return read_json(file)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CalibrationError(str(error)) from error


def config_of(model: Any) -> Any:
    """Return the config of a module or of a source of weights, or None if it has none."""
    return getattr(model, "config", None)


def check_same_function(
    name: str,
    config: Any,
    reference: Any,
    *,
    role: str = "expert",
    other: str = "the merged model",
) -> None:
    """Refuse a model whose config defines another function than the model that runs its weights.

    Every model's weights run in the merged model's modules. A key missing in one config has its
    class's default. Names, dtypes, token ids, vocabulary sizes and everything about training or
    generation may differ.

    Args:
        name: Name of the model in the pool, or of its task.
        config: Its transformers config or the content of config.json. None skips the comparison.
        reference: The config of the model that runs its weights, or None. If only one of the two
            contains the other's kind as a part (CLIP's vision tower), the parts are compared.
        role: Role of the model in messages.
        other: Name in messages of the model that runs its weights.

    Raises:
        CalibrationError: If they differ, naming keys and values.
    """
    differing = differences(config, reference)
    if not differing:
        return
    if "model_type" in differing:
        kind, expected = differing["model_type"]
        raise CalibrationError(
            f"{role} {name!r} is a {kind!r} model, {other} a {expected!r} one: experts must share "
            f"its architecture. Check modelpool.models.{name}"
        )
    first = [f"{k}={value!r} (there {ref!r})" for k, (value, ref) in differing.items()][:_SHOWN]
    more = f" and {len(differing) - _SHOWN} keys more" if len(differing) > _SHOWN else ""
    raise CalibrationError(
        f"{role} {name!r} is another function than {other}, in whose modules its weights run: its "
        f"config has {', '.join(first)}{more}. Check modelpool.models.{name}. To calibrate all the "
        "same, write the other values into its config.json"
    )


def differences(config: Any, reference: Any) -> dict[str, tuple[Any, Any]]:
    """Return keys that make two configs different functions, sorted, with both values."""
    full_config, full_reference = complete_config(config), complete_config(reference)
    if full_config is None or full_reference is None:
        return {}
    full_config = matching_part(full_config, full_reference.get("model_type"))
    full_reference = matching_part(full_reference, full_config.get("model_type"))
    values, expected = flat_values(full_config), flat_values(full_reference)
    keys = sorted(key for key in values.keys() & expected.keys() if _counts(key))
    return {k: (values[k], expected[k]) for k in keys if values[k] != expected[k]}


def complete_config(config: Any) -> dict[str, Any] | None:
    """Return a config as a dictionary, with its class's defaults for missing keys.

    Args:
        config: A transformers config, the content of config.json, or anything else.

    Returns:
        The dictionary, or None for anything else.
    """
    if callable(getattr(config, "to_dict", None)):
        return config.to_dict()
    if not isinstance(config, Mapping):
        return None
    from transformers import CONFIG_MAPPING

    values = dict(config)
    if values.get("model_type") not in CONFIG_MAPPING:
        return values
    try:
        return CONFIG_MAPPING[values["model_type"]].from_dict(values).to_dict()
    except Exception:  # values that its class refuses: the model's loader has the better message
        return values


def matching_part(config: Mapping[str, Any], model_type: Any) -> dict[str, Any]:
    """Return the part of a config with a model type (CLIP's vision tower), else all of it."""
    nested = (part for part in config.values() if isinstance(part, Mapping))
    part = next((part for part in nested if part.get("model_type") == model_type), None)
    return dict(config if part is None or config.get("model_type") == model_type else part)


def flat_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config's plain values by keys joined with dots.

    Tuples become lists, and all keys of the rotary embedding are in `rope_parameters`.
    """
    return dict(_flat(config))


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    inside_rope = prefix.endswith(f"{_ROPE}.")
    for key, value in (config if inside_rope else _with_rope_together(config)).items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value


def _with_rope_together(config: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(config)
    rope: dict[str, Any] = {}
    for key in ("rope_scaling", _ROPE):
        value = values.pop(key, None)
        rope |= value if isinstance(value, Mapping) else {}
    rope |= {key: values.pop(key) for key in _OF_ROPE if key in values and key not in rope}
    if rope:
        kind = rope.pop("type", "default")
        values[_ROPE] = {"rope_type": kind, **rope}
    return values


def _counts(key: str) -> bool:
    """Return whether a key changes the model's function."""
    words = {key, *key.split(".")}
    if words & _BOOKKEEPING or (words - {"model_type"}) & _common():
        return False
    leaf = key.rsplit(".", 1)[-1]
    return not (
        leaf.startswith(_BOOKKEEPING_STARTS)
        or leaf.endswith(_BOOKKEEPING_ENDS)
        or any(part in leaf for part in _BOOKKEEPING_WITHIN)
    )


@cache
def _common() -> frozenset[str]:
    """Return keys that every config has, or that concern generation."""
    from transformers import GenerationConfig, PretrainedConfig

    return frozenset(PretrainedConfig().to_dict()) | frozenset(GenerationConfig().to_dict())
