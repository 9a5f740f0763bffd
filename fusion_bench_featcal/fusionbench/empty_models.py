"""Models without weights, on the meta device, built from configurations."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.block import first_line
from fusion_bench_featcal.experts.model_config import read_config
from fusion_bench_featcal.models.hub import fetch

CONFIGS = Path(__file__).parents[1] / "known_configs"


def empty_model(location: str, kind: Any = None) -> nn.Module:
    """Build a model without weights, on the meta device, from its configuration.

    Args:
        location: Name of a configuration in this package (`flan-t5-base`, or a hub id that ends in
            it), a folder with `config.json`, or a hub id.
        kind: Its class, or one of transformers' Auto classes. By default the vision tower for CLIP,
            else the configuration's class or, if it names none, a language model with its head or
            a bare model.

    Returns:
        The model in its configuration's dtype.

    Raises:
        ValueError: If there is no such configuration, listing the package's configurations.
    """
    from transformers import AutoConfig, CLIPVisionModel

    packaged = CONFIGS / location.rstrip("/").rsplit("/", 1)[-1]
    is_packaged = packaged.is_dir() and not Path(location).is_dir()
    try:
        folder = packaged if is_packaged else fetch(location, "configuration", weights=False)
        read_config(folder)
        configs = getattr(kind, "config_class", AutoConfig)
        config: Any = configs.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, CalibrationError) as error:
        names = ", ".join(sorted(path.name for path in CONFIGS.iterdir()))
        raise ValueError(
            f"no configuration {location!r} ({first_line(error)}); give a folder with "
            f"config.json, a hub id, or one of {names}"
        ) from error
    dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None) or torch.float32
    if kind is None and config.model_type in ("clip", "clip_vision_model"):
        kind, config, dtype = (
            CLIPVisionModel,
            getattr(config, "vision_config", config),
            torch.float32,
        )
    kind = kind or _class_of(config)
    is_auto = hasattr(kind, "from_config")
    with torch.device("meta"):
        model = kind.from_config(config, trust_remote_code=False) if is_auto else kind(config)
    model = model.to(dtype).eval()
    # transformers 5 ties the head of every T5. Another key records that FLAN-T5's is not tied.
    if getattr(config, "scale_decoder_outputs", None) is False:
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
    return model


def _class_of(config: Any) -> Any:
    """Return the class of a configuration's model, or an Auto class that supports it."""
    import transformers
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    named = getattr(transformers, next(iter(config.architectures or [""])), None)
    if named is not None:
        return named
    kinds: tuple[Any, ...] = (AutoModelForSeq2SeqLM, AutoModelForCausalLM)
    return next((kind for kind in kinds if type(config) in kind._model_mapping), AutoModel)
