"""Rows of a comparison: which mergers and methods run, checked before anything is loaded."""

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

NONE = "none"  # in method.post_merging: the merger alone, which always runs
CHOICES = ("upstreams", "post_merging")


@dataclass(frozen=True, kw_only=True)
class MergerEntry:
    """An upstream merger: its config, and the setting that has it."""

    name: str
    config: Any
    setting: str

    @property
    def methods(self) -> list[Method]:
        """The method of its model, if it is one of ours. It is new, as opened data stay in it.

        Raises:
            ValueError: If a setting is unknown or not accepted.
            CalibrationError: If its `_target_` cannot be imported.
        """
        target = self.config.get("_target_")
        if target is None or not hasattr(import_target(self.setting, target), "rows"):
            return []
        algorithm = _made(self.config, self.setting)
        return [algorithm.rows[algorithm.saved]] if algorithm.saved in algorithm.rows else []


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One row over one merger. A reference has no merger, the merger's own row no method."""

    row: str
    merger: MergerEntry | None = None
    method: Any = None
    config: Any = None  # of the method

    @property
    def title(self) -> str:
        """Name in logs and files."""
        return f"{self.merger.name}+{self.row}" if self.merger and self.method else self.row


def cells_of(settings: ComparisonSettings, suite: Mapping[str, Any]) -> list[Cell]:
    """Return all cells: references, then each merger before the methods on it.

    A method that is also an upstream merger, such as a repair, does not run on its own result.

    Args:
        settings: The comparison's settings.
        suite: Key `featcal` of the pool's YAML. Its `presets` of FeatCal become rows
            `featcal_<name>`. Its `compare` may name the pool's `upstreams` and `post_merging`.

    Raises:
        ValueError: If a name is unknown or taken twice, an entry's setting does not fit, or there
            is nothing to run.
        CalibrationError: If a `_target_` cannot be imported.
    """
    upstreams = _configs(settings.upstream_mergers)
    methods = _configs(settings.post_merging_methods)
    presets = suite.get("presets") or {} if isinstance(methods.get(FEATCAL), Mapping) else {}
    presets = {
        f"{FEATCAL}_{name}": with_preset(methods[FEATCAL], preset)
        for name, preset in presets.items()
    }
    methods |= presets
    defaults = _defaults(settings, suite, presets)
    references = _named("method.references", settings.references, REFERENCES)
    mergers = [
        _merger(name, upstreams[name], f"method.upstream_mergers.{name}")
        for name in _chosen("upstreams", settings.upstreams, upstreams, defaults)
    ]
    rows = [
        _row(name, methods[name], settings)
        for name in _chosen("post_merging", settings.post_merging, [NONE, *methods], defaults)
        if name != NONE
    ]
    if not mergers:
        raise ValueError("there is nothing to run: name a merger in method.upstreams")
    for name in (*(merger.name for merger in mergers), *(cell.row for cell in rows)):
        if name in REFERENCES:
            raise ValueError(f"{name!r} names a reference row of the comparison: rename it in YAML")
    cells = [Cell(row=name) for name in references]
    for merger in mergers:
        cells.append(Cell(row=merger.name, merger=merger))
        cells += [replace(row, merger=merger) for row in rows if row.row != merger.name]
    return cells


def _defaults(
    settings: ComparisonSettings, suite: Mapping[str, Any], presets: Iterable[str]
) -> dict[str, Sequence[str]]:
    """Return the names that run if none are chosen: the pool's, else the comparison's."""
    pool_choices, method_choices = suite.get("compare") or {}, settings.default_rows or {}
    refuse_unknown(pool_choices, CHOICES, "modelpool.featcal.compare.")
    refuse_unknown(method_choices, CHOICES, "method.default_rows.")
    if "post_merging" in method_choices:  # each preset of the pool is a row of its own
        method_choices = {
            **method_choices,
            "post_merging": [*method_choices["post_merging"], *presets],
        }
    return {**method_choices, **pool_choices}


def _configs(configs: Mapping[str, object] | None) -> dict[str, Any]:
    """Return configs by name. Entries set to null are removed."""
    return {str(name): config for name, config in (configs or {}).items() if config is not None}


def _chosen(
    key: str,
    names: Sequence[str] | None,
    available: Iterable[str],
    defaults: Mapping[str, Sequence[str]],
) -> list[str]:
    """Return the names that a setting chooses, without a choice the default ones, else all."""
    if names is not None:
        return _named(f"method.{key}", names, available)
    return _named(f"the default {key}", defaults.get(key, [*available]), available)


def _named(key: str, names: Sequence[str], available: Iterable[str]) -> list[str]:
    """Return a list of available names, each once."""
    refuse_unknown(names, available, f"{key}: ")
    return list(dict.fromkeys(names))


def _merger(name: str, config: Any, setting: str) -> MergerEntry:
    """Return a merger, whose name and config are usable."""
    if re.search(r"[^\w.+-]", name) or name.startswith("."):
        raise ValueError(f"{setting}: the name is that of a folder: use letters, digits and ._+-")
    if not is_merger(config):
        raise ValueError(
            f"{setting} must be a method's config (with _target_ or name), got {config!r}; add "
            f"one by +method@{setting}=task_arithmetic (with the @)"
        )
    if (target := config.get("_target_")) is None:
        available = AlgorithmFactory.available_algorithms()
        refuse_unknown([config["name"]], available, f"{setting}.name: method of FusionBench ")
    merger = MergerEntry(name=name, config=config, setting=setting)
    if target is not None and not merger.methods:
        _check_keys(config, setting)
    return merger


def _row(name: str, config: object, settings: ComparisonSettings) -> Cell:
    """Return a method's row, not yet over a merger."""
    setting = f"method.post_merging_methods.{name}"
    config = _drawing_alike(config, settings, setting)
    method = _made(config, setting)
    if not isinstance(method, Method) or not hasattr(method, "post_merge"):
        raise ValueError(
            f"{setting}: {config['_target_']} is no post-merging method: derive it from "
            "fusion_bench_featcal.lab.rivals.Method and give it post_merge(merged, inputs)"
        )
    refuse_other_rule(name, getattr(method, "rule", None), setting)
    return Cell(row=name, method=method, config=config)


def _drawing_alike(config: object, settings: ComparisonSettings, setting: str) -> dict[str, object]:
    """Return a method's config, with the comparison's seed and samples where it names none."""
    if not isinstance(config, Mapping) or "_target_" not in config:
        raise ValueError(f"{setting} must have a _target_, got {config!r}")
    kind = import_target(setting, config["_target_"])
    if not isinstance(kind, type) or not issubclass(kind, Method):
        return dict(config)
    keys = [key for key in config if key != "_target_" and key not in FUSION_BENCH_KEYS]
    refuse_unknown(keys, kind.names(), f"{setting}.")
    shared = {name: getattr(settings, name) for name in PoolDraw.names() if name in kind.names()}
    return shared | dict(config)


def _made(config: Mapping[str, object], setting: str) -> Any:
    try:
        return instantiate(config, _recursive_=False, _convert_="all")
    except Exception as error:  # Hydra wraps the constructor's error, which is about a setting
        raise ValueError(f"{setting}: {error.__cause__ or error}") from error


def _check_keys(config: Mapping[str, Any], setting: str) -> None:
    """Refuse keys that a merger's class does not take. FusionBench's only warn of them."""
    target = import_target(setting, config["_target_"])
    parameters = inspect.signature(target).parameters.values()
    names = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters)
    for key in config:
        if re.fullmatch(r"_\w+_", str(key)) or key in names:
            continue
        if (hint := nearest_hint(key, names)) or not takes_any:
            raise ValueError(f"{setting}.{key} is unknown{hint}; it takes {', '.join(names)}")
