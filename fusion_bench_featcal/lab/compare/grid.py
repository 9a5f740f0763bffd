"""Rows of a comparison: which mergers and methods run, checked before anything is loaded."""

import inspect
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusion_bench.compat.method import AlgorithmFactory
from hydra.utils import instantiate

from fusion_bench_featcal.errors.nearest_names import nearest_hint, refuse_unknown
from fusion_bench_featcal.fusionbench.options import (
    is_merger,
    plain,
    refuse_other_rule,
    with_preset,
)
from fusion_bench_featcal.fusionbench.pool_models import import_target
from fusion_bench_featcal.lab.rivals import Chain, Method
from fusion_bench_featcal.results import BASE, EXPERTS, FEATCAL

log = logging.getLogger(__name__)

REFERENCES = (BASE, EXPERTS)
NONE = "none"  # in method.post_merging: the merger alone, which always runs
_KEYS = ("upstream_mergers", "mergers_alone", "post_merging_methods")
_SHARED = ("samples_per_task", "calibration_split", "calibration_corruption", "seed")


@dataclass(frozen=True, kw_only=True)
class Merger:
    """An upstream merger: its config, and the setting that has it."""

    name: str
    config: Any
    setting: str


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One row over one merger. A reference has no merger, the merger's own row no method."""

    row: str
    merger: Merger | None = None
    method: Any = None
    config: Any = None  # of the method

    @property
    def title(self) -> str:
        """Name in logs and files."""
        return f"{self.merger.name}+{self.row}" if self.merger and self.method else self.row


def cells_of(settings: Any, suite: Mapping[str, Any]) -> list[Cell]:
    """Return all cells: references, then each merger before the methods on it.

    Args:
        settings: The comparison's settings.
        suite: Key `featcal` of the pool's YAML. Its `presets` of FeatCal become rows
            `featcal_<name>`. Its `compare` has `leave_out`.

    Raises:
        ValueError: If a name is unknown or taken twice, an entry's setting does not fit, or there
            is nothing to run.
        CalibrationError: If a `_target_` cannot be imported.
    """
    changes = suite.get("compare") or {}
    refuse_unknown(changes, ("leave_out",), "modelpool.featcal.compare.")
    left_out = {**(plain(settings.leave_out) or {}), **(changes.get("leave_out") or {})}
    upstreams, alone, methods = (_configs(settings, key) for key in _KEYS)
    presets = suite.get("presets") or {} if isinstance(methods.get(FEATCAL), Mapping) else {}
    methods |= {
        f"{FEATCAL}_{name}": with_preset(methods[FEATCAL], of) for name, of in presets.items()
    }

    cells = [Cell(row=name) for name in _chosen(settings, "references", REFERENCES, {})]
    rows = [
        _row(name, methods[name], settings)
        for name in _chosen(settings, "post_merging", {NONE: None, **methods}, left_out)
        if name != NONE
    ]
    for name in _chosen(settings, "upstreams", upstreams, left_out):
        merger = _merger(name, upstreams[name], f"method.upstream_mergers.{name}")
        cells.append(Cell(row=name, merger=merger))
        cells += [Cell(**{**vars(cell), "merger": merger}) for cell in rows]
    for name in _chosen(settings, "alone", alone, left_out):
        merger = _merger(name, alone[name], f"method.mergers_alone.{name}")
        cells.append(Cell(row=name, merger=merger))
    counts = Counter([*REFERENCES, *(cell.row for cell in rows)])
    counts.update(cell.row for cell in cells if cell.merger and not cell.method)
    for name in (name for name, count in counts.items() if count > 1):
        raise ValueError(f"{name!r} names two rows of the comparison: rename one in YAML")
    if not any(cell.merger for cell in cells):
        raise ValueError("there is nothing to run: name a merger in method.upstreams or alone")
    return cells


def _configs(settings: Any, key: str) -> dict[str, Any]:
    """Return configs by name. Entries set to null are removed."""
    value = plain(getattr(settings, key)) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"method.{key} must map names to configs, got {value!r}")
    return {str(name): config for name, config in value.items() if config is not None}


def _chosen(
    settings: Any, key: str, available: Iterable[str], left_out: Mapping[str, str]
) -> list[str]:
    """Return the names that a setting chooses, or without a choice all that are not left out."""
    names, available = plain(getattr(settings, key)), list(available)
    if names is None:
        for name in (name for name in available if name in left_out):
            log.info("method.%s: %s is left out: %s", key, name, left_out[name])
        return [name for name in available if name not in left_out]
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ValueError(f"method.{key} must be a list of names, got {names!r}")
    for name in names:
        if name not in available:
            raise ValueError(
                f"method.{key}: {name!r} is unknown{nearest_hint(name, available)}. There are: "
                f"{', '.join(available) or 'none'}"
            )
    return list(dict.fromkeys(names))


def _merger(name: str, config: Any, setting: str) -> Merger:
    """Return a merger, whose name and config are usable."""
    if re.search(r"[^\w.+-]", name) or name.startswith("."):
        raise ValueError(f"{setting}: the name is that of a folder: use letters, digits and ._+-")
    if not is_merger(config):
        raise ValueError(
            f"{setting} must be a method's config (with _target_ or name), got {config!r}; add "
            f"one by +method@{setting}=task_arithmetic (with the @)"
        )
    target, available = config.get("_target_"), AlgorithmFactory.available_algorithms()
    if target is None and config["name"] not in available:
        hint = nearest_hint(config["name"], available)
        raise ValueError(f"{setting}.name: FusionBench has no method {config['name']!r}{hint}")
    if str(target).startswith("fusion_bench_featcal."):
        _made(config, setting)  # the constructor checks the settings
    elif target is not None:
        _check_keys(config, setting)
    return Merger(name=name, config=config, setting=setting)


def _row(name: str, config: Any, settings: Any) -> Cell:
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


def _drawing_alike(config: Any, settings: Any, setting: str) -> dict[str, Any]:
    """Return a method's config, with the comparison's seed and samples where it names none."""
    if not isinstance(config, Mapping) or "_target_" not in config:
        raise ValueError(f"{setting} must have a _target_, got {config!r}")
    kind = import_target(setting, config["_target_"])
    names = kind.names() if isinstance(kind, type) and issubclass(kind, Method) else ()
    shared = {name: plain(getattr(settings, name)) for name in _SHARED if name in names}
    config = shared | dict(config)
    if kind is Chain:
        config["methods"] = [
            _drawing_alike(of, settings, setting) for of in config.get("methods") or ()
        ]
    return config


def _made(config: Mapping[str, Any], setting: str) -> Any:
    try:
        return instantiate(config, _recursive_=False, _convert_="all")
    except Exception as error:  # Hydra wraps the constructor's error, which is about a setting
        reason = str(error.__cause__ or error).replace("method.", f"{setting}.")
        prefix = "" if reason.startswith(setting) else f"{setting}: "
        raise ValueError(f"{prefix}{reason}") from error


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
