"""Measurements of one model beside one task's expert: drift, final features, task vectors."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, normalize

from fusion_bench_featcal.core.kernels import choose_kernel, with_kernel
from fusion_bench_featcal.diagnosis.passes import Passes, item_means
from fusion_bench_featcal.experts import ExpertModel, ExpertSource, source_of
from fusion_bench_featcal.experts.model_config import check_same_function, config_of
from fusion_bench_featcal.families import Family
from fusion_bench_featcal.methods.final_features import final_features, final_rows
from fusion_bench_featcal.modules.models import (
    Modes,
    copied,
    device_of,
    head_of,
    tensors_of_head,
)
from fusion_bench_featcal.problem import Autocast
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.streams.batch import Batch
from fusion_bench_featcal.streams.inputs import to_device
from fusion_bench_featcal.streams.rows import rows_of
from fusion_bench_featcal.streams.runner import Runner
from fusion_bench_featcal.streams.samples import naming_task, rows_named, take_samples

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
    settings = settings.replace(decoder_rows="auto") if positions == "read" else settings
    stages, shown = family.stages(shown), copied(shown, device, in_place=True)
    spared = set(tensors_of_head(shown, stages[0][0]))

    def paired(name: str, source: nn.Module | ExpertSource, role: str = "expert") -> ExpertModel:
        configs = config_of(source), config_of(shown)
        check_same_function(name, *configs, settings.ignore_config, role=role)
        weights = family.view.source(source_of(source))
        return ExpertModel(name, weights, shown, role=role, spared=spared)

    try:
        expert = paired(task, experts[task])
        start = None if base is None else paired("_pretrained_", base, "base model")
        items = list(take_samples(task, batches, settings, shown))
        forward = with_kernel(
            choose_kernel(settings.linear_kernel, device), autocast or nullcontext
        )
        runner = Runner(family, stages, device, forward, rows_named(settings, items[0].inputs))
        passes = Passes(shown, runner, settings, positions)
        with expert.loaded(list(expert.keys)) as module:
            drift = passes.drift(task, module, items)
            pairs = [final_pair(passes, module, batch, task, projection) for batch in items]
        cosines, features, expert_features = (torch.cat(p) for p in zip(*pairs, strict=True))
        blocks = [block for stage in stages for block in stage]
        vector = None if start is None else task_vector_cosine(shown, start, expert)
    finally:
        modes.restore(shown)
        shown.to(home)
    return Measures(blocks, drift, cosines, features, expert_features, vector)


def final_pair(
    passes: Passes, expert: nn.Module, batch: Batch, task: str, projection: Projection | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compare the final features of a model and an expert on a batch.

    Of a language model these are the hidden states that its head reads, at the positions that
    predict a target (without labels: at the last position); of others the pooled output.

    Returns:
        The cosines, mean over each item's positions, `[items]`; and both models' mean features of
        norm 1, `[items, d]`; on the CPU.
    """
    runner, answers = passes.runner, passes.settings.replace(decoder_rows="auto")
    inputs = to_device(batch.inputs, runner.device)
    has_head = head_of(passes.model) is not None
    rows = None
    sides = []
    with naming_task(task), torch.no_grad(), runner.autocast():
        if has_head:
            rows = final_rows(passes.model, runner.family, answers, inputs)
        for side in (passes.model, expert):
            body = side if has_head else getattr(side, "base_model", side)
            found = final_features(body, inputs)
            found = found if has_head else found.flatten(1)
            sides.append(rows_of(found if projection is None else projection(found), rows))
    cosines = cosine_similarity(sides[0].double(), sides[1].double(), dim=1)[:, None]
    means = [item_means(part, batch.samples, rows) for part in (cosines, *sides)]
    features = [normalize(mean, dim=1).float().cpu() for mean in means[1:]]
    return means[0].flatten().cpu(), features[0], features[1]


def task_vector_cosine(model: nn.Module, base: ExpertModel, expert: ExpertModel) -> float | None:
    """Return the cosine of `theta - theta_0` and `theta_i - theta_0`, heads excluded.

    Args:
        model: The model.
        base: The base.
        expert: The expert.

    Returns:
        None where the model or the expert is the base.
    """
    sums = torch.zeros(3, dtype=torch.float64)
    for name, parameter in model.named_parameters():
        if name not in expert.keys or name not in base.keys:
            continue  # a head, of which each model may have its own
        start = base.tensor(name).double()
        steps = parameter.detach().double() - start, expert.tensor(name).double() - start
        pairs = (steps, (steps[0], steps[0]), (steps[1], steps[1]))
        sums += torch.stack([(a * b).sum().cpu() for a, b in pairs])
    product, square, expert_square = sums.tolist()
    return product / (square * expert_square) ** 0.5 if square > 0 and expert_square > 0 else None
