"""Settings of a method from YAML: checked, and refused by name if unknown."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf

from fusion_bench_featcal.errors.nearest_names import refuse_unknown
from fusion_bench_featcal.files.names import refuse_unusable_names
from fusion_bench_featcal.results import BASE, EXPERTS, FEATCAL
from fusion_bench_featcal.results.names import FEATCAL_PLUS, MERGED, row_of_rule
from fusion_bench_featcal.settings import RULE_SETTINGS, FeatCalSettings
from fusion_bench_featcal.settings.fields import (
    Settings,
    check_values,
    is_mapping,
    is_mapping_to,
    is_text_list,
    setting,
)

FUSION_BENCH_KEYS = ("_usage_", "_version_", "_recursive_")
"""Keys in FusionBench's configs that are not settings of the method."""

POOLS = ("modelpool", "taskpool", "fabric")
"""Parts of a run's config with arguments of any loader."""
COMPARED_ROWS = (BASE, EXPERTS, MERGED)
Chosen = TypeVar("Chosen", bound=FeatCalSettings)
_SUITE_DEFAULTS = ("presets", "compare_with", "compare")


def is_merger(value: object) -> bool:
    """Return True for a method's config, which has `_target_` or, for older methods, `name`."""
    return isinstance(value, Mapping) and bool({"_target_", "name"} & set(value))


def method_name(config: Any) -> str:
    """Return `task_arithmetic` for `fusion_bench.method.TaskArithmeticAlgorithm`, or `name`."""
    target = str(config.get("_target_") or config.get("name"))
    words = target.rsplit(".", 1)[-1].removesuffix("Algorithm")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", words).lower()


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
    """Settings of a run of `method=featcal` around its calibration."""

    save: str = setting(
        FEATCAL,
        "Row to save and return.",
        accepts=f"{FEATCAL}, {FEATCAL}_<preset> or {MERGED}",
    )
    presets: Mapping[str, Any] | None = setting(
        None,
        "Further settings to calibrate on the same merged model, {name: {setting: value}}. Null: "
        "with the paper's rule the model pool's presets.",
        accepts="a mapping of names to settings",
        check=is_mapping,
    )
    compare_with: Sequence[str] | None = setting(
        None,
        "Reference rows to evaluate: base, experts, merged. Null: the model pool's choice, else "
        "[merged].",
        accepts=f"a list of {', '.join(COMPARED_ROWS)}",
        check=lambda value: is_text_list(value, COMPARED_ROWS),
    )


@dataclass(frozen=True)
class Choices(Generic[Chosen]):
    """Models that a run calibrates and evaluates."""

    rows: Mapping[str, Chosen]  # row -> settings, the method's own first
    compare_with: tuple[str, ...]  # of `base`, `experts` and `merged`
    save: str  # the row that is saved and returned


def read_settings(values: Mapping[str, object], kinds: Sequence[type[Settings]]) -> list[Any]:
    """Build the dataclasses of a method's settings from its keys.

    Args:
        values: Values by name, as OmegaConf or plain objects. Missing ones keep their default.
        kinds: The dataclasses that declare the settings.

    Raises:
        ValueError: If a key is unknown, with the nearest one, or a value is not accepted.
    """
    refuse_unknown(values, [name for kind in kinds for name in kind.names()], "method.")
    # FusionBench instantiates a merger from OmegaConf's config.
    plain_values = {
        key: v if key == "base_method" else plain_config(v) for key, v in values.items()
    }
    values_by_class = [
        {k: plain_values[k] for k in kind.names() if k in plain_values} for kind in kinds
    ]
    for kind, class_values in zip(kinds, values_by_class, strict=True):
        check_values(kind, class_values, "method.")
    return [kind(**class_values) for kind, class_values in zip(kinds, values_by_class, strict=True)]


def suite_of(program: object) -> dict[str, object]:
    """Return the key `featcal` of the running program's model pool, or nothing."""
    return plain_config(getattr(program, "_modelpool", {}).get("featcal")) or {}


def checked_choices(
    settings: Chosen, chosen: RunSettings, suite: Mapping[str, Any]
) -> Choices[Chosen]:
    """Return rows and references of the method, with presets of it or else of the model pool.

    Args:
        settings: The method's settings, which presets change.
        chosen: The settings of the run.
        suite: Defaults for this method in the model pool's YAML (its key `featcal`).

    Raises:
        ValueError: If the row to save is unknown, or a preset's setting is unknown or not accepted.
    """
    refuse_unknown(suite, _SUITE_DEFAULTS, "modelpool.featcal.")
    references = chosen.compare_with
    if references is None:
        references = suite.get("compare_with", [MERGED])
    row = row_of_rule(settings.rule)
    if chosen.presets is not None:
        checked = _checked_presets(settings, chosen.presets, "method.presets")
    else:  # the pool's, which are for the paper's rule and other settings than the run's
        presets = suite.get("presets") or {} if settings.rule == "paper" else {}
        checked = _checked_presets(settings, presets, "modelpool.featcal.presets")
        checked = {name: preset for name, preset in checked.items() if preset != settings}
    if (folder := settings.checkpoint_dir) is not None:
        checked = {n: p.replace(checkpoint_dir=f"{folder}/preset-{n}") for n, p in checked.items()}
    rows = {row: settings} | {f"{FEATCAL}_{name}": preset for name, preset in checked.items()}
    rows[row] = settings  # before a preset of this name
    save = row if chosen.save == FEATCAL else chosen.save
    refuse_unknown([save], [*rows, MERGED], "method.save: row ")
    return Choices(rows, tuple(references), save)


def _checked_presets(settings: Chosen, presets: Any, key: str) -> dict[str, Chosen]:
    if not is_mapping_to(is_mapping, presets):
        raise ValueError(f"{key} must be a mapping of names to settings, got {presets!r}")
    refuse_unusable_names(presets, key)
    checked = {}
    for name, changes in presets.items():
        refuse_unknown(changes, FeatCalSettings.names(), f"{key}.{name}.")
        try:
            checked[str(name)] = type(settings)(**with_preset(settings.by_name, changes))
        except ValueError as error:
            raise ValueError(f"{key}.{name}: {error}") from None
        refuse_other_rule(f"{FEATCAL}_{name}", checked[str(name)].rule, f"{key}.{name}")
    return checked


def with_preset(values: Mapping[str, Any], preset: Mapping[str, object]) -> dict[str, Any]:
    """Return values of settings with the changes of a preset.

    A preset with another rule has none of the values that belong to a rule, which may have no part
    in its rule, and would make its row another method.
    """
    rule = values.get("rule", FeatCalSettings.rule)
    if preset.get("rule", rule) == rule:
        return {**values, **preset}
    dropped = {*RULE_SETTINGS, *FeatCalSettings.names_by_rule()}
    return {name: values[name] for name in values if name not in dropped} | dict(preset)


def refuse_other_rule(row: str, rule: object, key: str) -> None:
    """Refuse a row that is named like FeatCal+ and has another rule.

    Raises:
        ValueError: Naming the key of the row.
    """
    if row == FEATCAL_PLUS and rule != "plus":
        raise ValueError(f"{key}: the row {row} is FeatCal+: set {key}.rule=plus, or rename it")


def plain_config(value: object) -> Any:
    """Return an OmegaConf value as plain Python objects, and anything else unchanged."""
    if isinstance(value, DictConfig | ListConfig):
        return OmegaConf.to_container(value, resolve=True)
    return value
