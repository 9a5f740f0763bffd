"""A method's keys from YAML: checked, and refused by name where they are unknown."""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from fusion_bench_featcal.nearest_names import (
    nearest_hint,
    refuse_unknown_settings,
    refuse_unusable_names,
)
from fusion_bench_featcal.results import BASE, EXPERTS, FEATCAL
from fusion_bench_featcal.setting_fields import Settings, setting, settings_of
from fusion_bench_featcal.settings import FeatCalSettings

FUSION_BENCH_KEYS = ("_usage_", "_version_", "_recursive_")
"""Keys that FusionBench's configs carry beside a method's own."""

log = logging.getLogger(__name__)

MERGED = "merged"
REFERENCES = (BASE, EXPERTS, MERGED)


def is_merger(value: Any) -> bool:
    """Return True for a method's config, which has `_target_` or, of older methods, `name`."""
    return isinstance(value, Mapping) and bool({"_target_", "name"} & set(value))


def _are_references(value: Any) -> bool:
    return not isinstance(value, str) and set(value) <= set(REFERENCES)


@dataclass(frozen=True, kw_only=True)
class MergedBy(Settings):
    """The setting of every method that improves a merged model."""

    base_method: Mapping[str, Any] | None = setting(
        None,
        "Upstream merger, whose model is improved. Null: the pool's `_merged_` model.",
        accepts="a method's config (method@method.base_method=task_arithmetic, with the @)",
        check=is_merger,
    )


@dataclass(frozen=True, kw_only=True)
class RunSettings(MergedBy):
    """Settings of `method=featcal` beside those of the calibration."""

    fuse_merge: bool | str = setting(
        "auto",
        "`auto`: FusionBench's simple average and task arithmetic merge tensor by tensor if base "
        "and experts are files. false: mergers load whole models.",
        choices=("auto", False),
        group="the run",
    )
    save: str = setting(
        FEATCAL,
        "Row to save and return.",
        accepts=f"{FEATCAL}, {FEATCAL}:<preset> or {MERGED}",
    )
    presets: Mapping[str, Any] | None = setting(
        None,
        "Further settings to calibrate on the same merged model, {name: {setting: value}}. Null: "
        "the model pool's presets, if it has any.",
        accepts="a mapping of names to settings",
        check=lambda value: isinstance(value, Mapping),
    )
    compare_with: Sequence[str] | None = setting(
        None,
        "Reference rows to evaluate: base, experts, merged. Null: the model pool's choice, else "
        "[merged].",
        accepts=f"a list of {', '.join(REFERENCES)}",
        check=_are_references,
    )


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


def names_of(kinds: Iterable[type]) -> list[str]:
    """Return the names of the settings that several dataclasses declare."""
    return [field.name for kind in kinds for field in settings_of(kind)]


def read_settings(values: Mapping[str, Any], kinds: Sequence[type], owner: str) -> list[Any]:
    """Make the dataclasses of a method's settings from its keys.

    Args:
        values: Values by name, as OmegaConf or plain objects; absent ones keep their default.
        kinds: The dataclasses that declare the settings.
        owner: The method, for messages.

    Raises:
        ValueError: If a key is unknown, with the nearest one, or a value is not accepted.
    """
    refuse_unknown_settings(values, names_of(kinds), owner=owner)
    # FusionBench instantiates a merger from OmegaConf's config.
    given = {key: v if key == "base_method" else plain(v) for key, v in values.items()}
    return [kind(**{key: given[key] for key in names_of([kind]) if key in given}) for kind in kinds]


def checked_settings(values: Mapping[str, Any]) -> FeatCalSettings:
    """Return a calibration's settings from YAML; raises as `read_settings`."""
    return read_settings(values, [FeatCalSettings], "featcal")[0]


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
    if not _are_references(references):
        raise ValueError(
            f"modelpool.featcal.compare_with must be a list of {', '.join(REFERENCES)}, got "
            f"{references!r}"
        )
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


def plain(value: Any) -> Any:
    """An OmegaConf value as plain Python objects; anything else as it is."""
    if isinstance(value, DictConfig | ListConfig):
        return OmegaConf.to_container(value, resolve=True)
    return value
