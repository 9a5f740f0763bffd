"""Measurements of one model beside one task's expert: drift, final features, task vectors."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, normalize

from fusion_bench_featcal.core.kernels import choose_kernel
from fusion_bench_featcal.diagnosis.passes import Passes, item_means
from fusion_bench_featcal.engine.problem import Autocast, Modes, Problem, device_of, head_of
from fusion_bench_featcal.engine.rows import rows_of
from fusion_bench_featcal.engine.samples import Batch, naming_task, take_samples, to_device
from fusion_bench_featcal.engine.sensitivity import final_features, final_rows
from fusion_bench_featcal.engine.setup import set_up
from fusion_bench_featcal.experts import ExpertModel, ExpertSource
from fusion_bench_featcal.families import Family
from fusion_bench_featcal.settings import FeatCalSettings

Projection = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Measures:
    """Measurements of one row on one task's items.

    Attributes:
        blocks: Names of the blocks, in forward order.
        drift: Means over each item's positions, `[blocks, items, 9]`, columns as `DriftParts`.
        cosines: Cosine of the final features to the expert's, mean over each item's positions,
            `[items]`.
        features: Final features, mean over each item's positions, of norm 1, `[items, d]`.
        expert_features: The same of the expert.
        task_vector: Cosine of the model's and the expert's difference from the base; None without
            a base, or where the model is the base.
    """

    blocks: list[str]
    drift: Tensor
    cosines: Tensor
    features: Tensor
    expert_features: Tensor
    task_vector: float | None


def measure(
    model: nn.Module,
    base: nn.Module | ExpertSource | None,
    experts: Mapping[str, nn.Module | ExpertSource],
    task: str,
    batches: Iterable[Any],
    settings: FeatCalSettings,
    family: Family,
    *,
    positions: str = "all",
    projection: Projection | None = None,
    device: torch.device | None = None,
    autocast: Autocast | None = None,
) -> Measures:
    """Compare a model with one task's expert on the task's items.

    Only this expert is in memory, and features of one batch at a time; the final ones are kept.

    Args:
        model: The model; its weights do not change.
        base: The base, for task vectors; or None.
        experts: Experts by task.
        task: The task.
        batches: Batches of the model's inputs.
        settings: `decoder_rows`, `linear_kernel` and what finding the modules needs are used.
        family: How the model is cut into blocks.
        positions: One of `POSITIONS`.
        projection: Applied to the final features; None: they are compared as they are.
        device: Device of the computation; None: the model's.
        autocast: Makes the context of forward passes.

    Raises:
        CalibrationError: If the expert's weights or the items do not fit the model.
    """
    shown, home = family.view.shown(model), device_of(model)
    modes, device = Modes.of(shown), torch.device(device or home)
    problem, _ = set_up(
        shown,
        base,
        experts,
        settings.replace(decoder_rows="auto") if positions == "read" else settings,
        family,
        device=device,
        autocast=autocast or nullcontext,
        kernel=choose_kernel(settings.linear_kernel, device),
        mine=[task],
        in_place=True,
    )
    try:
        expert = problem.experts[task]
        items = list(take_samples(task, batches, settings, shown))
        with expert.loaded(list(expert.keys)) as module:
            drift = Passes(problem, positions).drift(task, module, items)
            pairs = [final_pair(problem, module, batch, task, projection) for batch in items]
        cosines, mine, theirs = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        blocks = [block for stage in problem.stages for block in stage]
        vector = task_vector_cosine(problem, expert)
    finally:
        modes.restore(shown)
        shown.to(home)
    return Measures(blocks, drift, cosines, mine, theirs, vector)


def final_pair(
    problem: Problem, expert: nn.Module, batch: Batch, task: str, projection: Projection | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compare the final features of a model and an expert on a batch.

    Of a language model these are the hidden states that its head reads, at the positions that
    predict a target (without labels: at the last position); of others the pooled output.

    Returns:
        The cosines, mean over each item's positions, `[items]`; and both models' mean features of
        norm 1, `[items, d]`; on the CPU.
    """
    inputs = to_device(batch.inputs, problem.device)
    has_head = head_of(problem.model) is not None
    rows = None
    sides = []
    with naming_task(task), torch.no_grad(), problem.autocast():
        if has_head:
            auto = replace(problem, settings=problem.settings.replace(decoder_rows="auto"))
            rows = final_rows(auto, inputs)
        for side in (problem.model, expert):
            body = side if has_head else getattr(side, "base_model", side)
            found = final_features(body, inputs)
            found = found if has_head else found.flatten(1)
            sides.append(rows_of(found if projection is None else projection(found), rows))
    cosines = cosine_similarity(sides[0].double(), sides[1].double(), dim=1)[:, None]
    means = [item_means(part, batch.samples, rows) for part in (cosines, *sides)]
    features = [normalize(mean, dim=1).float().cpu() for mean in means[1:]]
    return means[0].flatten().cpu(), features[0], features[1]


def task_vector_cosine(problem: Problem, expert: ExpertModel) -> float | None:
    """Cosine of `theta - theta_0` and `theta_i - theta_0` over all parameters but those of heads.

    Args:
        problem: The model and the base.
        expert: The expert.
    """
    if problem.base is None:
        return None
    sums = torch.zeros(3, dtype=torch.float64)
    for name, parameter in problem.model.named_parameters():
        if name not in expert.keys or name not in problem.base.keys:
            continue  # a head, of which each model may have its own
        start = problem.base.tensor(name).double()
        mine, theirs = parameter.detach().double() - start, expert.tensor(name).double() - start
        pairs = ((mine, theirs), (mine, mine), (theirs, theirs))
        sums += torch.stack([(a * b).sum().cpu() for a, b in pairs])
    product, mine, theirs = sums.tolist()
    return product / (mine * theirs) ** 0.5 if mine > 0 and theirs > 0 else None
