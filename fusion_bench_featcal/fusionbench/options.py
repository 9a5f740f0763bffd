"""A method's keys from YAML: checked, and refused by name where they are unknown."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from fusion_bench_featcal.nearest_names import (
    nearest_hint,
    refuse_unknown_settings,
    refuse_unusable_names,
)
from fusion_bench_featcal.results import BASE, EXPERTS, FEATCAL
from fusion_bench_featcal.settings import FeatCalSettings

FUSION_BENCH_KEYS = ("_usage_", "_version_", "_recursive_")
"""Keys that FusionBench's configs carry beside a method's own."""

log = logging.getLogger(__name__)

MERGED = "merged"
REFERENCES = (BASE, EXPERTS, MERGED)


@dataclass(frozen=True)
class Choices:
    """Choices of what a run calibrates and evaluates beside its own settings."""

    presets: Mapping[str, FeatCalSettings]  # calibrated on the same merged model
    compare_with: tuple[str, ...]  # of `base`, `experts` and `merged`
    save: str = FEATCAL  # the row that is saved and returned


def take_fusion_bench_keys(keys: dict[str, Any]) -> dict[str, Any]:
    """Take out of a method's keys those of FusionBench's constructor, and return them.

    `debug`, which the console reads from the config, is taken out too.

    Raises:
        ValueError: If `debug` is neither true nor false.
    """
    debug = keys.pop("debug", False)
    if not isinstance(debug, bool):
        raise ValueError(f"method.debug must be true or false, got {debug!r}")
    return {key: keys.pop(key) for key in FUSION_BENCH_KEYS if key in keys}


def checked_settings(
    values: Mapping[str, Any],
    kind: Any = FeatCalSettings,
    names: Sequence[str] | None = None,
    others: Sequence[str] = (),
    owner: str = "featcal",
) -> Any:
    """Settings from YAML.

    Args:
        values: Values by name, as OmegaConf or plain objects; what is absent keeps its default.
        kind: The settings' dataclass.
        names: Names of those fields that the method has; None: all.
        others: The method's keys that are no settings, which may have been meant, too.
        owner: The method, for the message.

    Raises:
        ValueError: If a key is unknown, with the nearest one, or a value out of range.
    """
    known = [field.name for field in fields(kind)] if names is None else names
    unknown = [key for key in values if key not in known]
    refuse_unknown_settings(unknown, [*known, *others], owner=owner)
    return kind(**{key: plain(value) for key, value in values.items()})


def checked_choices(
    settings: FeatCalSettings,
    presets: Mapping[str, Mapping[str, Any]] | None,
    compare_with: Any,
    suite: Mapping[str, Any],
    save: Any = FEATCAL,
) -> Choices:
    """Presets and references: the method's own where given, else the suite's.

    Args:
        settings: The method's settings, from which presets differ.
        presets: `method.presets`.
        compare_with: `method.compare_with`.
        suite: What the model pool's YAML brings for this method (its key `featcal`).
        save: `method.save`.

    Raises:
        ValueError: If a reference or the row to save is unknown, or a preset's setting is unknown
            or out of range.
    """
    unknown = sorted(set(suite) - {"presets", "compare_with", "compare", "sources"})
    if unknown:
        raise ValueError(
            f"modelpool.featcal: {unknown} unknown; it takes presets, compare_with and, for "
            "method=compare and method=study/transfer, compare and sources"
        )
    place = "method" if presets is not None else "modelpool.featcal"
    wanted = presets if presets is not None else suite.get("presets") or {}
    references = compare_with if compare_with is not None else suite.get("compare_with", [MERGED])
    if isinstance(references, str) or not set(references) <= set(REFERENCES):
        raise ValueError(f"method.compare_with must be of {list(REFERENCES)}, got {references!r}")
    start = settings if presets is not None else settings.with_paper_update()
    checked = _checked_presets(start, wanted, f"{place}.presets")
    if presets is None:
        checked = _without_own(settings, checked)
    rows = [FEATCAL, *(f"{FEATCAL}:{name}" for name in checked), MERGED]
    if save not in rows:
        raise ValueError(
            f"method.save must be a row that this run makes, of {', '.join(rows)}, got {save!r}"
            f"{nearest_hint(str(save), rows)}"
        )
    return Choices(checked, tuple(references), save)


def _without_own(
    settings: FeatCalSettings, presets: dict[str, FeatCalSettings]
) -> dict[str, FeatCalSettings]:
    """The pool's presets, without those that are the run's own settings."""
    folder = settings.checkpoint_dir
    others = {n: p for n, p in presets.items() if p.replace(checkpoint_dir=folder) != settings}
    default = FeatCalSettings()
    names = ("ridge_lambda", "mix_alpha", "anchor_rho", "rule")
    is_default = all(getattr(settings, name) == getattr(default, name) for name in names)
    for name in presets.keys() - others.keys():
        log.info("the pool's preset %s is this run's own settings: the row is featcal", name)
    papers = [name for name in others if name.startswith("paper_") and "-" not in name]
    if papers and len(others) == len(presets) and is_default:
        log.warning(
            "the row featcal has the paper's settings for CLIP; those for this pool are the row "
            "featcal:%s. With them alone: fusion_bench method=featcal/%s modelpool=...",
            papers[0],
            papers[0],
        )
    return others


def _checked_presets(
    settings: FeatCalSettings, presets: Any, place: str
) -> dict[str, FeatCalSettings]:
    if not isinstance(presets, Mapping):
        raise ValueError(f"{place} must map names to settings, got {presets!r}")
    checked = {}
    for name, changes in presets.items():
        if not isinstance(changes, Mapping) or not re.fullmatch(r"[\w.-]+", str(name)):
            raise ValueError(
                f"{place}: a preset is a name of letters, digits, dots and dashes with a mapping "
                f"of settings, got {name!r}: {changes!r}"
            )
        if "fuse_merge" in changes:
            raise ValueError(f"{place}.{name}.fuse_merge: set method.fuse_merge, for all presets")
        refuse_unknown_settings(changes, FeatCalSettings.names(), f"{place}.{name}", "featcal")
        for key in {"checkpoint_dir", "resume"} & set(changes):
            raise ValueError(
                f"{place}.{name}.{key}: set method.{key}, in which every preset has a folder"
            )
        for key in {"cache_dir", "calibration_data", "pixel_cache_mb"} & set(changes):
            raise ValueError(f"{place}.{name}.{key}: set method.{key}, which all presets share")
        folder = settings.checkpoint_dir
        own = {} if folder is None else {"checkpoint_dir": str(Path(folder) / f"preset-{name}")}
        try:
            checked[str(name)] = settings.replace(**changes, **own)
        except ValueError as error:
            raise ValueError(str(error).replace("method.", f"{place}.{name}.")) from None
    refuse_unusable_names(checked, place)
    return checked


def check_merger(base_method: Any) -> None:
    """Check that `method.base_method` is None or a merger's config.

    That is a mapping with `_target_` or, for older methods of FusionBench, `name`.

    Raises:
        ValueError: If it is anything else, such as a bare name.
    """
    known = isinstance(base_method, Mapping)
    if base_method is not None and not (known and {"_target_", "name"} & set(base_method)):
        raise ValueError(
            f"method.base_method must be a method's config, got {base_method!r}; choose one by "
            "method@method.base_method=task_arithmetic (with the @), or set it to null"
        )


def plain(value: Any) -> Any:
    """An OmegaConf value as plain Python objects; anything else as it is."""
    if isinstance(value, DictConfig | ListConfig):
        return OmegaConf.to_container(value, resolve=True)
    return value
