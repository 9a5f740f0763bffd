"""The grid of a comparison: which upstream mergers with which post-merging methods, checked."""

import difflib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from omegaconf import OmegaConf

from fusion_bench_featcal.comparison.entries import OWN, check_target, made_of
from fusion_bench_featcal.fusionbench.options import check_merger, plain
from fusion_bench_featcal.methods.interface import Chain, PostMerging
from fusion_bench_featcal.results import BASE, EXPERTS, FEATCAL

log = logging.getLogger(__name__)

NONE = "none"
REFERENCES = (BASE, EXPERTS)
_PARTS = ("settings", "check", "post_merge", "samples", "added")


@dataclass(frozen=True, kw_only=True)
class Merger:
    """An upstream merger: its row, its FusionBench config, whether no method is run on it."""

    name: str
    config: Any
    alone: bool


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The grid: mergers, methods and their cells.

    Attributes:
        mergers: In order.
        cells: Name -> post-merging method, run on every merger that is not alone.
        references: Of `base` and `experts`.
        configs: Cell -> config of its method; of a chain, step -> config.
    """

    mergers: list[Merger]
    cells: dict[str, PostMerging]
    references: list[str]
    configs: dict[str, Any] = field(default_factory=dict)

    def cells_of(self, merger: Merger) -> list[str]:
        """Cells of one merger; the merger without post-merging comes first."""
        return [NONE] if merger.alone else [NONE, *self.cells]

    def __len__(self) -> int:
        cells = sum(len(self.cells_of(merger)) for merger in self.mergers)
        return cells + len(self.references)


@dataclass(frozen=True, kw_only=True)
class GridChoices:
    """The keys of `method=compare` that make the grid; None chooses everything that fits the pool.

    Attributes:
        upstreams: Names out of `upstream_mergers`.
        alone: Names out of `mergers_alone`.
        post_merging: Names out of `post_merging_methods`; `none`, which is always run, may be
            among them.
        references: Of `base` and `experts`.
        upstream_mergers: Name -> config of a FusionBench method.
        mergers_alone: Name -> config of a FusionBench method that is not post-processed.
        post_merging_methods: Name -> config with `_target_`, or a list of names applied in order.
    """

    upstreams: Any = None
    alone: Any = None
    post_merging: Any = None
    references: Any = None
    upstream_mergers: Any = None
    mergers_alone: Any = None
    post_merging_methods: Any = None


_ENTRIES = ("upstream_mergers", "mergers_alone", "post_merging_methods")


def for_pool(choices: GridChoices, changes: Any) -> tuple[GridChoices, dict[str, str]]:
    """Fit the choices to a model pool.

    Args:
        choices: The keys.
        changes: The key `featcal.compare` of the pool's YAML: `leave_out`, name -> reason, and
            under the other keys further settings of entries, by name. An entry that the choices
            lack, or that was set to null, stays out.

    Returns:
        The choices with those settings, and what is left out where nothing is chosen.
    """
    changes = dict(plain(changes) or {})
    left_out = dict(changes.pop("leave_out", None) or {})
    if unknown := sorted(set(changes) - set(_ENTRIES)):
        raise ValueError(
            f"modelpool.featcal.compare: {unknown} unknown; it takes leave_out, "
            f"{', '.join(_ENTRIES)}"
        )
    changed = {}
    for key, entries in changes.items():
        own = dict(plain(getattr(choices, key)) or {})
        for name, settings in entries.items():
            if isinstance(own.get(name), Mapping):
                own[name] = plain(OmegaConf.merge(own[name], settings))
        changed[key] = own
    return replace(choices, **changed), left_out


def make_grid(
    choices: GridChoices,
    presets: Mapping[str, Mapping[str, Any]],
    left_out: Mapping[str, str] | None = None,
) -> Grid:
    """Check all names and settings, and make the methods.

    Args:
        choices: The keys.
        presets: FeatCal presets of the suite, by name; each is a cell `featcal:<name>` where there
            is a cell `featcal`.
        left_out: Name -> reason, of entries that are left out where nothing is chosen.

    Raises:
        ValueError: If a name is unknown or taken twice, a method's settings do not fit, or there
            is nothing to run.
    """
    methods = _with_presets(_mapping(choices.post_merging_methods, "post_merging_methods"), presets)
    upstreams = _mapping(choices.upstream_mergers, "upstream_mergers")
    alone = _mapping(choices.mergers_alone, "mergers_alone")
    without = left_out or {}
    chosen = _chosen(choices.upstreams, upstreams, "upstreams", without)
    chosen_alone = _chosen(choices.alone, alone, "alone", without)
    cells = _chosen(choices.post_merging, {NONE: None, **methods}, "post_merging", without)
    references = _chosen(choices.references, dict.fromkeys(REFERENCES), "references")
    if not (chosen and cells) and not chosen_alone:
        raise ValueError(
            f"the grid is empty: method.upstreams is {chosen}, method.post_merging {cells}, "
            f"method.alone {chosen_alone}; name at least one upstream merger and one post-merging "
            "method (or none), or a merger alone"
        )
    mergers = [
        _merger(name, every, place, is_alone)
        for names, every, place, is_alone in (
            (chosen if cells else [], upstreams, "upstream_mergers", False),
            (chosen_alone, alone, "mergers_alone", True),
        )
        for name in names
    ]
    made = {name: _method(name, methods) for name in cells if name != NONE}
    _refuse_taken([*(merger.name for merger in mergers), *made])
    configs = {name: _config(name, methods) for name in made}
    return Grid(mergers=mergers, cells=made, references=references, configs=configs)


def _mapping(value: Any, key: str) -> dict[str, Any]:
    value = plain(value) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"method.{key} must map names to configs, got {value!r}")
    # An entry set to null is taken out of the grid.
    return {str(name): entry for name, entry in value.items() if entry is not None}


def _with_presets(
    methods: dict[str, Any], presets: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """The methods, with the suite's presets after the cell `featcal`."""
    every = {}
    for name, config in methods.items():
        every[name] = config
        if name == FEATCAL and isinstance(config, Mapping):
            every |= {f"{FEATCAL}:{p}": {**config, **changes} for p, changes in presets.items()}
    return every


def _chosen(
    names: Any, available: Mapping[str, Any], key: str, left_out: Mapping[str, str] | None = None
) -> list[str]:
    names = plain(names)
    if names is None:
        for name, reason in (left_out or {}).items():
            if name in available:
                log.info("method.%s: %s is left out: %s", key, name, reason)
        return [name for name in available if name not in (left_out or {})]
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ValueError(f"method.{key} must be a list of names, got {names!r}")
    for name in names:
        if name not in available:
            near = difflib.get_close_matches(str(name), available, n=1, cutoff=0.0)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise ValueError(
                f"method.{key}: {name!r} is unknown{hint}. There are: "
                f"{', '.join(available) or 'none'}"
            )
    return list(dict.fromkeys(names))


def _merger(name: str, every: Mapping[str, Any], place: str, alone: bool) -> Merger:
    config = every[name]
    try:
        check_merger(config)
    except ValueError:
        raise ValueError(
            f"method.{place}.{name} must be a method's config (with _target_ or name), got "
            f"{config!r}; add one by +method@method.{place}.{name}=task_arithmetic (with the @)"
        ) from None
    check_target(config, f"method.{place}.{name}")
    if str(config.get("_target_")).startswith(OWN):
        made_of(config, f"method.{place}.{name}")  # its constructor checks the settings
    return Merger(name=name, config=config, alone=alone)


def _method(name: str, methods: Mapping[str, Any], within: Sequence[str] = ()) -> PostMerging:
    """Make one method, or the chain of those that a list names."""
    place = f"method.post_merging_methods.{name}"
    config = methods[name]
    if isinstance(config, list):
        unknown = [step for step in config if step not in methods or step in (name, *within)]
        if unknown or not config:
            raise ValueError(f"{place}: a list names other methods, got {config!r}")
        return Chain({step: _method(step, methods, (*within, name)) for step in config})
    if not isinstance(config, Mapping) or "_target_" not in config:
        raise ValueError(f"{place} must have a _target_ or be a list of names, got {config!r}")
    check_target(config, place)
    method = made_of(config, place)
    missing = [part for part in _PARTS if not hasattr(method, part)]
    if missing:
        raise ValueError(
            f"{place}: {config['_target_']} is no post-merging method: it lacks {missing}"
        )
    return method


def _config(name: str, methods: Mapping[str, Any]) -> Any:
    """A method's config; of a chain, those of its steps."""
    config = methods[name]
    if isinstance(config, list):
        return {step: _config(step, methods) for step in config}
    return config


def _refuse_taken(names: Sequence[str]) -> None:
    taken = {*REFERENCES, NONE}
    for name in names:
        if name in taken:
            raise ValueError(f"{name!r} names two rows of the comparison; rename one in YAML")
        taken.add(name)
