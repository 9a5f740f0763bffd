"""Modules with matrices that are not calibrated: towers, routed experts, embeddings, heads."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from fusion_bench_featcal.experts import LazyModel
from fusion_bench_featcal.families.lists import head_of, outermost_lists
from fusion_bench_featcal.modules.block_modules import BlockModules
from fusion_bench_featcal.run.digests import digest_tensor
from fusion_bench_featcal.run.log import AsMerged

_ROW = 64
"""The compared row of a matrix. The first rows of embeddings are those of padding and marks."""
_ROUNDING = 4
"""Relative distance, in units of the dtype's precision, of a merged row from equal ones."""
_MERGED = "merged"

Stages = Sequence[Sequence[str]]
Modules = Mapping[str, BlockModules]


def left_as_merged(
    merged: LazyModel,
    experts: Iterable[LazyModel],
    stages: Stages,
    modules: Modules,
    gather: Callable[[Any], list[Any]] = lambda value: [value],
) -> AsMerged:
    """Return the modules that are not calibrated although experts differ in them.

    Experts differ in a matrix if one row of it differs between them, or by more than rounding from
    the merged model's. Tensors that an expert lacks are not compared.

    Args:
        merged: The merged model.
        experts: The experts of this process.
        stages: The blocks.
        modules: The modules of each block.
        gather: Returns the values of all processes.
    """
    model, experts = merged.structure, [*experts]
    names = _uncalibrated(model, modules)
    rows = gather({name: _rows(merged, experts, name) for name in names})
    names = [name for name in names if len(set.union(*(part[name] for part in rows))) > 1]
    return AsMerged(*_counts(model, stages, modules, names))


def left_by_names(model: nn.Module, stages: Stages, modules: Modules) -> AsMerged:
    """Return the modules that are not calibrated, whether experts differ in them or not."""
    names = _uncalibrated(model, modules)
    return AsMerged(*_counts(model, stages, modules, names), compared=False)


def _uncalibrated(model: nn.Module, modules: Modules) -> list[str]:
    """Return the names of matrices that are not calibrated. Tied ones have one name."""
    calibrated = {
        name for part in modules.values() for site in part.all_sites for name in site.names
    }
    return [
        name
        for name, tensor in model.named_parameters()
        if name not in calibrated and tensor.ndim > 1 and tensor.numel() > tensor.shape[-1]
    ]


def _counts(
    model: nn.Module, stages: Stages, modules: Modules, names: Iterable[str]
) -> tuple[dict[str, int], dict[str, int]]:
    """Count matrices by the outermost modules in which nothing is calibrated: other ones, ends."""
    counts, is_end = (Counter[str](), Counter[str]()), _ends(model, stages)
    inside = {
        part for block in modules.values() for s in block.all_sites for part in _prefixes(s.name)
    }
    for name in names:
        around = (part for part in _prefixes(name) if not part.isdigit())
        outermost = next(part for part in around if part not in inside)
        counts[is_end(outermost, name)][re.sub(r"\.\d+(?=\.|$)", ".*", outermost)] += 1
    return dict(counts[False]), dict(counts[True])


def _rows(merged: LazyModel, experts: Sequence[LazyModel], name: str) -> set[str]:
    """Return digests of a row in all experts, and `_MERGED` if one differs from the merged row."""
    start = min(_ROW, merged.structure.get_parameter(name).shape[0] - 1)
    row, digests = merged.rows(name, start, start + 1), set[str]()
    rtol = _ROUNDING * torch.finfo(row.dtype).eps
    for expert in (expert for expert in experts if name in expert.keys):
        other = expert.rows(name, start, start + 1).to(row.dtype)
        digests.add(digest_tensor(other))
        if not torch.allclose(other.double(), row.double(), rtol=rtol, atol=0):
            digests.add(_MERGED)
    return digests


def _ends(model: nn.Module, stages: Stages) -> Callable[[str, str], bool]:
    """Return a function of a module and its matrix: whether these are embeddings or a head.

    Modules of lists of blocks are not, nor those between towers, such as projectors. A tower is
    the largest module around a stage's blocks that has no other list.
    """
    module_names = {module: name for name, module in model.named_modules()}
    lists, towers = [module_names[module] for module in outermost_lists(model)], list[str]()
    for stage in stages:
        others = [name for name in lists if not any(_meet(name, block) for block in stage)]
        around = ["", *_prefixes(stage[0])]
        towers.append(next(name for name in around if not any(_meet(name, o) for o in others)))
    blocks = [*lists, *(block for stage in stages for block in stage)]
    body, head = getattr(model, "base_model_prefix", ""), head_of(model)

    def is_end(module: str, matrix: str) -> bool:
        owner = matrix.rpartition(".")[0]
        if module == owner and isinstance(model.get_submodule(owner), nn.Embedding):
            return True  # in a block, too, as T5's relative positions
        return not any(_meet(module, block) for block in blocks) and (
            any(_meet(module, tower) for tower in towers)
            or model.get_submodule(owner) is head
            or (hasattr(model, body) and not _meet(module, body))
        )

    return is_end


def _prefixes(name: str) -> list[str]:
    """Return the modules around a name, outermost first, and the name."""
    return [*accumulate(name.split("."), "{}.{}".format)]


def _meet(one: str, other: str) -> bool:
    """Return whether one of two modules is in the other one, or both are the same."""
    first, second = (f"{name}." if name else "" for name in (one, other))
    return first.startswith(second) or second.startswith(first)
