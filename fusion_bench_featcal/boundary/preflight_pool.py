"""The preflight of a run that is named as on FusionBench's command line."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fusion_bench.utils.hydra_utils import get_default_config_path
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fusion_bench_featcal.boundary.config_errors import explained
from fusion_bench_featcal.boundary.options import checked_settings
from fusion_bench_featcal.preflight import Preflight, empty_model, preflight
from fusion_bench_featcal.settings import FeatCalSettings

LENGTH = 512
"""Tokens of a text where `method.max_length` does not tell."""


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
    method, models, _ = compose_run(overrides)
    settings = settings_among(method)
    base = location_of(models.get("_pretrained_"))
    tasks = sum(not name.startswith("_") for name in models)
    return preflight(
        empty_model(base),
        settings,
        tasks=tasks,
        length=length or settings.max_length or LENGTH,
        target_length=target_length,
    )


class RunConfig(NamedTuple):
    """What a run's words say, as plain values: of Fabric, `devices` and `num_nodes`."""

    method: dict[str, Any]
    models: dict[str, Any]
    fabric: Any


def compose_run(overrides: Sequence[str]) -> RunConfig:
    """The keys of a run's method and Fabric, and its pool's models.

    Args:
        overrides: Words of the command line; without `method=` the method is featcal.

    Returns:
        What they say.

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
        # by name: its loggers need a running program
        given = config.fabric or {}
        fabric = {name: given.get(name, 1) for name in ("devices", "num_nodes")}
        fabric = OmegaConf.to_container(OmegaConf.create(fabric))
    except (HydraException, OmegaConfBaseException) as error:
        raise explained(error) from error
    return RunConfig(method, models, fabric)


def settings_among(method: Mapping[str, Any]) -> FeatCalSettings:
    """The settings among a method's keys.

    Raises:
        ValueError: If a value is out of range.
    """
    known = FeatCalSettings.names()
    return checked_settings({key: value for key, value in method.items() if key in known})


def location_of(entry: Any) -> str:
    """The folder or hub id of a model pool's entry.

    Raises:
        ValueError: If it has none.
    """
    keys = ("pretrained_model_name_or_path", "base_model_path")
    if isinstance(entry, Mapping):
        entry = next((entry[key] for key in keys if key in entry), None)
    if not isinstance(entry, str):
        raise ValueError(
            "modelpool.models._pretrained_ names no folder or hub id, whose config is needed"
        )
    return entry
