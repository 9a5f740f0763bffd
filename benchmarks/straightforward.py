"""A direct implementation of Algorithm 1 with the paper's rule, for comparison with the package.

Whole experts are in memory. Every module has separate statistics of every task in float32, stored
until the block is solved by LU. Blocks are called through the package's families, so both sides run
the same forward passes.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal import FeatCalSettings
from fusion_bench_featcal.families import resolve_family

EPS = 1e-8

Sums = list[Tensor]


@torch.no_grad()
def calibrate_plainly(
    merged: Any,
    base: Any,
    experts: Mapping[str, Any],
    batches: Mapping[str, Sequence[Any]],
    settings: FeatCalSettings,
) -> None:
    """Calibrate the merged model in place, block by block."""
    family, streams = resolve_family("auto", merged), dict[str, Any]()
    for stage in family.stages(merged):
        for task, data in batches.items():
            models, ended = (merged, experts[task]), streams.get(task) or repeat((None, None))
            streams[task] = [
                [begin(family, m, x, stage[0], end) for m, end in zip(models, ends, strict=True)]
                for x, ends in zip(data, ended, strict=False)
            ]
        for block in stage:
            calibrate_block(merged, base, experts, streams, block, family, settings)


def begin(family: Any, model: Any, batch: Any, first: str, end: Any) -> Any:
    """Return the input of a stage's first block, given the call `end` after the last stage."""
    return family.begin(model, batch, first, *([] if end is None else [end]))


def calibrate_block(
    model: Any,
    base: Any,
    experts: Mapping[str, Any],
    streams: Mapping[str, list[list[Any]]],
    block: str,
    family: Any,
    settings: FeatCalSettings,
) -> None:
    """Solve a block's modules and run the samples through it. `streams` advance in place."""
    linear = modules_of(model, block, nn.Linear)
    norms = modules_of(model, block, nn.LayerNorm) if settings.calibrate_norm else []
    sums: dict[str, dict[str, Sums]] = {name: {} for name in [*linear, *norms]}
    for task, pairs in streams.items():
        for pair in pairs:
            with inputs_of(model, sums) as x_cal:
                family.step(model, block, pair[0])
            with inputs_of(experts[task], linear) as x_exp:
                pair[1] = family.step(experts[task], block, pair[1])
            for name in linear:
                target = torch.lerp(x_cal[name], x_exp[name], settings.mix_alpha)
                add_linear(sums[name].setdefault(task, []), x_cal[name], target)
            for name in norms:
                add_norm(sums[name].setdefault(task, []), x_cal[name], model.get_submodule(name))
    updates = {}
    for name, task_sums in sums.items():
        solve = solve_linear if name in linear else solve_norm
        modules = {task: expert.get_submodule(name) for task, expert in experts.items()}
        anchor = anchor_of(model.get_submodule(name), base.get_submodule(name), settings.anchor_rho)
        updates[name] = solve(task_sums, modules, anchor, settings.ridge_lambda)
    for name, values in updates.items():
        for parameter, value in zip(model.get_submodule(name).parameters(), values, strict=True):
            parameter.copy_(value)
    for pairs in streams.values():
        for pair in pairs:
            pair[0] = family.step(model, block, pair[0])


@contextmanager
def inputs_of(model: nn.Module, names: Iterable[str]):
    """Record the inputs of the named modules, `[n, d]`."""
    recorded: dict[str, Tensor] = {}

    def note(name: str) -> Any:
        return lambda _, args: recorded.update({name: args[0].flatten(0, -2).float()})

    handles = [model.get_submodule(name).register_forward_pre_hook(note(name)) for name in names]
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


def modules_of(model: nn.Module, block: str, kind: type[nn.Module]) -> list[str]:
    """Return the names of a block's modules of one class."""
    modules = model.get_submodule(block).named_modules()
    return [f"{block}.{name}" for name, module in modules if isinstance(module, kind)]


def anchor_of(merged: Any, base: Any, rho: float) -> list[Tensor]:
    """Return the anchor's parameters (Eq. 11)."""
    pairs = zip(merged.parameters(), base.parameters(), strict=True)
    return [rho * one.float() + (1 - rho) * other.float() for one, other in pairs]


def add(sums: Sums, terms: Iterable[Tensor]) -> None:
    """Add terms to sums, which may be empty."""
    terms = list(terms)
    if not sums:
        sums += [torch.zeros_like(term) for term in terms]
    for total, term in zip(sums, terms, strict=True):
        total += term


def add_linear(sums: Sums, x: Tensor, target: Tensor) -> None:
    """Add a batch to a linear module's sums (Eqs. 13, 51)."""
    add(sums, (x.T @ x, target.T @ x, x.sum(0), target.sum(0), x.new_tensor(len(x))))


def add_norm(sums: Sums, x: Tensor, norm: nn.LayerNorm) -> None:
    """Add a batch to a LayerNorm's sums (Eq. 56)."""
    z = nn.functional.layer_norm(x, x.shape[-1:], eps=norm.eps)
    add(sums, (z.square().sum(0), z.sum(0), z.new_tensor(len(z))))


def solve_linear(
    sums: Mapping[str, Sums], experts: Mapping[str, Any], anchor: list[Tensor], ridge: float
) -> list[Tensor]:
    """Return a module's new weight and, if there is one, bias (Eqs. 14, 17, 51 to 55)."""
    weight, *biases = anchor
    system, right = (ridge + EPS) * torch.eye(len(weight.T)).to(weight), ridge * weight
    task_weights = {}
    for task, (gram, cross, _, _, count) in sums.items():
        # The norm of row norms, because torch's float32 norm of a large matrix is 4e-4 off.
        norm = torch.linalg.vector_norm(torch.linalg.vector_norm(gram, dim=1)) / count
        task_weights[task] = 1 / norm.clamp_min(EPS)
        system += gram * (task_weights[task] / count)
        right += experts[task].weight.float() @ cross * (task_weights[task] / count)
    solved = torch.linalg.solve(system, right, left=False)
    if not biases:
        return [solved]
    bias = ridge * biases[0]
    for task, (_, _, x, target, count) in sums.items():
        mean = experts[task].bias - solved @ (x / count)
        mean = mean + experts[task].weight.float() @ (target / count)
        bias = bias + task_weights[task] * mean
    return [solved, bias / (sum(task_weights.values()) + ridge)]


def solve_norm(
    sums: Mapping[str, Sums], experts: Mapping[str, Any], anchor: list[Tensor], ridge: float
) -> list[Tensor]:
    """Return the new gain and shift of a LayerNorm (Eqs. 56 to 59)."""
    gain, shift = (ridge * parameter for parameter in anchor)
    a11, a12, a22 = torch.full_like(gain, ridge), torch.zeros_like(gain), ridge + len(sums)
    for task, (square, total, count) in sums.items():
        square, mean, expert = square / count, total / count, experts[task]
        a11, a12 = a11 + square, a12 + mean
        gain = gain + square * expert.weight + mean * expert.bias
        shift = shift + mean * expert.weight + expert.bias
    determinant = (a22 * a11 - a12 * a12).clamp_min(EPS)
    return [(a22 * gain - a12 * shift) / determinant, (a11 * shift - a12 * gain) / determinant]
