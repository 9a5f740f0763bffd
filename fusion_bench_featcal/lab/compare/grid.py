"""The grid of a comparison: upstream mergers times post-merging methods, checked."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from fusion_bench_featcal.fusionbench.options import is_merger, plain
from fusion_bench_featcal.lab.compare.entries import OWN, check_target, made_of
from fusion_bench_featcal.lab.rivals.interface import Chain, PostMerging
from fusion_bench_featcal.nearest_names import nearest_hint, refuse_unusable_names
from fusion_bench_featcal.results import BASE, EXPERTS, FEATCAL
from fusion_bench_featcal.setting_fields import setting

log = logging.getLogger(__name__)

NONE = "none"
REFERENCES = (BASE, EXPERTS)
_PARTS = ("settings", "check", "post_merge", "samples", "added")


@dataclass(frozen=True, kw_only=True)
class Merger:
    """An upstream merger."""

    name: str
    config: Any  # of a FusionBench method
    setting: str  # that defines it
    alone: bool  # no method is run on it


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The grid: mergers, methods and their cells."""

    mergers: list[Merger]
    cells: dict[str, PostMerging]  # by name, run on every merger that is not alone
    references: list[str]  # of `base` and `experts`
    configs: dict[str, Any]  # cell -> config of its method, or step -> config for a chain

    def cells_of(self, merger: Merger) -> list[str]:
        """Return the cells of one merger, beginning with the merger alone."""
        return [NONE] if merger.alone else [NONE, *self.cells]

    def __len__(self) -> int:
        cells = sum(len(self.cells_of(merger)) for merger in self.mergers)
        return cells + len(self.references)


@dataclass(frozen=True, kw_only=True)
class GridChoices:
    """The settings of `method=compare` that define the grid. `make_grid` checks them."""

    upstreams: Any = setting(
        None,
        "Mergers to run, from upstream_mergers. Null: all that fit the pool.",
        accepts="null or a list of names",
        group="the grid",
    )
    alone: Any = setting(
        None,
        "Mergers on which no post-merging method runs, from mergers_alone. Null: all that fit.",
        accepts="null or a list of names",
    )
    post_merging: Any = setting(
        None,
        "Methods to run, from post_merging_methods; `none` (no post-merging) is always run. Null: "
        "all that fit.",
        accepts="null or a list of names",
    )
    references: Any = setting(
        REFERENCES,
        "Reference rows. Normalised averages need the experts.",
        accepts=f"a list of {' and '.join(REFERENCES)}",
    )
    upstream_mergers: Any = setting(
        None,
        "Configs of FusionBench methods, by name.",
        accepts="a mapping of names to configs",
        group="definitions of the names",
    )
    mergers_alone: Any = setting(
        None,
        "Configs of mergers on which no post-merging method runs, by name.",
        accepts="a mapping of names to configs",
    )
    post_merging_methods: Any = setting(
        None,
        "Configs with `_target_` by name, or a list of names to apply in order.",
        accepts="a mapping of names to configs or lists",
    )
    leave_out: Any = setting(
        None,
        "Names that run only if they are chosen, with the reason.",
        accepts="null or a mapping of names to reasons",
    )


_ENTRIES = ("upstream_mergers", "mergers_alone", "post_merging_methods")


def make_grid(choices: GridChoices, suite: Mapping[str, Any]) -> Grid:
    """Check all names and settings, and create the methods.

    Args:
        choices: The keys.
        suite: The key `featcal` of the pool's YAML. Its `presets` of FeatCal become cells
            `featcal:<name>`. Its `compare` has `leave_out`, name -> reason, for entries that only
            run if they are chosen, and under the keys of `GridChoices` further settings of entries.

    Raises:
        CalibrationError: If an entry's target cannot be imported.
        ValueError: If a name is unknown or taken twice, a method's settings do not fit, or there
            is nothing to run.
    """
    changes = dict(suite.get("compare") or {})
    left_out = {**(plain(choices.leave_out) or {}), **(changes.pop("leave_out", None) or {})}
    if unknown := sorted(set(changes) - set(_ENTRIES)):
        raise ValueError(
            f"modelpool.featcal.compare: {unknown} unknown; it takes leave_out, "
            f"{', '.join(_ENTRIES)}"
        )
    upstreams, alone, methods = (
        _entries(getattr(choices, key), changes.get(key) or {}, key) for key in _ENTRIES
    )
    methods = _with_presets(methods, suite.get("presets") or {})
    chosen = _chosen(choices.upstreams, upstreams, "upstreams", left_out)
    chosen_alone = _chosen(choices.alone, alone, "alone", left_out)
    cells = _chosen(choices.post_merging, {NONE: None, **methods}, "post_merging", left_out)
    references = _chosen(choices.references, dict.fromkeys(REFERENCES), "references", {})
    if not (chosen and cells) and not chosen_alone:
        raise ValueError(
            f"the grid is empty: method.upstreams is {chosen}, method.post_merging {cells}, "
            f"method.alone {chosen_alone}; name at least one upstream merger and one post-merging "
            "method (or none), or a merger alone"
        )
    mergers = [
        _merger(name, upstreams[name], f"method.upstream_mergers.{name}", alone=False)
        for name in (chosen if cells else [])
    ]
    mergers += [
        _merger(name, alone[name], f"method.mergers_alone.{name}", alone=True)
        for name in chosen_alone
    ]
    methods_by_cell = {name: _method(name, methods) for name in cells if name != NONE}
    taken = {*REFERENCES, NONE}
    for name in [*(merger.name for merger in mergers), *methods_by_cell]:
        if name in taken:
            raise ValueError(f"{name!r} names two rows of the comparison; rename one in YAML")
        taken.add(name)
    refuse_unusable_names((merger.name for merger in mergers), "method.upstream_mergers")
    configs = {name: _config(name, methods) for name in methods_by_cell}
    return Grid(mergers=mergers, cells=methods_by_cell, references=references, configs=configs)


def _entries(value: Any, changes: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return configs of a key by name, with the pool's changes. Entries set to null are removed."""
    value = plain(value) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"method.{key} must map names to configs, got {value!r}")
    entries = {str(name): entry for name, entry in value.items() if entry is not None}
    for name, settings in changes.items():
        if isinstance(entries.get(name), Mapping):
            entries[name] = plain(OmegaConf.merge(entries[name], settings))
    return entries


def _with_presets(
    methods: dict[str, Any], presets: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the methods, with the suite's presets after the cell `featcal`."""
    extended = {}
    for name, config in methods.items():
        extended[name] = config
        if name == FEATCAL and isinstance(config, Mapping):
            extended |= {f"{FEATCAL}:{p}": {**config, **changes} for p, changes in presets.items()}
    return extended


def _chosen(
    names: Any, available: Mapping[str, Any], key: str, left_out: Mapping[str, str]
) -> list[str]:
    names = plain(names)
    if names is None:
        for name, reason in left_out.items():
            if name in available:
                log.info("method.%s: %s is left out: %s", key, name, reason)
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


def _merger(name: str, config: Any, key: str, *, alone: bool) -> Merger:
    if not is_merger(config):
        raise ValueError(
            f"{key} must be a method's config (with _target_ or name), got "
            f"{config!r}; add one by +method@{key}=task_arithmetic (with the @)"
        )
    check_target(config, key)
    if str(config.get("_target_")).startswith(OWN):
        made_of(config, key)  # the constructor checks the settings
    return Merger(name=name, config=config, setting=key, alone=alone)


def _method(name: str, methods: Mapping[str, Any], within: Sequence[str] = ()) -> PostMerging:
    """Create one method, or the chain for a list of methods."""
    setting = f"method.post_merging_methods.{name}"
    config = methods[name]
    if isinstance(config, list):
        unknown = [step for step in config if step not in methods or step in (name, *within)]
        if unknown or not config:
            raise ValueError(f"{setting}: a list names other methods, got {config!r}")
        return Chain({step: _method(step, methods, (*within, name)) for step in config})
    if not isinstance(config, Mapping) or "_target_" not in config:
        raise ValueError(f"{setting} must have a _target_ or be a list of names, got {config!r}")
    check_target(config, setting)
    method = made_of(config, setting)
    missing = [part for part in _PARTS if not hasattr(method, part)]
    if missing:
        raise ValueError(
            f"{setting}: {config['_target_']} is no post-merging method: it lacks {missing}"
        )
    return method


def _config(name: str, methods: Mapping[str, Any]) -> Any:
    """Return a method's config, or the configs of a chain's steps."""
    config = methods[name]
    if isinstance(config, list):
        return {step: _config(step, methods) for step in config}
    return config
