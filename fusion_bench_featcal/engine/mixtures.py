"""Mixtures of experts in a block: a router, and the modules among which it chooses."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

FEWEST_ROWS = 32
"""A task with fewer positions at an expert has no say in it: their mean is known to 1/sqrt(32)."""


@dataclass(frozen=True)
class Mixture:
    """Modules of which each position reaches some, chosen by a router.

    Attributes:
        router: Full name of the module whose output tells the experts of every position.
        experts: Full names of the experts, in the router's order.
        choices: Number of experts that a position is sent to.
        sites: By expert: full names of its linear modules that are to be calibrated.
    """

    router: str
    experts: tuple[str, ...]
    choices: int
    sites: Mapping[str, list[str]] = field(default_factory=dict)

    def owner(self, name: str) -> str | None:
        """The expert that a module is in, if it is in one."""
        stem = self.experts[0].rpartition(".")[0] + "."
        number = name.removeprefix(stem).partition(".")[0]
        return f"{stem}{number}" if name.startswith(stem) else None


def find_mixtures(model: nn.Module, block: str) -> list[Mixture]:
    """Find the mixtures of a block by their structure.

    A mixture has a list `experts` and a module `gate` or `router` whose weight has a row for each.

    Args:
        model: The model.
        block: The block's name.

    Returns:
        The mixtures, which no site is noted of yet.
    """
    found: list[Mixture] = []
    for name, module in model.get_submodule(block).named_modules(prefix=block):
        experts: Any = getattr(module, "experts", None)
        leaf = "gate" if hasattr(module, "gate") else "router"
        gate: Any = getattr(module, leaf, None)
        rows = getattr(gate, "weight", None)
        if not isinstance(experts, nn.ModuleList) or rows is None or len(rows) != len(experts):
            continue
        choices = getattr(module, "top_k", None) or getattr(gate, "top_k", None)
        if isinstance(choices, int):
            names = tuple(f"{name}.experts.{number}" for number in range(len(experts)))
            sites: dict[str, list[str]] = {expert: [] for expert in names}
            found.append(Mixture(f"{name}.{leaf}", names, choices, sites))
    return found
