"""Encoders in memory: their transformer and its last block."""

from torch import nn

from fusion_bench_featcal.encoders.library import Encoder, Router, Transformer
from fusion_bench_featcal.families import resolve_family, stages_of


def transformer_of(label: str, model: Encoder) -> Transformer:
    """Return the module that holds a model's transformer, if it is the only one."""
    if any(isinstance(module, Router) for module in model.modules()):
        raise ValueError(f"{label} has a Router: only models with one route can be repaired")
    modules = [module for module in model.modules() if isinstance(module, Transformer)]
    if len(modules) != 1:
        kinds = [type(module).__name__ for module in model]
        raise ValueError(f"{label} has {len(modules)} transformers in {kinds}, but needs one")
    if callable(getattr(modules[0].model, "merge_and_unload", None)):
        raise ValueError(f"{label} has an adapter: replace it with its merge_and_unload()")
    return modules[0]


def last_block_of(transformer: nn.Module, family: object = "auto") -> str:
    """Return the name of a transformer's last block."""
    return stages_of(resolve_family(family, transformer), transformer)[-1][-1]
