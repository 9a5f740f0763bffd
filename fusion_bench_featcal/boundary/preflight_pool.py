"""The preflight of a run that is named as on FusionBench's command line."""

from collections.abc import Sequence
from typing import Any

from fusion_bench.utils.hydra_utils import get_default_config_path
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

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
    method, models = compose_run(overrides)
    known = FeatCalSettings.names()
    settings = FeatCalSettings(**{key: value for key, value in method.items() if key in known})
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


def compose_run(overrides: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The method's keys and the pool's models of a run.

    Args:
        overrides: Words of the command line; without `method=` the method is featcal.

    Returns:
        Both as plain values.

    Raises:
        ValueError: If the words compose no run with a model pool.
    """
    folder = str(get_default_config_path())
    words = list(overrides)
    if not any(word.startswith("method=") for word in words):
        words.append("method=featcal")
    try:
        with initialize_config_dir(folder, version_base=None):
            config = compose("fabric_model_fusion", overrides=words)
        method: Any = OmegaConf.to_container(config.method, resolve=True)
        models: Any = OmegaConf.to_container(config.modelpool.models, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(f"{' '.join(words)}: {str(error).splitlines()[0]}") from error
    return method, models
