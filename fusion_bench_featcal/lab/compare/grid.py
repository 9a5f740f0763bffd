"""Cells of a comparison: which mergers and methods run, checked before anything is loaded."""

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fusion_bench.compat.method import AlgorithmFactory
from hydra.utils import instantiate

from fusion_bench_featcal.errors.nearest_names import nearest_hint, refuse_unknown
from fusion_bench_featcal.fusionbench.pool_models import import_target
from fusion_bench_featcal.fusionbench.run_settings import (
    FUSION_BENCH_KEYS,
    is_merger,
    refuse_other_rule,
    with_preset,
)
from fusion_bench_featcal.lab.compare.settings import ComparisonSettings
from fusion_bench_featcal.lab.rivals import Method
from fusion_bench_featcal.results import FEATCAL
from fusion_bench_featcal.results.names import REFERENCES
from fusion_bench_featcal.settings import PoolDraw

NONE = "none"  # in method.post_merging: no method, only the merged model, which always runs
CHOICES = ("upstreams", "post_merging")


@dataclass(frozen=True, kw_only=True)
class MergerEntry:
    """An upstream merger: its config, and the name of the setting with the config."""

    name: str
    config: Any
    setting: str

    @property
    def methods(self) -> list[Method]:
        """A new object of the method that builds its model, if the method is one of ours.

        Raises:
            ValueError: If a setting is unknown or not accepted.
            CalibrationError: If its `_target_` cannot be imported.
        """
        target = self.config.get("_target_")
        if target is None or not hasattr(import_target(self.setting, target), "methods"):
            return []
        algorithm = _instantiate(self.config, self.setting)
        method = algorithm.methods.get(algorithm.model_to_save)
        return [] if method is None else [method]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One model of a comparison.

    Attributes:
        name: The model's name in reports: the name of a reference, a merger or a method.
        merger: Its upstream merger, or None for a reference.
        method: The method that improves the merged model, or None for the merged model itself.
        config: Config of the method.
    """

    name: str
    merger: MergerEntry | None = None
    method: Any = None
    config: Any = None

    @property
    def title(self) -> str:
        """Name in logs and files."""
        return f"{self.merger.name}+{self.name}" if self.merger and self.method else self.name


def cells_of(settings: ComparisonSettings, pool_defaults: Mapping[str, Any]) -> list[Cell]:
    """Return all cells: references, then each merger before the methods that improve its model.

    A method that is also an upstream merger, such as FeatCal, does not improve its own model.

    Args:
        settings: The comparison's settings.
        pool_defaults: Key `featcal` of the pool's YAML. Its `presets` of FeatCal become methods
            `featcal_<name>`. Its `compare` may name the pool's `upstreams` and `post_merging`.

    Raises:
        ValueError: If a name is unknown or taken twice, a setting of an entry does not fit, or
            there is nothing to run.
        CalibrationError: If a `_target_` cannot be imported.
    """
    upstreams = _without_nulls(settings.upstream_mergers)
    methods = _without_nulls(settings.post_merging_methods)
    presets = dict[str, dict[str, Any]]()
    if isinstance(methods.get(FEATCAL), Mapping):
        for name, preset in (pool_defaults.get("presets") or {}).items():
            presets[f"{FEATCAL}_{name}"] = with_preset(methods[FEATCAL], preset)
    methods |= presets
    defaults = _default_choices(settings, pool_defaults, presets)
    references = _choose("references", settings.references, REFERENCES, defaults)
    mergers = [
        _merger_entry(name, upstreams[name], f"method.upstream_mergers.{name}")
        for name in _choose("upstreams", settings.upstreams, upstreams, defaults)
    ]
    method_cells = [
        _method_cell(name, methods[name], settings, f"method.post_merging_methods.{name}")
        for name in _choose("post_merging", settings.post_merging, [NONE, *methods], defaults)
        if name != NONE
    ]
    if not mergers:
        raise ValueError("there is nothing to run: name a merging method in method.upstreams")
    for name in (entry.name for entry in (*mergers, *method_cells)):
        if name in REFERENCES:
            raise ValueError(
                f"{name!r} is the name of a reference of the comparison: rename it in YAML"
            )
    cells = [Cell(name=name) for name in references]
    for merger in mergers:
        cells.append(Cell(name=merger.name, merger=merger))
        cells += [replace(cell, merger=merger) for cell in method_cells if cell.name != merger.name]
    return cells


def _without_nulls(configs: Mapping[str, object] | None) -> dict[str, Any]:
    """Return configs by name, without the entries that are null."""
    return {str(name): config for name, config in (configs or {}).items() if config is not None}


def _default_choices(
    settings: ComparisonSettings, pool_defaults: Mapping[str, Any], presets: Iterable[str]
) -> dict[str, Sequence[str]]:
    """Return the names that run if none are chosen: the pool's, else the comparison's."""
    pool_choices, method_choices = pool_defaults.get("compare") or {}, settings.default_rows or {}
    refuse_unknown(pool_choices, CHOICES, "modelpool.featcal.compare.")
    refuse_unknown(method_choices, CHOICES, "method.default_rows.")
    choices = dict(method_choices)
    if "post_merging" in choices:  # each preset of the pool is a method of its own
        choices["post_merging"] = [*choices["post_merging"], *presets]
    return {**choices, **pool_choices}


def _choose(
    key: str,
    names: Sequence[str] | None,
    available: Iterable[str],
    defaults: Mapping[str, Sequence[str]],
) -> list[str]:
    """Return each name once that a setting chooses. If it is null, the default names, else all."""
    label = f"the default {key}" if names is None else f"method.{key}"
    if names is None:
        names = defaults.get(key, [*available])
    refuse_unknown(names, available, f"{label}: ")
    return list(dict.fromkeys(names))


def _merger_entry(name: str, config: Any, setting: str) -> MergerEntry:
    """Return a merger after checks of its name and config."""
    if re.search(r"[^\w.+-]", name) or name.startswith("."):
        raise ValueError(
            f"{setting}: the name becomes a folder's name: use only letters, digits and ._+-"
        )
    if not is_merger(config):
        raise ValueError(
            f"{setting} must be a method's config (with _target_ or name), got {config!r}; add "
            f"one with +method@{setting}=task_arithmetic (note the @)"
        )
    merger = MergerEntry(name=name, config=config, setting=setting)
    if (target := config.get("_target_")) is None:
        available = AlgorithmFactory.available_algorithms()
        refuse_unknown([config["name"]], available, f"{setting}.name: method of FusionBench ")
    elif not merger.methods:  # FusionBench's methods only warn of unknown keys
        parameters = inspect.signature(import_target(setting, target)).parameters.values()
        names = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters)
        for key in config:
            if re.fullmatch(r"_\w+_", str(key)) or key in names:
                continue
            if (hint := nearest_hint(key, names)) or not takes_any:
                raise ValueError(f"{setting}.{key} is unknown{hint}; it takes {', '.join(names)}")
    return merger


def _method_cell(name: str, config: object, settings: ComparisonSettings, setting: str) -> Cell:
    """Return a method's cell without a merger.

    Unless the config has other values, the method draws samples as the comparison's settings say.
    """
    if not isinstance(config, Mapping) or "_target_" not in config:
        raise ValueError(f"{setting} must have a _target_, got {config!r}")
    method_class = import_target(setting, config["_target_"])
    if isinstance(method_class, type) and issubclass(method_class, Method):
        names = method_class.names()
        keys = [key for key in config if key != "_target_" and key not in FUSION_BENCH_KEYS]
        refuse_unknown(keys, names, f"{setting}.")
        config = {n: getattr(settings, n) for n in PoolDraw.names() if n in names} | dict(config)
    method = _instantiate(config, setting)
    if not isinstance(method, Method) or not hasattr(method, "post_merge"):
        raise ValueError(
            f"{setting}: {config['_target_']} is not a post-merging method: derive it from "
            "fusion_bench_featcal.lab.rivals.Method and give it post_merge(merged, inputs)"
        )
    refuse_other_rule(name, getattr(method, "rule", None), setting)
    return Cell(name=name, method=method, config=config)


def _instantiate(config: Mapping[str, object], setting: str) -> Any:
    """Make the object of a config. Errors name the setting."""
    try:
        return instantiate(config, _recursive_=False, _convert_="all")
    except Exception as error:  # Hydra wraps the constructor's error, which is about a setting
        raise ValueError(f"{setting}: {error.__cause__ or error}") from error
