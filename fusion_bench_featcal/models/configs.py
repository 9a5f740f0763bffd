"""A model's config.json, refused if transformers would build another model than it describes."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.experts.model_config import flat_values, read_config

RELEASE = transformers.__version__
IS_RELEASE_4 = RELEASE.startswith("4.")
_ROPE, _LAYERS, _QUANTIZED = "rope_parameters", "layer_types", "quantization_config"
_OTHER_RELEASE = (
    f"its {_ROPE} were written by transformers 5. Install transformers 5, or write rope_theta and "
    "rope_scaling in their place"
    if IS_RELEASE_4
    else "install the release of transformers that wrote it"
)


def open_config(folder: Path) -> dict[str, Any] | None:
    """Return the content of a model's config.json, or None if there is none.

    Raises:
        CalibrationError: If it is damaged, of a quantized model, or the installed transformers does
            not read all of it.
    """
    config = read_config(folder)
    if config is not None:
        try:
            _check(config)
        except ValueError as error:
            raise CalibrationError(f"{folder / 'config.json'} {error}") from error
    return config


def is_adapter(folder: Path) -> bool:
    """Return whether a folder has an adapter of another model.

    Raises:
        CalibrationError: If it also has a whole model.
    """
    if not (folder / "adapter_config.json").is_file():
        return False
    patterns = ("model*.safetensors", "pytorch_model*.bin")
    if whole := sorted(file.name for pattern in patterns for file in folder.glob(pattern)):
        raise CalibrationError(
            f"{folder} has two models: an adapter (adapter_config.json) and whole weights "
            f"({whole[0]}). Move one of them to another folder"
        )
    return True


def _check(config: Mapping[str, Any]) -> None:
    """Refuse a config from which transformers builds a model with other values."""
    if quantized := config.get(_QUANTIZED):
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        raise ValueError(
            f"has a {_QUANTIZED} ({method}), and quantized weights cannot be calibrated: save the "
            "model in bfloat16 (model.dequantize() of transformers), or remove the key if the "
            "tensors of its files are plain"
        )
    if config.get("model_type") not in CONFIG_MAPPING:
        return
    kind: Any = CONFIG_MAPPING[config["model_type"]]
    layers, built, defaults = set(config.get(_LAYERS) or ()) - {"full_attention"}, {}, {}
    try:
        defaults = kind().to_dict()
        built = kind.from_dict(copy.deepcopy(dict(config))).to_dict()
        is_read = not layers or _LAYERS in defaults
    except Exception:  # the model's loader has the better message on other values
        is_read = not layers
    if not is_read:
        raise ValueError(
            f"has {_LAYERS} ({', '.join(sorted(layers))}) that {kind.__name__} of transformers "
            f"{RELEASE} does not have: install the release that wrote it"
        )
    if built:
        _check_rope(_rope(config), built, _rope(defaults))


def _check_rope(
    values: Mapping[str, Any], built: dict[str, Any], defaults: Mapping[str, Any]
) -> None:
    """Compare the rotary embedding of a file with that of the config built from it.

    Layers of different types may have different ones, which the releases nest differently.
    """
    if IS_RELEASE_4:
        built.pop(_ROPE, None)  # kept as an attribute that no model reads
    used = _rope(built)
    for name, value in values.items():
        same_key = [v for n, v in used.items() if n.rpartition(".")[2] == name.rpartition(".")[2]]
        # Some classes rename types. "default" has the same name in all of them.
        is_renamed = name.endswith("rope_type") and value != "default" != min(same_key, default="")
        if value not in same_key and not is_renamed:
            raise ValueError(
                f"has {name}={value!r} for its rotary embedding, which transformers {RELEASE} does "
                f"not read from there: {_OTHER_RELEASE}"
            )
    types = {str(value) for name, value in used.items() if name.endswith("rope_type")}
    if unknown := types - {"default", *ROPE_INIT_FUNCTIONS, *map(str, defaults.values())}:
        raise ValueError(
            f"has rope_type={min(unknown)}, which transformers {RELEASE} does not have: install "
            "the release that wrote it"
        )


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config's rotary embedding, by keys joined with dots."""
    values = flat_values(config)
    return {k.partition(".")[2]: v for k, v in values.items() if k.startswith(f"{_ROPE}.")}
