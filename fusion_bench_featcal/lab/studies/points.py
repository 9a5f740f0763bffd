"""Points of a study: labels, and what each point changes in the program's config."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from fusion_bench_featcal.error_block import first_line
from fusion_bench_featcal.lab.compare.cell_process import quoted
from fusion_bench_featcal.lab.studies.axes import make_axis
from fusion_bench_featcal.lab.studies.axis import Axis, Changes, Option, unresolved
from fusion_bench_featcal.nearest_names import nearest_hint

DESIGNS = ("product", "each")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One comparison of a study."""

    labels: dict[str, Any]  # without the seed
    changes: Changes  # dotted key of the program's config -> value
    seed: int

    def changed(self, config: DictConfig) -> DictConfig:
        """Return a copy of the config with the point's changes.

        Args:
            config: With interpolations, which then resolve to the point's values.
        """
        copy = OmegaConf.create(unresolved(config))
        for key, value in {**self.changes, "method.seed": self.seed}.items():
            OmegaConf.update(copy, key, value, merge=False, force_add=True)
        return copy

    @property
    def words(self) -> list[str]:
        """The changes as words of a command, for a cell in a process of its own."""
        return [f"++{k}={_word(v)}" for k, v in {**self.changes, "method.seed": self.seed}.items()]

    def check_words(self) -> None:
        """Check that a command can have the words.

        Raises:
            ValueError: If it cannot.
        """
        refused = "method.process_per_cell=true repeats the command, which cannot"
        for key, value in self.changes.items():
            if not isinstance(value, bool | int | float | str):
                raise ValueError(
                    f"{refused} change {key} as the point {self} needs it: set it to false"
                )
        try:
            OverridesParser.create().parse_overrides(self.words)
        except HydraException as error:
            raise ValueError(
                f"{refused} have the words of the point {self}: set it to false "
                f"({first_line(error)})"
            ) from error

    def __str__(self) -> str:
        return ", ".join(f"{k}={v}" for k, v in {**self.labels, "seed": self.seed}.items())


@dataclass(frozen=True, kw_only=True)
class Design:
    """The keys of `method=study/<name>` that make the points.

    Attributes:
        axes: Name -> values (`studies.axes`), or label -> changes of dotted keys.
        seeds: Each point's seeds of mergers and methods; intervals need two or more.
        design: `product` of all axes, or `each` axis by itself around the config's own settings.
        pairs: Pairs of axes, whose product is added; all others stay at the config's settings.
    """

    axes: Any = None
    seeds: Any = None
    design: str = "product"
    pairs: Any = field(default_factory=list)

    def points(self, config: DictConfig) -> list[Point]:
        """All points, those of one pair of pools in a row as far as the axes allow.

        Args:
            config: The program's config, with interpolations.

        Raises:
            ValueError: If an axis is unknown, a value does not fit, or seeds are missing.
        """
        axes = self._axes(config)
        seeds = _checked_seeds(self.seeds, config)
        options = _product(axes) if self.design == "product" else self._around(axes)
        labels = [tuple(option.labels.items()) for option in options]
        return [
            Point(labels=option.labels, changes=option.changes, seed=seed)
            for place, option in enumerate(options)
            if labels.index(labels[place]) == place
            for seed in seeds
        ]

    def _axes(self, config: DictConfig) -> list[Axis]:
        if self.design not in DESIGNS:
            hint = nearest_hint(str(self.design), DESIGNS)
            raise ValueError(f"method.design must be product or each, got {self.design!r}{hint}")
        axes = {} if self.axes is None else self.axes
        if not isinstance(axes, Mapping):
            raise ValueError(f"method.axes must map names to values, got {axes!r}")
        made = [make_axis(str(n), v, config) for n, v in axes.items() if v is not None]
        for pair in self.pairs or ():
            names = [axis.name for axis in made]
            if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
                raise ValueError(f"method.pairs must list pairs of axes, got {pair!r}")
            for name in pair:
                if name not in names:
                    raise ValueError(
                        f"method.pairs: {name!r} is no axis of this study: {', '.join(names)}"
                    )
        return made

    def _around(self, axes: Sequence[Axis]) -> list[Option]:
        """Points on each axis through the centre, and on the plane of each pair."""
        stays: dict[str, Axis] = {}
        for axis in axes:
            if axis.centre is None:
                raise ValueError(
                    f"method.design=each: the axis {axis.name} has no present value to stay at; "
                    "use method.design=product"
                )
            stays[axis.name] = Axis(axis.name, [axis.centre])
        pairs = [tuple(pair) for pair in self.pairs or ()]
        moving = [(), *((axis.name,) for axis in axes), *pairs]
        groups = ([a if a.name in names else stays[a.name] for a in axes] for names in moving)
        return [option for group in groups for option in _product(group)]


def _word(value: Any) -> str:
    return quoted(value) if isinstance(value, str) else str(value)


def _product(axes: Iterable[Axis]) -> list[Option]:
    joined = itertools.product(*(axis.options for axis in axes))
    return [
        Option(
            {name: label for option in options for name, label in option.labels.items()},
            {key: value for option in options for key, value in option.changes.items()},
        )
        for options in joined
    ]


def _checked_seeds(seeds: Any, config: DictConfig) -> list[int]:
    """The study's seeds; None: the comparison's own seed alone."""
    if seeds is None:
        return [int(config.method.get("seed", 42))]
    if isinstance(seeds, str) or not isinstance(seeds, Sequence) or not seeds:
        raise ValueError(f"method.seeds must be a list of at least one integer >= 0, got {seeds!r}")
    for seed in seeds:
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ValueError(f"method.seeds must be integers >= 0, got {seed!r}")
    return list(dict.fromkeys(seeds))
