"""An axis of a study: its values, each with labels and what it changes in the program's config."""

from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

Changes = dict[str, Any]
"""Dotted key of the program's config -> value."""


class Option(NamedTuple):
    """One value of an axis: the labels that it gives a point, and its changes."""

    labels: dict[str, Any]
    changes: Changes


class Axis(NamedTuple):
    """An axis; `centre` is the option that other axes are varied at, None where there is none."""

    name: str
    options: list[Option]
    centre: Option | None = None


def unresolved(config: DictConfig) -> dict[str, Any]:
    """A config as plain objects, with its interpolations."""
    container = OmegaConf.to_container(config)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}
