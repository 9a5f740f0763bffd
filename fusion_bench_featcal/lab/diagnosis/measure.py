"""Comparison of one model with one task's expert: drift, final features, task vectors."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, normalize

from fusion_bench_featcal.core.linear import at_least_float32
from fusion_bench_featcal.data.embeddings import Pooling
from fusion_bench_featcal.errors.place import error_context
from fusion_bench_featcal.experts import ExpertSource, LazyModel, source_of
from fusion_bench_featcal.families import Family, head_of
from fusion_bench_featcal.families.base import hidden_output, stoppable, without_cache
from fusion_bench_featcal.lab.rivals.features import final_features, final_rows
from fusion_bench_featcal.modules.models import (
    Modes,
    copied,
    device_of,
    gives_images,
    tensors_outside_blocks,
)
from fusion_bench_featcal.run.inputs import Autocast
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.streams.batch import CountedPositions, Positions, rows_of
from fusion_bench_featcal.streams.inputs import check_finite_inputs, to_device
from fusion_bench_featcal.streams.samples import resolved_decoder_rows, take_samples

COLUMNS = (
    "drift", "drift_sq", "expert_sq", "mismatch", "propagation", "propagation_sq", "product",
)  # fmt: skip
"""Columns of `split_drift`."""


@dataclass(frozen=True)
class Measures:
    """Measurements of one model on one task's items.

    Attributes:
        drift: Block -> means over each item's positions, `[items, 7]`, with `COLUMNS`.
        cosines: Cosine of the final features of model and expert, mean over each item's positions,
            `[items]`.
        features: Final features, mean over each item's positions, of norm 1, `[items, d]`.
        expert_features: The expert's final features, mean over each item's positions, of norm 1,
            `[items, d]`.
        vector_cosine: Cosine of the task vectors of model and expert, or None if there is no base
            or if one of the two equals it.
    """

    drift: dict[str, Tensor]
    cosines: Tensor
    features: Tensor
    expert_features: Tensor
    vector_cosine: float | None


@torch.no_grad()
def measure_drift(
    model: nn.Module,
    base: nn.Module | ExpertSource | None,
    expert: nn.Module,
    task: str,
    batches: Iterable[object],
    settings: FeatCalSettings,
    family: Family,
    *,
    projection: Callable[[Tensor], Tensor] = lambda features: features,
    pooling: Pooling | None = None,
    device: torch.device | None = None,
    autocast: Autocast = nullcontext,
) -> Measures:
    """Compare a model with one task's expert on the task's items.

    The features of one batch are in memory at a time. Final features of all batches are kept.

    Args:
        model: The model. Its weights do not change.
        base: The base, for task vectors, or None to leave out their cosine.
        expert: The expert, with the model's structure.
        task: The task.
        batches: Batches of the model's inputs.
        settings: `decoder_rows` and `samples_per_task` are used.
        family: How the model is cut into blocks.
        projection: Applied to the final features.
        pooling: How an encoder's embeddings are made, if these are its final features.
        device: Device of the computation, by default the device of the model.
        autocast: Returns the context of forward passes.

    Raises:
        CalibrationError: If the base's weights or the items do not fit the model.
    """
    device = torch.device(device or device_of(model))
    batch_measures = []
    with on_device(model, device), on_device(expert, device), error_context(task=task):
        with autocast():
            for batch in take_samples(task, batches, settings.samples_per_task, model):
                inputs = to_device(batch.inputs, device)
                check_finite_inputs(inputs, batch.start)
                options = batch.samples, settings, family, projection, pooling
                batch_measures.append(_compare(model, expert, inputs, *options))
        vectors = None if base is None else _vector_cosine(model, expert, base, family)
    drift, *finals = zip(*batch_measures, strict=True)
    blocks = {block: torch.cat([batch_drift[block] for batch_drift in drift]) for block in drift[0]}
    cosines, features, expert_features = map(torch.cat, finals)
    return Measures(blocks, cosines, features, expert_features, vectors)


@contextmanager
def on_device(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Context in which a model runs on a device, in evaluation mode and without gradients."""
    device_before, modes = device_of(model), Modes.of(model)
    copied(model, device, in_place=True)
    try:
        yield
    finally:
        modes.restore(model)
        model.to(device_before)


def _compare(
    model: nn.Module,
    expert: nn.Module,
    inputs: object,
    items: int,
    settings: FeatCalSettings,
    family: Family,
    projection: Callable[[Tensor], Tensor],
    pooling: Pooling | None,
) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
    """Run both models on a batch, and return the fields of `Measures` for it on the CPU.

    For a language model, final features are the hidden states that its head reads, at the positions
    that predict a target (without labels: at the last position). For other models they are the
    embedding or the pooled output.
    """
    outputs: dict[str, Tensor] = {}
    crossed: dict[str, Tensor] = {}
    drift: dict[str, Tensor] = {}
    counted = _counted_positions(family, model, inputs, settings)

    def store_output(block: str, _: nn.Module, __: object, output: object) -> None:
        outputs[block] = hidden_output(output).to("cpu", copy=True)

    def run_crossed(block: str, _: nn.Module, args: Any, kwargs: dict[str, object]) -> None:
        """Run the model's block on the inputs of the expert's block."""
        copies = {name: _copy(value) for name, value in kwargs.items()}
        crossed[block] = hidden_output(model.get_submodule(block)(*map(_copy, args), **copies))

    def measure_terms(block: str, _: nn.Module, __: object, output: object) -> None:
        expert_hidden = hidden_output(output)
        sides = [outputs.pop(block).to(expert_hidden.device), expert_hidden, crossed.pop(block)]
        if expert_hidden.ndim == 4 and gives_images(model.get_submodule(block)):
            sides = [side.movedim(1, -1) for side in sides]
        columns = split_drift(*(rows_of(side, counted[block]) for side in sides))
        drift[block] = item_means(columns, items, counted[block]).cpu()

    with stoppable(
        *(model.get_submodule(b).register_forward_hook(partial(store_output, b)) for b in counted)
    ):
        finals = [_final_features(model, inputs, pooling)]
    modules = {block: expert.get_submodule(block) for block in counted}
    before = [
        module.register_forward_pre_hook(partial(run_crossed, block), with_kwargs=True)
        for block, module in modules.items()
    ]
    after = [m.register_forward_hook(partial(measure_terms, block)) for block, m in modules.items()]
    with stoppable(*before, *after):
        finals.append(_final_features(expert, inputs, pooling))
    rows = None if head_of(model) is None else final_rows(model, family, inputs)
    features = [rows_of(projection(side), rows) for side in finals]
    cosines = cosine_similarity(*(side.double() for side in features), dim=1)[:, None]
    cosine, *means = (item_means(values, items, rows).cpu() for values in (cosines, *features))
    model_mean, expert_hidden = (normalize(mean, dim=1).float() for mean in means)
    return drift, cosine.flatten(), model_mean, expert_hidden


def _counted_positions(
    family: Family, model: nn.Module, inputs: object, settings: FeatCalSettings
) -> dict[str, Positions | None]:
    """Return block -> the positions that count at its output, or None if all positions count."""
    rows = dict[str, Positions | None]()
    counted = settings.decoder_rows or settings.rule_object.decoder_rows
    for index, stage in enumerate(family.stages(model)):
        masks = family.masks(model, inputs, index, resolved_decoder_rows(counted, inputs))
        rows |= dict.fromkeys(stage, CountedPositions.from_masks(masks).valid)
    return rows


def _final_features(model: nn.Module, inputs: object, pooling: Pooling | None) -> Tensor:
    if head_of(model) is not None:
        return final_features(model, inputs)
    return final_features(getattr(model, "base_model", model), inputs, pooling).flatten(1)


def _copy(value: object) -> object:
    """Copy an argument of a block for a second call. A cache becomes None: it stores the first."""
    return value.clone() if isinstance(value, Tensor) else without_cache(value)


def _vector_cosine(
    model: nn.Module, expert: nn.Module, base: nn.Module | ExpertSource, family: Family
) -> float | None:
    """Return the cosine of the task vectors `theta - theta_0` and `theta_i - theta_0`.

    Heads are left out. The cosine is None if a task vector is 0.
    """
    optional = set(tensors_outside_blocks(model, family.stages(model)))
    start = LazyModel("the base", source_of(base), model, optional=optional)
    parameters, sums = dict(expert.named_parameters()), torch.zeros(3, dtype=torch.float64)
    for name, parameter in model.named_parameters():
        if name in optional or name not in parameters:
            continue
        origin = start.tensor(name).double()
        step, expert_step = parameter.double() - origin, parameters[name].double() - origin
        pairs = (step, step), (expert_step, expert_step), (step, expert_step)
        sums += torch.stack([(a * b).sum().cpu() for a, b in pairs])
    square, expert_square, product = sums.tolist()
    norms = (square * expert_square) ** 0.5
    return product / norms if norms > 0 else None


def split_drift(features: Tensor, expert: Tensor, crossed: Tensor) -> Tensor:
    """Split the drift at a block's output into local mismatch and upstream propagation (Eq. 3).

    With `f` the model's block and `f_exp` the expert's, on their inputs `x` and `x_exp`, the drift
    `e = f(x) - f_exp(x_exp)` is the sum of the mismatch `m = f(x_exp) - f_exp(x_exp)` and the
    propagation `p = f(x) - f(x_exp)`.

    Args:
        features: `f(x)`, `[n, d]`.
        expert: `f_exp(x_exp)` for the same rows, `[n, d]`.
        crossed: `f(x_exp)`, `[n, d]`.

    Returns:
        `[n, 7]`, with `COLUMNS`: `|e|`, `|e|^2`, `|f_exp|^2`, `|m|`, `|p|`, `|p|^2` and `m . p`.
    """
    features, expert, crossed = map(at_least_float32, (features, expert, crossed))
    mismatch, propagation = crossed - expert, features - crossed
    e, m, p = (
        torch.linalg.vector_norm(term, dim=1) for term in (features - expert, mismatch, propagation)
    )
    product = (mismatch * propagation).sum(1)
    return torch.stack([e, e**2, expert.square().sum(1), m, p, p**2, product], dim=1)


def item_means(values: Tensor, items: int, counted: Positions | None) -> Tensor:
    """Return means over each item's rows, in float64.

    Args:
        values: `[rows, k]`, rows of counted positions, item by item.
        items: Number of items.
        counted: The counted positions, or None if all items have the same number of rows.

    Returns:
        `[items, k]`.
    """
    values = values.double()
    if counted is None or counted.index is None:
        return values.reshape(items, -1, values.shape[1]).mean(1)
    owner = counted.index // counted.shape[1:].numel()
    sums = values.new_zeros(items, values.shape[1]).index_add_(0, owner, values)
    return sums / owner.bincount(minlength=items)[:, None]
