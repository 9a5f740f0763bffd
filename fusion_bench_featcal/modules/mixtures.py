"""Mixtures of experts in transformers 5: modules that stack the matrices of all routed experts.

A slot is the index of one routed expert: two matrices with a gate or an activation between them.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from fusion_bench_featcal.modules.sites import Site, is_selected, site_of


@dataclass(frozen=True)
class Mixture:
    """The routed experts of one module.

    Attributes:
        name: The module's full name in the model.
        slots: Number of routed experts.
        entry: The matrices that receive the mixture's input: gate and up, or up alone.
        exit: The matrices after the activation.
        sites: The matrices (`entry` and `exit`) that are calibrated.
    """

    name: str
    slots: int
    entry: Site
    exit: Site
    sites: tuple[Site, ...]

    @property
    def parameters(self) -> list[str]:
        """Names of the calibrated parameters. Each contains all slots."""
        return [name for site in self.sites for name in site.names]

    def input_of(self, site: Site, module: Any, get: Callable[[str], Tensor], x: Tensor) -> Tensor:
        """Return the input of a matrix of one slot, given the slot's input.

        Args:
            site: The matrix.
            module: The module, for its gate or activation.
            get: Returns the slot's part of a parameter, by the parameter's name.
            x: Rows that enter the slot, `[n, d]`.
        """
        entry = self.entry
        if site == entry:
            return x
        bias = get(entry.bias_name) if entry.has_bias else None
        inner = linear(x, entry.oriented(get(entry.weight_name)), bias)
        return module._apply_gate(inner) if module.has_gate else module.act_fn(inner)


def is_mixture(module: Any) -> bool:
    """Return whether a module declares transformers' layout of routed experts."""
    return {"has_gate", "has_bias", "is_transposed"} <= vars(module).keys()


def mixture_of(name: str, module: Any, patterns: Sequence[str] | None) -> Mixture:
    """Return a module as a mixture, of which patterns select matrices."""
    entry, exit = (
        Site(f"{name}.{leaf}", "linear", module.has_bias, module.is_transposed, is_stacked=True)
        for leaf in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    )
    sites = tuple(one for one in (entry, exit) if is_selected(one.name, patterns))
    return Mixture(name, len(module.down_proj), entry, exit, sites)


def is_router(owner: nn.Module, leaf: str) -> bool:
    """Return whether a module of an owner chooses among the owner's routed experts."""
    return leaf == "router" or (leaf == "gate" and hasattr(owner, "experts"))


def router_site(name: str, module: nn.Module) -> Site | None:
    """Return a router as a site if its first output is a linear map of its input, else None.

    A copy with random weights is tried, because some routers scale or normalise their input.
    """
    if site := site_of(name, module):
        return site
    parameters = dict(module.named_parameters(recurse=False))
    if "weight" not in parameters or parameters["weight"].ndim != 2:
        return None
    generator = torch.Generator().manual_seed(0)
    trial: Any = copy.deepcopy(module).to_empty(device="cpu").float()
    for tensor in chain(trial.parameters(), trial.buffers()):
        tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float32))
    x = torch.randn(4, trial.weight.shape[1], generator=generator, dtype=torch.float32)
    expected = linear(x, trial.weight, getattr(trial, "bias", None))
    try:
        outputs = trial(x)
    except Exception:  # a router that takes other inputs
        return None
    first = outputs[0] if isinstance(outputs, tuple) else outputs
    is_linear = first.shape == expected.shape and torch.allclose(first, expected, atol=1e-4)
    return Site(name, "linear", has_bias="bias" in parameters) if is_linear else None
