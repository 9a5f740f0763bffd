"""Points of a study: labels, and their changes of the program's config."""

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fusion_bench.taskpool.dummy import DummyTaskPool
from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from fusion_bench_featcal.fusionbench.options import plain
from fusion_bench_featcal.lab.report.study import label_text
from fusion_bench_featcal.results.summary import FailedCell
from fusion_bench_featcal.settings import CalibrationError

POOLS = ("modelpool", "taskpool")
_LONGEST = 150  # characters in the name of a point's folder

Changes = dict[str, Any]
"""Dotted key of the program's config -> value."""


class Option(NamedTuple):
    """One value of an axis: its labels for a point, and its changes."""

    labels: dict[str, Any]
    changes: Changes


class Axis(NamedTuple):
    """An axis. `centre` is its option while other axes vary, or None."""

    name: str
    options: list[Option]
    centre: Option | None = None


@dataclass(frozen=True, kw_only=True)
class Point:
    """One comparison of a study."""

    seed: int
    labels: dict[str, Any] = field(default_factory=dict)  # without the seed
    changes: Changes = field(default_factory=dict)

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
    def changes_pools(self) -> bool:
        """True if the point changes the model pool or the task pool."""
        return any(key.split(".")[0] in POOLS for key in self.changes)

    @property
    def folder(self) -> str:
        """Name of the point's folder."""
        text = "_".join(f"{k}-{v}" for k, v in {**self.labels, "seed": self.seed}.items())
        name = re.sub(r"[^\w.+-]", "_", text)
        if name == text and len(name) <= _LONGEST:
            return name
        # Different labels must have different names.
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return f"{name[:_LONGEST]}-{digest}"

    def pool_name(self, suite: str) -> str:
        """Return the name of the point's pools in reports. Changed pools need a separate name."""
        labels = ", ".join(f"{key}={value}" for key, value in self.labels.items())
        return f"{suite} ({labels})" if self.changes_pools else suite

    def failed(self, merger: str | None, name: str, reason: str) -> FailedCell:
        """Return the entry of a failed cell."""
        text = label_text(self.labels)
        return FailedCell(upstream=merger, name=name, reason=reason, seed=self.seed, point=text)

    def __str__(self) -> str:
        return ", ".join(f"{k}={v}" for k, v in {**self.labels, "seed": self.seed}.items())


def unresolved(config: DictConfig) -> dict[str, Any]:
    """Return a config as plain objects, with its interpolations."""
    container = OmegaConf.to_container(config)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def program_config(program: Any) -> DictConfig:
    """Return the program's config with its interpolations and the task pool that it evaluates on.

    FusionBench resolves the config before it creates the program. If there is a command line, its
    overrides are composed again.

    Raises:
        CalibrationError: If the program has no config.
    """
    if HydraConfig.initialized() and GlobalHydra.instance().is_initialized():
        job = HydraConfig.get()
        config = compose(job.job.config_name, list(job.overrides.task))
    elif getattr(program, "config", None) is None:
        raise CalibrationError(
            "pools that were made in Python cannot be sent to other processes: set method.jobs=1 "
            "and method.backend=null, or use the command fusion_bench"
        )
    else:
        config = OmegaConf.create(unresolved(program.config))
    default = config.modelpool.get("default_taskpool")
    named = OmegaConf.select(config, "taskpool._target_")
    if default is not None and (named is None or get_class(named) is DummyTaskPool):
        OmegaConf.update(config, "taskpool", OmegaConf.to_container(default), merge=False)
    return config


def as_text(config: DictConfig | None) -> str:
    """Return a program's resolved config as JSON, for other processes."""
    return "" if config is None else json.dumps({**plain(config), "print_config": False})
