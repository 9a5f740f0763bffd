"""Encoders in memory: their transformer, and what is behind its blocks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fusion_bench_featcal.encoders.library import Router, Transformer
from fusion_bench_featcal.families import resolve_family, stages_of


def transformer_of(label: str, model: Any) -> Transformer:
    """Return the module that holds a model's transformer, if it is the only one."""
    if any(isinstance(module, Router) for module in model.modules()):
        raise ValueError(f"{label} has a Router: only models with one route can be repaired")
    modules = [module for module in model.modules() if isinstance(module, Transformer)]
    if len(modules) != 1:
        kinds = [type(module).__name__ for module in model]
        raise ValueError(f"{label} has {len(modules)} transformers, not exactly one, in {kinds}")
    return modules[0]


def last_block_of(transformer: nn.Module, family: Any = "auto") -> str:
    """Return the name of a transformer's last block."""
    return stages_of(resolve_family(family, transformer), transformer)[-1][-1]


def differing_behind(last_block: str, merged: Any, experts: Sequence[Any]) -> list[str]:
    """Return names of the modules behind a transformer's last block in which experts differ."""
    modules, names = dict(merged.named_modules()), list(merged.state_dict())
    prefix = next(n for n, module in modules.items() if module is merged.transformers_model)
    last = max(n for n, name in enumerate(names) if name.startswith(f"{prefix}.{last_block}."))
    states, differing = [expert.state_dict() for expert in experts], dict[str, None]()
    for name in names[last + 1 :]:
        first, *others = [state[name].cpu() for state in states if name in state] or [None]
        if any(not torch.equal(first, other) for other in others):
            differing[name.rpartition(".")[0]] = None
    tables = {name for name, module in modules.items() if isinstance(module, nn.Embedding)}
    return [name for name in differing if name not in tables]  # tables of positions: for blocks
