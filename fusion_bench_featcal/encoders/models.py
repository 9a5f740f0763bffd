"""Encoders in memory: their transformer, and what is behind its blocks."""

from collections.abc import Sequence

import torch
from torch import nn

from fusion_bench_featcal.encoders.library import Encoder, Router, Transformer, st
from fusion_bench_featcal.families import resolve_family, stages_of
from fusion_bench_featcal.run.log import CalibrationLog


def transformer_of(label: str, model: Encoder) -> Transformer:
    """Return the module that holds a model's transformer, if it is the only one."""
    if any(isinstance(module, Router) for module in model.modules()):
        raise ValueError(f"{label} has a Router: only models with one route can be repaired")
    modules = [module for module in model.modules() if isinstance(module, Transformer)]
    if len(modules) != 1:
        kinds = [type(module).__name__ for module in model]
        raise ValueError(f"{label} has {len(modules)} transformers, not exactly one, in {kinds}")
    if callable(getattr(modules[0].model, "merge_and_unload", None)):
        raise ValueError(f"{label} has an adapter: put its merge_and_unload() in its place")
    return modules[0]


def last_block_of(transformer: nn.Module, family: object = "auto") -> str:
    """Return the name of a transformer's last block."""
    return stages_of(resolve_family(family, transformer), transformer)[-1][-1]


def left_as_merged(merged: Encoder, experts: Sequence[Encoder], log: CalibrationLog) -> list[str]:
    """Return modules outside the blocks in which experts differ, and that were not calibrated."""
    modules = dict(merged.named_modules())
    calibrated = {record["module"] for record in log.of_kind("module")}
    blocks = [record["block"] for record in log.of_kind("block")]
    # Modules of the tail are blocks of their own.
    inside = tuple(f"{block}." for block in blocks if not isinstance(modules[block], nn.Linear))
    states, differing = [expert.state_dict() for expert in experts], dict[str, None]()
    for name in (name for name in merged.state_dict() if not name.startswith(inside)):
        first, *others = [state[name].cpu() for state in states if name in state] or [None]
        if any(not torch.equal(first, other) for other in others):
            differing[name.rpartition(".")[0]] = None
    # Only rerankers read a transformer's own pooler.
    has_pooler = isinstance(merged, st.CrossEncoder)
    read = [name for name in differing if has_pooler or ".pooler." not in name]
    return [name for name in read if name not in calibrated]


def text_on_merged(modules: Sequence[str]) -> str:
    """Return a sentence on the modules of `left_as_merged`."""
    return f"experts differ in {', '.join(modules)}, which stay as merged"
