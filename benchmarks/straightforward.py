"""A direct implementation of Algorithm 1, for comparison with the engine.

    python benchmarks/straightforward.py --model vit-b-32 --samples 32

Whole experts are in memory. Every module has separate statistics of every task, stored until the
block is solved by LU in float32. Whole blocks are run, including the last one. Blocks are called
through the package's families, so that both sides run the same forward passes. As a script it
prints its FLOPs, the measured GEMM rate, and its time relative to the bound from both: it should be
simple, not slow. `engine_speed.py` compares the engine with it.
"""

import argparse
import time
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from speed_models import BATCH, Shape, load, write_models
from torch import Tensor, nn

from fusion_bench_featcal import FeatCalSettings
from fusion_bench_featcal.families import resolve_family

Sums = list[Tensor]
EPS = 1e-8


@contextmanager
def inputs_of(model: nn.Module, names: Iterable[str]):
    """Record the inputs of the named modules, as rows."""
    recorded: dict[str, Tensor] = {}

    def note(name: str) -> Any:
        return lambda _, args: recorded.update({name: args[0].reshape(-1, args[0].shape[-1])})

    handles = [model.get_submodule(n).register_forward_pre_hook(note(n)) for n in names]
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


def modules_of(model: nn.Module, block: str, kind: type[nn.Module]) -> list[str]:
    """Names of a block's modules of one class."""
    inside = model.get_submodule(block).named_modules()
    return [f"{block}.{name}" for name, module in inside if isinstance(module, kind)]


def add_linear(sums: Sums, x_cal: Tensor, x_exp: Tensor, mix: float) -> Sums:
    """Add one batch to a module's sums (Eqs. 13, 51): gram, cross, sums of rows, count."""
    width = x_cal.shape[1]
    shapes = ((width, width), (width, width), (width,), (width,), ())
    sums = sums or [torch.zeros(shape) for shape in shapes]
    target = torch.lerp(x_cal, x_exp, mix)
    sums[0].addmm_(x_cal.T, x_cal)
    sums[1].addmm_(target.T, x_cal)
    for total, new in zip(sums[2:], (x_cal.sum(0), target.sum(0), len(x_cal)), strict=True):
        total += new
    return sums


def add_norm(sums: Sums, x_cal: Tensor, norm: nn.LayerNorm) -> Sums:
    """Add one batch to a LayerNorm's sums (Eq. 56): squares, values, count."""
    z = nn.functional.layer_norm(x_cal, x_cal.shape[-1:], eps=norm.eps)
    sums = sums or [torch.zeros(z.shape[1]), torch.zeros(z.shape[1]), torch.zeros(())]
    for total, new in zip(sums, ((z * z).sum(0), z.sum(0), len(z)), strict=True):
        total += new
    return sums


def solve_linear(
    sums: Mapping[str, Sums],
    experts: Mapping[str, Any],
    merged: Any,
    base: Any,
    settings: FeatCalSettings,
) -> list[Tensor]:
    """Solve for the weight and, if there is one, the bias of a module (Eqs. 14, 17, 51-55)."""
    rho, ridge_lambda = settings.anchor_rho, settings.ridge_lambda
    anchor = rho * merged.weight + (1 - rho) * base.weight
    system = (ridge_lambda + EPS) * torch.eye(anchor.shape[1])
    right = ridge_lambda * anchor
    task_weights = {}
    for task, (gram, cross, _, _, count) in sums.items():
        # The norm of row norms, because torch's float32 norm of a large matrix is 4e-4 off.
        norm = torch.linalg.vector_norm(torch.linalg.vector_norm(gram, dim=1)) / count
        task_weights[task] = 1 / norm.clamp_min(EPS)
        system.add_(gram, alpha=float(task_weights[task] / count))
        right.add_(experts[task].weight @ cross, alpha=float(task_weights[task] / count))
    solved = torch.linalg.solve(system, right, left=False)
    if merged.bias is None:
        return [solved]
    bias = ridge_lambda * (rho * merged.bias + (1 - rho) * base.bias)
    for task, (_, _, sum_cal, sum_target, count) in sums.items():
        target_mean = experts[task].bias + experts[task].weight @ (sum_target / count)
        bias = bias + task_weights[task] * (target_mean - solved @ (sum_cal / count))
    return [solved, bias / (sum(task_weights.values()) + ridge_lambda)]


def solve_norm(
    sums: Mapping[str, Sums],
    experts: Mapping[str, Any],
    merged: Any,
    base: Any,
    settings: FeatCalSettings,
) -> list[Tensor]:
    """Gain and shift of one LayerNorm (Eqs. 56-59)."""
    rho, ridge_lambda = settings.anchor_rho, settings.ridge_lambda
    a11 = ridge_lambda + sum(square / count for square, _, count in sums.values())
    a12 = sum(total / count for _, total, count in sums.values())
    a22 = ridge_lambda + len(sums)
    gain = ridge_lambda * (rho * merged.weight + (1 - rho) * base.weight)
    shift = ridge_lambda * (rho * merged.bias + (1 - rho) * base.bias)
    for task, (square, total, count) in sums.items():
        gain = gain + square / count * experts[task].weight + total / count * experts[task].bias
        shift = shift + total / count * experts[task].weight + experts[task].bias
    determinant = (a22 * a11 - a12 * a12).clamp_min(EPS)
    return [(a22 * gain - a12 * shift) / determinant, (a11 * shift - a12 * gain) / determinant]


def calibrate_block(
    model: Any, base: Any, experts: Mapping[str, Any], streams: Any, block: str, plan: Any
) -> None:
    """One turn of Algorithm 1's loop. The streams advance to the next block."""
    family, settings = plan
    linear = modules_of(model, block, nn.Linear)
    norms = modules_of(model, block, nn.LayerNorm) if settings.calibrate_norm else []
    sums: dict[str, dict[str, Sums]] = {name: {} for name in [*linear, *norms]}
    for task, pairs in streams.items():
        for pair in pairs:
            with inputs_of(model, [*linear, *norms]) as x_cal:
                family.step(model, block, pair[0])
            with inputs_of(experts[task], linear) as x_exp:
                pair[1] = family.step(experts[task], block, pair[1])
            for name in linear:
                batch_sums = sums[name].get(task, [])
                sums[name][task] = add_linear(
                    batch_sums, x_cal[name], x_exp[name], settings.mix_alpha
                )
            for name in norms:
                batch_sums = sums[name].get(task, [])
                sums[name][task] = add_norm(batch_sums, x_cal[name], model.get_submodule(name))
    updates = {}
    for name in sums:
        sides = {task: experts[task].get_submodule(name) for task in experts}
        solve = solve_linear if name in linear else solve_norm
        merged = model.get_submodule(name)
        updates[name] = solve(sums[name], sides, merged, base.get_submodule(name), settings)
    for name, values in updates.items():
        for parameter, value in zip(model.get_submodule(name).parameters(), values, strict=True):
            parameter.copy_(value)
    for pairs in streams.values():
        for pair in pairs:
            pair[0] = family.step(model, block, pair[0])


@torch.no_grad()
def calibrate_plainly(
    merged: Any,
    base: Any,
    experts: Mapping[str, Any],
    batches: Mapping[str, Any],
    settings: FeatCalSettings,
) -> None:
    """Calibrate the merged model in place, stage by stage, block by block."""
    family, streams = resolve_family("auto", merged), dict[str, Any]()
    for stage in family.stages(merged):
        for task, data in batches.items():
            earlier = streams.get(task) or repeat((None, None))
            streams[task] = [
                [
                    begin(family, merged, batch, stage[0], ends[0]),
                    begin(family, experts[task], batch, stage[0], ends[1]),
                ]
                for batch, ends in zip(data, earlier, strict=False)
            ]
        for block in stage:
            calibrate_block(merged, base, experts, streams, block, (family, settings))


def begin(family: Any, model: Any, batch: Any, first: str, end: Any) -> Any:
    """Return the inputs of a stage's first block, given the call `end` after the last stage."""
    return family.begin(model, batch, first, *([] if end is None else [end.hidden]))


def main() -> None:
    """Run it once, and print FLOPs, GEMM rate, bound and the ratio to the bound."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    shape = Shape.from_arguments(parser)
    rate = gemm_rate(shape)
    with TemporaryDirectory() as folder, torch.no_grad():
        names = write_models(shape, Path(folder))
        start = time.process_time()
        models = {name: load(shape, Path(folder) / name) for name in names}
        merged, base = models.pop("merged"), models.pop("base")
        data = {task: shape.batches(task) for task in models}
        calibrate_plainly(merged, base, models, data, shape.settings())
        seconds = time.process_time() - start
    rate = max(rate, gemm_rate(shape))
    bound = shape.plain_flops() / rate
    print(f"{shape}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"{shape.plain_flops() / 1e12:.2f} TFLOP, {rate / 1e9:.0f} GFLOP per CPU second")
    print(f"{seconds:.1f} CPU seconds, bound {bound:.1f}: {seconds / bound:.2f} times the bound")


def gemm_rate(shape: Shape, least: float = 2.0) -> float:
    """Return FLOPs per CPU second of the widest linear map on one batch, over some seconds.

    A product or two alone would run at a clock rate that does not last.
    """
    x, weight = (
        torch.randn(BATCH * shape.tokens, shape.width),
        torch.randn(shape.inner, shape.width),
    )
    start, count = time.process_time(), 0
    while time.process_time() - start < least:
        x @ weight.T
        count += 1
    return count * 2 * x.numel() * shape.inner / (time.process_time() - start)


if __name__ == "__main__":
    main()
