"""Comparison of the configs of experts and merged model, as far as they change the function."""

from collections.abc import Container, Iterator, Mapping
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


def check_same_function(
    name: str,
    config: Any,
    reference: Any,
    *,
    role: str = "expert",
    other: str = "the merged model",
) -> None:
    """Refuse a model whose config defines another function than the model that runs its weights.

    Names, dtypes, token ids, vocabulary sizes and everything about training or generation may
    differ. A key missing in one config has its class's default.

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
    differing = _differences(complete_config(config), complete_config(reference))
    if "model_type" in differing:
        kind, expected = differing["model_type"]
        raise CalibrationError(
            f"{role} {name!r} is a {kind!r} model, {other} a {expected!r} one: experts must share "
            f"its architecture. Check modelpool.models.{name}"
        )
    if differing:
        first = [f"{k}={value!r} (there {ref!r})" for k, (value, ref) in differing.items()][:_SHOWN]
        more = f" and {len(differing) - _SHOWN} keys more" if len(differing) > _SHOWN else ""
        raise CalibrationError(
            f"{role} {name!r} is another function than {other}, in whose modules its weights run: "
            f"its config has {', '.join(first)}{more}. Check modelpool.models.{name}. To calibrate "
            "all the same, write the other values into its config.json"
        )


def compare_configs(configs: Mapping[str, Any], experts: Container[str]) -> None:
    """Compare the configs of several models with the first one that is not None.

    Args:
        configs: Model -> its config, the reference first.
        experts: The models that are experts.

    Raises:
        CalibrationError: As `check_same_function`.
    """
    first = next((name for name, config in configs.items() if config is not None), "")
    title = f"the {first.strip('_')} model".replace("the pretrained model", "the base")
    for name, config in configs.items():
        role = "expert" if name in experts else "model"
        check_same_function(name, config, configs.get(first), role=role, other=title)


def complete_config(config: Any) -> dict[str, Any] | None:
    """Return a config as a dictionary, with its class's defaults for missing keys.

    Args:
        config: A transformers config, the content of config.json, or None.
    """
    if callable(getattr(config, "to_dict", None)):
        return config.to_dict()
    if not isinstance(config, Mapping):
        return None
    from transformers import CONFIG_MAPPING

    values = dict(config)
    try:
        return CONFIG_MAPPING[values["model_type"]].from_dict(values).to_dict()
    except Exception:  # an unknown class, or values that it refuses: see the model's loader
        return values


def _differences(
    config: Mapping[str, Any] | None, reference: Mapping[str, Any] | None
) -> dict[str, tuple[Any, Any]]:
    """Return keys that make two configs different functions, sorted, with both values."""
    if config is None or reference is None:
        return {}
    values = flat_values(_part(config, reference.get("model_type")))
    expected = flat_values(_part(reference, config.get("model_type")))
    keys = sorted(key for key in values.keys() & expected.keys() if _counts(key))
    return {k: (values[k], expected[k]) for k in keys if values[k] != expected[k]}


def _part(config: Mapping[str, Any], model_type: Any) -> Mapping[str, Any]:
    """Return the part of a config with a model type (CLIP's vision tower), else all of it."""
    if config.get("model_type") == model_type:
        return config
    nested = (part for part in config.values() if isinstance(part, Mapping))
    return next((part for part in nested if part.get("model_type") == model_type), config)


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
