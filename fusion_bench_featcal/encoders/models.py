"""Encoders in memory: opened like the merged one, and what they have behind the transformer."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fusion_bench_featcal.encoders.library import KINDS, Router, Transformer
from fusion_bench_featcal.models.bases import read_local


def transformer_of(label: str, model: Any) -> Transformer:
    """Return the module that holds a model's transformer, if it is the only one."""
    if any(isinstance(module, Router) for module in model.modules()):
        raise ValueError(f"{label} has a Router: only models with one route can be repaired")
    modules = [module for module in model.modules() if isinstance(module, Transformer)]
    if len(modules) != 1:
        kinds = [type(module).__name__ for module in model]
        raise ValueError(f"{label} has {len(modules)} transformers, not exactly one, in {kinds}")
    return modules[0]


def open_like(merged: Any, label: str, model: Any) -> Any:
    """Return a model, loaded if it is a folder or hub id, that has the merged model's modules."""
    kind = next(kind for kind in KINDS if isinstance(merged, kind))
    name, has_modules = type(model).__name__, True
    if not isinstance(model, nn.Module):
        model = kind(str(model), device=str(merged.device))
        place = getattr(model.transformers_model, "name_or_path", "")
        # The library converts other classes, with random weights in place of missing ones.
        name = read_local(place, "config_sentence_transformers.json").get(
            "model_type", kind.__name__
        )
        has_modules = bool(read_local(place, "modules.json"))  # else it is only a transformer
    if not isinstance(model, kind) or name not in (kind.__name__, type(model).__name__):
        raise TypeError(f"{label} is a {name}, but merged is a {kind.__name__}")
    transformer_of(label, model)
    modules, others = (
        [f"{type(m).__name__} {getattr(m, 'pooling_mode', '')}".strip() for m in one]
        for one in (model, merged)
    )
    if has_modules and modules != others:
        raise ValueError(
            f"{label} has the modules {modules}, but merged has {others}. If merged was a folder "
            "without modules.json, copy this file and the folders that it names from the expert"
        )
    vocabularies = [getattr(one.tokenizer, "get_vocab", dict)() for one in (model, merged)]
    if vocabularies[0] != vocabularies[1]:
        raise ValueError(f"{label} has another vocabulary than merged: its tokens are other words")
    return model


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
