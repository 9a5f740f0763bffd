"""Reads and checks the settings of a method from its YAML keys."""

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
"""Parts of a run's config that may contain arguments of any loader."""
COMPARED_ROWS = (BASE, EXPERTS, MERGED)
SettingsType = TypeVar("SettingsType", bound=FeatCalSettings)
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
        "Merging method that makes the initial merged model. Null: the pool's `_merged_` model is "
        "used.",
        accepts="a method's config (method@method.base_method=task_arithmetic, with the @)",
        check=is_merger,
    )


@dataclass(frozen=True, kw_only=True)
class RunSettings(MergedBy):
    """Settings of a run of `method=featcal` around its calibration."""

    save: str = setting(
        FEATCAL,
        "Model to save and return, by its name in the report.",
        accepts=f"{FEATCAL}, {FEATCAL}_<preset> or {MERGED}",
    )
    presets: Mapping[str, Any] | None = setting(
        None,
        "Further settings with which the same merged model is calibrated, {name: {setting: "
        "value}}. Null: with the paper's rule, the presets of the model pool.",
        accepts="a mapping of names to settings",
        check=is_mapping,
    )
    compare_with: Sequence[str] | None = setting(
        None,
        "Reference models to evaluate: base, experts, merged. Null: the model pool's choice, "
        "or [merged] if the pool has none.",
        accepts=f"a list of {', '.join(COMPARED_ROWS)}",
        check=lambda value: is_text_list(value, COMPARED_ROWS),
    )


@dataclass(frozen=True)
class SelectedModels(Generic[SettingsType]):
    """Models that a run calibrates and evaluates.

    Attributes:
        rows: Name in the report -> settings of the calibration. The method itself comes first.
        compare_with: Reference models to evaluate: any of `base`, `experts` and `merged`.
        save: Name of the model that is saved and returned.
    """

    rows: Mapping[str, SettingsType]
    compare_with: tuple[str, ...]
    save: str


def read_settings(values: Mapping[str, object], kinds: Sequence[type[Settings]]) -> list[Any]:
    """Build the dataclasses of a method's settings from its keys.

    Args:
        values: Values by name, as OmegaConf or plain objects. A missing setting has its default.
        kinds: The dataclasses that declare the settings.

    Returns:
        An object of each dataclass.

    Raises:
        ValueError: If a value is not accepted, or if a key is unknown, naming the nearest key.
    """
    refuse_unknown(values, [name for kind in kinds for name in kind.names()], "method.")
    # FusionBench instantiates a merger from OmegaConf's config.
    plain_values = {
        key: v if key == "base_method" else plain_config(v) for key, v in values.items()
    }
    by_class = {c: {k: plain_values[k] for k in c.names() if k in plain_values} for c in kinds}
    for kind, class_values in by_class.items():
        check_values(kind, class_values, "method.")
    return [kind(**class_values) for kind, class_values in by_class.items()]


def pool_defaults(program: object) -> dict[str, object]:
    """Return the model pool's defaults for this method: the key `featcal` of its YAML, or {}."""
    return plain_config(getattr(program, "_modelpool", {}).get("featcal")) or {}


def select_models(
    settings: SettingsType, run_settings: RunSettings, defaults: Mapping[str, Any]
) -> SelectedModels[SettingsType]:
    """Select the models of a run: the method's, one for each preset, and the references.

    Without presets in the run settings, the model pool's presets apply.

    Args:
        settings: Settings of the method. A preset changes some of them.
        run_settings: Settings of the run.
        defaults: Result of `pool_defaults`.

    Raises:
        ValueError: If the model to save is unknown, or if a preset has an unknown setting or a
            value that is not accepted.
    """
    refuse_unknown(defaults, _SUITE_DEFAULTS, "modelpool.featcal.")
    references = run_settings.compare_with
    if references is None:
        references = defaults.get("compare_with", [MERGED])
    row = row_of_rule(settings.rule)
    if run_settings.presets is not None:
        presets = _read_presets(settings, run_settings.presets, "method.presets")
    else:  # a pool's presets are for the paper's rule
        pool_presets = defaults.get("presets") or {} if settings.rule == "paper" else {}
        presets = _read_presets(settings, pool_presets, "modelpool.featcal.presets")
        presets = {name: preset for name, preset in presets.items() if preset != settings}
    if (folder := settings.checkpoint_dir) is not None:
        presets = {n: p.replace(checkpoint_dir=f"{folder}/preset-{n}") for n, p in presets.items()}
    rows = {row: settings} | {f"{FEATCAL}_{name}": preset for name, preset in presets.items()}
    rows[row] = settings  # a preset may have the same name
    save = row if run_settings.save == FEATCAL else run_settings.save
    refuse_unknown([save], [*rows, MERGED], "method.save: model ")
    return SelectedModels(rows, tuple(references), save)


def _read_presets(settings: SettingsType, presets: Any, key: str) -> dict[str, SettingsType]:
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

    If the preset has another rule, the values that belong to the first rule are left out.
    """
    rule = values.get("rule", FeatCalSettings.rule)
    if preset.get("rule", rule) == rule:
        return {**values, **preset}
    dropped = {*RULE_SETTINGS, *FeatCalSettings.names_by_rule()}
    return {name: values[name] for name in values if name not in dropped} | dict(preset)


def refuse_other_rule(row: str, rule: object, key: str) -> None:
    """Refuse a model that has the name of FeatCal+, but another rule.

    Args:
        row: Name of the model in the report.
        rule: Its rule.
        key: The setting that declares the model, for the message.

    Raises:
        ValueError: Naming the key.
    """
    if row == FEATCAL_PLUS and rule != "plus":
        raise ValueError(
            f"{key}: the name {row} stands for FeatCal+: set {key}.rule=plus, or rename it"
        )


def plain_config(value: object) -> Any:
    """Return an OmegaConf value as plain Python objects, and anything else unchanged."""
    if isinstance(value, DictConfig | ListConfig):
        return OmegaConf.to_container(value, resolve=True)
    return value
