"""Rows of a comparison: which mergers and methods run, checked before anything is loaded."""

import inspect
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusion_bench.compat.method import AlgorithmFactory
from hydra.utils import instantiate
from omegaconf import OmegaConf

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.fusionbench.options import is_merger, plain
from fusion_bench_featcal.fusionbench.pool_models import import_target
from fusion_bench_featcal.lab.rivals.interface import PostMerging
from fusion_bench_featcal.nearest_names import nearest_hint
from fusion_bench_featcal.results import BASE, EXPERTS, FEATCAL

log = logging.getLogger(__name__)

REFERENCES = (BASE, EXPERTS)
NONE = "none"  # in method.post_merging: the merger alone, which always runs
_OWN = "fusion_bench_featcal."
_MEMBERS = ("settings", "check", "post_merge", "samples", "added")


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
    method: PostMerging | None = None
    config: Any = None  # of the method

    @property
    def title(self) -> str:
        """Name in logs and files."""
        return f"{self.merger.name}+{self.row}" if self.merger and self.method else self.row


@dataclass(frozen=True, kw_only=True)
class Entries:
    """The names of a comparison with their configs, and the chosen ones.

    Attributes:
        upstreams: Mergers on which methods run.
        alone: Mergers that run alone.
        methods: Post-merging methods.
        left_out: Names that run only if chosen, with the reason.
    """

    upstreams: Mapping[str, Any]
    alone: Mapping[str, Any]
    methods: Mapping[str, Any]
    left_out: Mapping[str, str]


def entries_of(settings: Any, suite: Mapping[str, Any]) -> Entries:
    """Return the configs of a comparison with the model pool's changes.

    Args:
        settings: The comparison's settings.
        suite: Key `featcal` of the pool's YAML. Its `presets` of FeatCal become rows
            `featcal_<name>`. Its `compare` has `leave_out` and, under the keys of the settings,
            further settings of entries.

    Raises:
        ValueError: If an entry is no mapping, or a key of `compare` is unknown.
    """
    changes = dict(suite.get("compare") or {})
    left_out = {**(plain(settings.leave_out) or {}), **(changes.pop("leave_out", None) or {})}
    keys = ("upstream_mergers", "mergers_alone", "post_merging_methods")
    if unknown := sorted(set(changes) - set(keys)):
        raise ValueError(
            f"modelpool.featcal.compare: {unknown} unknown; it takes leave_out, {', '.join(keys)}"
        )
    upstreams, alone, methods = (
        _configs(getattr(settings, key), changes.get(key) or {}, key) for key in keys
    )
    featcal, presets = methods.get(FEATCAL), suite.get("presets") or {}
    if isinstance(featcal, Mapping):
        methods |= {f"{FEATCAL}_{name}": {**featcal, **of} for name, of in presets.items()}
    return Entries(upstreams=upstreams, alone=alone, methods=methods, left_out=left_out)


def _configs(value: Any, changes: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return configs by name, with the pool's changes. Entries set to null are removed."""
    value = plain(value) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"method.{key} must map names to configs, got {value!r}")
    configs = {str(name): config for name, config in value.items() if config is not None}
    for name, settings in changes.items():
        if isinstance(configs.get(name), Mapping):
            configs[name] = plain(OmegaConf.merge(configs[name], settings))
    return configs


def cells_of(settings: Any, suite: Mapping[str, Any]) -> list[Cell]:
    """Return all cells: references, then each merger before the methods on it.

    Raises:
        ValueError: If names are unknown or taken twice, settings do not fit, or there is nothing to
            run. The message has all problems.
    """
    entries, problems = entries_of(settings, suite), list[str]()
    chosen = {
        key: list(_chosen(plain(getattr(settings, key)), available, key, entries, problems))
        for key, available in {
            "references": dict.fromkeys(REFERENCES),
            "upstreams": entries.upstreams,
            "alone": entries.alone,
            "post_merging": {NONE: None, **entries.methods},
        }.items()
    }
    upstreams, alone = (
        [_merger(name, configs[name], f"method.{key}.{name}", problems) for name in names]
        for names, configs, key in (
            (chosen["upstreams"], entries.upstreams, "upstream_mergers"),
            (chosen["alone"], entries.alone, "mergers_alone"),
        )
    )
    rows = [name for name in chosen["post_merging"] if name != NONE]
    methods = {name: _method(name, entries.methods[name], problems) for name in rows}
    names = [*REFERENCES, *(merger.name for merger in [*upstreams, *alone]), *methods]
    problems += [
        f"{name!r} names two rows of the comparison: rename one in YAML"
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    if not upstreams and not alone and not problems:
        problems.append("there is nothing to run: name a merger in method.upstreams or alone")
    if problems:
        raise ValueError("\n".join(problems))
    cells = [Cell(row=name) for name in chosen["references"]]
    for merger in upstreams:
        cells.append(Cell(row=merger.name, merger=merger))
        for name, method in methods.items():
            config = entries.methods[name]
            cells.append(Cell(row=name, merger=merger, method=method, config=config))
    return cells + [Cell(row=merger.name, merger=merger) for merger in alone]


def _chosen(
    names: Any, available: Mapping[str, Any], key: str, entries: Entries, problems: list[str]
) -> Iterator[str]:
    """Yield the chosen names, or without a choice all that are not left out."""
    if names is None:
        for name in available:
            if name in entries.left_out:
                log.info("method.%s: %s is left out: %s", key, name, entries.left_out[name])
            else:
                yield name
        return
    if isinstance(names, str) or not isinstance(names, Sequence):
        problems.append(f"method.{key} must be a list of names, got {names!r}")
        return
    for name in dict.fromkeys(names):
        if name in available:
            yield name
        else:
            problems.append(
                f"method.{key}: {name!r} is unknown{nearest_hint(name, available)}. There are: "
                f"{', '.join(available) or 'none'}"
            )


def _merger(name: str, config: Any, setting: str, problems: list[str]) -> Merger:
    if re.search(r"[^\w.+-]", name) or name.startswith("."):
        problems.append(f"{setting}: the name is that of a folder: use letters, digits and ._+-")
    if not is_merger(config):
        problems.append(
            f"{setting} must be a method's config (with _target_ or name), got {config!r}; add "
            f"one by +method@{setting}=task_arithmetic (with the @)"
        )
    elif problem := _problem_of(config, setting):
        problems.append(problem)
    elif str(config.get("_target_")).startswith(_OWN):
        _made(config, setting, problems)  # the constructor checks the settings
    return Merger(name=name, config=config, setting=setting)


def _method(name: str, config: Any, problems: list[str]) -> Any:
    setting = f"method.post_merging_methods.{name}"
    if not isinstance(config, Mapping) or "_target_" not in config:
        problems.append(f"{setting} must have a _target_, got {config!r}")
    elif problem := _problem_of(config, setting):
        problems.append(problem)
    elif method := _made(config, setting, problems):
        if missing := [member for member in _MEMBERS if not hasattr(method, member)]:
            target = config["_target_"]
            problems.append(f"{setting}: {target} is no post-merging method: it lacks {missing}")
        return method
    return None


def _made(config: Mapping[str, Any], setting: str, problems: list[str]) -> Any:
    try:
        return instantiate(config, _recursive_=False, _convert_="all")
    except Exception as error:  # Hydra wraps the constructor's error, which is about a setting
        reason = str(error.__cause__ or error).replace("method.", f"{setting}.")
        problems.append(f"{setting}: {reason}")
        return None


def _problem_of(config: Mapping[str, Any], setting: str) -> str | None:
    """Import the `_target_` of an entry (or `name`, for older methods), and check its keys."""
    target = config.get("_target_")
    if target is None:
        available, name = AlgorithmFactory.available_algorithms(), config.get("name")
        if name in available:
            return None
        hint = nearest_hint(name, available)
        return f"{setting}.name: FusionBench has no method {name!r}{hint}"
    try:
        parameters = inspect.signature(import_target(setting, target)).parameters.values()
    except CalibrationError as error:
        return str(error)
    except (TypeError, ValueError):  # it has no signature
        return None
    names = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters)
    for key in config:
        if re.fullmatch(r"_\w+_", str(key)) or key in names:
            continue
        hint = nearest_hint(key, names)
        # FusionBench's classes accept any key with a warning. Classes of this package check theirs.
        if not takes_any or (hint and not str(target).startswith(_OWN)):
            return f"{setting}.{key} is unknown{hint}; it takes {', '.join(names)}"
    return None
