"""Configs of models: files that transformers would misread, and functions that differ."""

from collections.abc import Container, Iterator, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.files.untrusted import read_json
from fusion_bench_featcal.settings.fields import is_text_list

RELEASE = version("transformers")
IS_RELEASE_4 = RELEASE.startswith("4.")
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
_MOST_LAYERS = 10**5
_LAYERS = ("layer", "layers")  # not vocab_size_per_layer_input
_GENERATE = "custom_generate/generate.py"


def read_config(folder: Path) -> dict[str, Any] | None:
    """Return a checkpoint's config.json, or None if it has none.

    Args:
        folder: The checkpoint's folder.

    Raises:
        CalibrationError: If the file is damaged, or the checkpoint has code that transformers 4
            runs without asking.
    """
    if (folder / _GENERATE).is_file():
        raise CalibrationError(
            f"{folder} has {_GENERATE}: code beside a model is not run. Remove the file"
        )
    try:
        return read_json(folder / "config.json")
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CalibrationError(str(error)) from error


def open_config(folder: Path) -> dict[str, Any] | None:
    """Return the config.json of a model to calibrate, or None if it has none.

    Raises:
        CalibrationError: As `read_config`, and if the model is quantized, or another release of
            transformers wrote its rotary embedding or its types of layers.
    """
    config, file = read_config(folder), folder / "config.json"
    if config is None:
        return None
    if quantized := config.get("quantization_config"):
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        raise CalibrationError(
            f"{file} has a quantization_config ({method}), and quantized weights cannot be "
            "calibrated: save the model in bfloat16 (model.dequantize() of transformers), or "
            "remove the key if the tensors of its files are plain"
        )
    if IS_RELEASE_4 and config.get("rope_parameters"):
        raise CalibrationError(
            f"{file} has rope_parameters, which were written by transformers 5 and which "
            f"{RELEASE} does not read. Install transformers 5, or write rope_theta and "
            "rope_scaling in their place"
        )
    _check_counts(config, file)
    _check_layers(config, file)
    return config


def _check_counts(config: Mapping[str, Any], file: Path) -> None:
    """Refuse numbers of layers that no model has, before a class makes lists of that length."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            _check_counts(value, file)
        elif str(key).endswith(_LAYERS) and isinstance(value, int) and value > _MOST_LAYERS:
            raise CalibrationError(f"{file}: {key} is {value}, and no model has so many")


def _check_layers(config: Mapping[str, Any], file: Path) -> None:
    """Refuse types of layers that the installed class of a config does not have."""
    from transformers import CONFIG_MAPPING

    types, kind = config.get("layer_types"), str(config.get("model_type"))
    if types is not None and not is_text_list(types):
        raise CalibrationError(f"{file}: layer_types is {types!r:.60}, not a list of names")
    if set(types or ()) <= {"full_attention"} or kind not in CONFIG_MAPPING:
        return
    if "layer_types" not in CONFIG_MAPPING[kind]().to_dict():
        raise CalibrationError(
            f"{file} has layer_types ({', '.join(sorted(set(types or ())))}), which transformers "
            f"{RELEASE} does not read for {kind}: install the release that wrote it"
        )


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
    ours, theirs = complete_config(config), complete_config(reference)
    if ours is None or theirs is None:
        return
    parts = _part(ours, theirs.get("model_type")), _part(theirs, ours.get("model_type"))
    differing = dict(_differences(*parts))
    if "model_type" in differing:
        kind, expected = differing["model_type"]
        raise CalibrationError(
            f"{role} {name!r} is a {kind!r} model, {other} a {expected!r} one: experts must share "
            "its architecture. Check its folder"
        )
    if differing:
        first = [f"{k}={value!r} (there {ref!r})" for k, (value, ref) in differing.items()][:_SHOWN]
        raise CalibrationError(
            f"{role} {name!r} is another function than {other}, in whose modules its weights run: "
            f"its config has {', '.join(first)}. Check its folder. To calibrate all "
            "the same, write the other values into its config.json"
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
