"""A method's keys from YAML: checked, and refused by name where they are unknown."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from fusion_bench_featcal.compare import BASE, EXPERTS
from fusion_bench_featcal.settings import FeatCalSettings

MERGED = "merged"
REFERENCES = (BASE, EXPERTS, MERGED)


@dataclass(frozen=True)
class Choices:
    """What a run calibrates and evaluates beside its own settings.

    Attributes:
        presets: Name -> settings that are calibrated on the same merged model.
        compare_with: References to evaluate, of `base`, `experts` and `merged`.
    """

    presets: Mapping[str, FeatCalSettings]
    compare_with: tuple[str, ...]


def checked_settings(values: Mapping[str, Any], place: str = "method") -> FeatCalSettings:
    """Settings from YAML.

    Args:
        values: Values by name, as OmegaConf or plain objects.
        place: Where they stand in the config, for messages.

    Returns:
        The settings.

    Raises:
        ValueError: If a key is unknown, with the nearest one, or a value out of range.
    """
    for key in values:
        if key not in FeatCalSettings.names():
            near = difflib.get_close_matches(key, FeatCalSettings.names(), n=1, cutoff=0.0)[0]
            raise ValueError(f"{place}.{key} is no setting of featcal; the nearest is {near!r}")
    try:
        return FeatCalSettings(**{key: plain(value) for key, value in values.items()})
    except ValueError as error:
        raise ValueError(str(error).replace("method.", f"{place}.")) from None


def checked_choices(
    settings: FeatCalSettings,
    presets: Mapping[str, Mapping[str, Any]] | None,
    compare_with: Any,
    suite: Mapping[str, Any],
) -> Choices:
    """Presets and references: the method's own where given, else the suite's.

    Args:
        settings: The method's settings, from which presets differ.
        presets: `method.presets`.
        compare_with: `method.compare_with`.
        suite: What the model pool's YAML brings for this method (its key `featcal`).

    Returns:
        The checked choices.

    Raises:
        ValueError: If a reference is unknown, or a preset's setting is unknown or out of range.
    """
    wanted = presets if presets is not None else suite.get("presets") or {}
    references = compare_with if compare_with is not None else suite.get("compare_with", [MERGED])
    unknown = [name for name in references if name not in REFERENCES]
    if isinstance(references, str) or unknown:
        raise ValueError(
            f"method.compare_with must be a list of {list(REFERENCES)}, got {references!r}"
        )
    checked = {
        name: checked_settings({**settings.as_dict(), **changes}, f"method.presets.{name}")
        for name, changes in wanted.items()
    }
    return Choices(checked, tuple(references))


def plain(value: Any) -> Any:
    """An OmegaConf value as plain Python objects; anything else as it is."""
    if isinstance(value, DictConfig | ListConfig):
        return OmegaConf.to_container(value, resolve=True)
    return value
