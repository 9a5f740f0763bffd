"""Least-squares means of the layers outside a model's blocks, from one pass of every expert."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fusion_bench_featcal.core.moments import moment_dtype
from fusion_bench_featcal.engine.problem import Problem, is_language_model
from fusion_bench_featcal.engine.samples import Batch, to_device
from fusion_bench_featcal.families.base import call_model
from fusion_bench_featcal.methods.least_squares import GainMean, LinearMean
from fusion_bench_featcal.settings import CalibrationError


def load_outside(
    problem: Problem,
    base: nn.Module,
    samples: Mapping[str, Iterable[Batch]],
    make_linear: Callable[[Tensor], LinearMean],
    make_gain: Callable[[Tensor], GainMean],
) -> None:
    """Solve the model's linear layers, convolutions and LayerNorms outside the blocks.

    Their inputs are those in a whole pass of each expert over its own samples. Everything else
    outside the blocks (biases, shifts, embeddings) is left as it is.

    Args:
        problem: The problem, whose model gets the solutions.
        base: The base model.
        samples: By task.
        make_linear: Makes the running sums of a weight `[m, d]`, given the base's.
        make_gain: Makes those of a gain `[d]`.

    Raises:
        CalibrationError: If the model is a language model.
    """
    if is_language_model(problem.model):
        raise CalibrationError(
            "method.outside=true solves the layers around an image model's blocks; a language "
            "model's embedding and head are no such layers. Set method.outside=false"
        )
    layers = dict(_outside(problem))
    means: dict[str, Any] = {}
    for name, layer in layers.items():
        start = base.get_submodule(name).get_parameter("weight").detach().to(problem.device)
        make = make_gain if isinstance(layer, nn.LayerNorm) else make_linear
        means[name] = make(start.flatten(1) if start.ndim > 1 else start)
    for task, expert in problem.experts.items():
        with expert.loaded(problem.model.state_dict()) as module:
            sums = _inputs_of(module, layers, samples[task], problem.device)
            for name, moment in sums.items():
                weight = module.get_submodule(name).get_parameter("weight").detach()
                means[name].add(moment, weight.flatten(1) if weight.ndim > 1 else weight)
    for name, mean in means.items():
        solved = mean.solve()
        weight = problem.model.get_submodule(name).get_parameter("weight").data
        weight.copy_((solved if isinstance(solved, Tensor) else solved[0]).view_as(weight))


def _outside(problem: Problem) -> Iterator[tuple[str, nn.Module]]:
    """Layers with a weight of their own outside the blocks, by name."""
    blocks = tuple(block for stage in problem.stages for block in stage)
    every = list(problem.model.named_parameters(remove_duplicate=False))
    for name, module in problem.model.named_modules():
        weight = getattr(module, "weight", None)
        inside = any(f"{name}.".startswith(f"{block}.") for block in blocks)
        if inside or weight is None or sum(other is weight for _, other in every) > 1:
            continue
        plain = not isinstance(module, nn.Conv2d) or (
            module.groups == 1 and not isinstance(module.padding, str)
        )
        if isinstance(module, nn.Linear | nn.Conv2d | nn.LayerNorm) and plain:
            yield name, module


def _inputs_of(
    expert: nn.Module,
    layers: Iterable[str],
    samples: Iterable[Batch],
    device: torch.device,
) -> dict[str, Tensor]:
    """By layer the mean of `x x'` over its inputs `[d, d]`; of a LayerNorm that of `z^2` `[d]`."""
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def add(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        rows = _rows(module, args[0])
        rows = rows.to(moment_dtype(rows.dtype))
        moment = rows.square().sum(0) if isinstance(module, nn.LayerNorm) else rows.T @ rows
        sums[name] = sums[name] + moment if name in sums else moment
        counts[name] = counts.get(name, 0) + len(rows)

    with ExitStack() as hooks:
        for name in layers:
            module = expert.get_submodule(name)
            handle = module.register_forward_pre_hook(partial(add, name))
            hooks.callback(handle.remove)
        for batch in samples:
            call_model(expert, to_device(batch.inputs, device))
    return {name: moment / counts[name] for name, moment in sums.items()}


def _rows(module: nn.Module, x: Tensor) -> Tensor:
    """Rows that a layer multiplies by its weight, `[rows, d]`."""
    if isinstance(module, nn.Conv2d):
        padding: Any = module.padding
        patches = functional.unfold(x, module.kernel_size, module.dilation, padding, module.stride)
        return patches.transpose(1, 2).flatten(0, 1)
    if isinstance(module, nn.LayerNorm):
        x = functional.layer_norm(x, module.normalized_shape, eps=module.eps)
    return x.flatten(0, -2)
