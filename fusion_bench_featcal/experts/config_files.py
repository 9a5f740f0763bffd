"""A folder's config.json, refused if transformers would misread it."""

import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.files.untrusted import read_json

RELEASE = version("transformers")
IS_RELEASE_4 = RELEASE.startswith("4.")
_GENERATE = "custom_generate/generate.py"


def refuse_code(folder: Path) -> None:
    """Refuse a folder with code that transformers 4 runs without asking.

    Raises:
        CalibrationError: Naming the file.
    """
    if (folder / _GENERATE).is_file():
        raise CalibrationError(
            f"{folder} has {_GENERATE}: code beside a model is not run. Remove the file"
        )


def open_config(folder: Path) -> dict[str, Any] | None:
    """Return the config.json of a model to calibrate, or None if it has none.

    Raises:
        CalibrationError: If the file is damaged, the model is quantized or has code, or another
            release of transformers wrote its rotary embedding or its types of layers.
    """
    refuse_code(folder)
    file = folder / "config.json"
    try:
        config = read_json(file)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CalibrationError(str(error)) from error
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
    _check_layers(config, file)
    return config


def _check_layers(config: Mapping[str, Any], file: Path) -> None:
    """Refuse types of layers that the installed class of a config does not have."""
    from transformers import CONFIG_MAPPING

    types, kind = str(config.get("layer_types") or ""), str(config.get("model_type"))
    names = {*re.findall(r"\w+", types)} - {"full_attention"}
    reads = not names or kind not in CONFIG_MAPPING
    if not (reads or "layer_types" in CONFIG_MAPPING[kind]().to_dict()):
        raise CalibrationError(
            f"{file} has layer_types ({', '.join(sorted(names))}), which transformers "
            f"{RELEASE} does not read for {kind}: install the release that wrote it"
        )
