"""The preflight of a run that is named as on FusionBench's command line."""

from collections.abc import Sequence
from typing import Any

from fusion_bench.utils.hydra_utils import get_default_config_path
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from fusion_bench_featcal.preflight import Preflight, empty_model, preflight
from fusion_bench_featcal.settings import FeatCalSettings


def preflight_run(
    overrides: Sequence[str], *, length: int | None = None, target_length: int = 8
) -> Preflight:
    """Compose a run's config and look at its base model.

    Args:
        overrides: Words of the command line, such as `modelpool=flan-t5-base_glue`.
        length: Length of a sample in tokens; None: `method.max_length`, else 512.
        target_length: Length of an encoder-decoder's target.

    Returns:
        The counts.

    Raises:
        ValueError: If the pool names no base model, or its configuration cannot be found.
    """
    folder = str(get_default_config_path())
    words = list(overrides)
    if not any(word.startswith("method=") for word in words):
        words.append("method=featcal")
    with initialize_config_dir(folder, version_base=None):
        config = compose("fabric_model_fusion", overrides=words)
    known = FeatCalSettings.names()
    method: Any = OmegaConf.to_container(config.method, resolve=True)
    settings = FeatCalSettings(**{key: value for key, value in method.items() if key in known})
    models: Any = OmegaConf.to_container(config.modelpool.models, resolve=True)
    base = models.get("_pretrained_")
    if isinstance(base, dict):
        base = base.get("pretrained_model_name_or_path")
    if not isinstance(base, str):
        raise ValueError("modelpool.models._pretrained_ names no folder or hub id")
    tasks = sum(not name.startswith("_") for name in models)
    return preflight(
        empty_model(base),
        settings,
        tasks=tasks,
        length=length or settings.max_length or 512,
        target_length=target_length,
    )
