"""Comparison of one model with one task's expert: drift, final features, task vectors."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, normalize

from fusion_bench_featcal.experts import ExpertModel, ExpertSource, source_of
from fusion_bench_featcal.experts.model_config import check_same_function, config_of
from fusion_bench_featcal.families import Family
from fusion_bench_featcal.families.base import hidden_output, without_cache
from fusion_bench_featcal.families.open_clip import SplitSource, find_open_clip_blocks, split
from fusion_bench_featcal.lab.diagnosis.drift import item_means, split_drift
from fusion_bench_featcal.lab.rivals.features import final_features, final_rows
from fusion_bench_featcal.modules.models import (
    Modes,
    copied,
    device_of,
    gives_images,
    head_of,
    tail_of,
)
from fusion_bench_featcal.run.problem import Autocast
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.streams.batch import CountedRows, Rows, rows_of
from fusion_bench_featcal.streams.inputs import check_finite_inputs, to_device
from fusion_bench_featcal.streams.samples import naming_task, rows_named, take_samples

Projection = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Measures:
    """Measurements of one model on one task's items.

    Attributes:
        drift: Block -> means over each item's positions, `[items, 9]`, with `drift.COLUMNS`.
        cosines: Cosine between final features of model and expert, mean over each item's positions,
            `[items]`.
        features: Final features, mean over each item's positions, of norm 1, `[items, d]`.
        expert_features: The same for the expert.
        vectors: Norms of the model's and the expert's difference from the base, and their product,
            or None without a base.
    """

    drift: dict[str, Tensor]
    cosines: Tensor
    features: Tensor
    expert_features: Tensor
    vectors: tuple[float, float, float] | None


@torch.no_grad()
def measure(
    model: nn.Module,
    base: nn.Module | ExpertSource | None,
    expert: nn.Module | ExpertSource,
    task: str,
    batches: Iterable[Any],
    settings: FeatCalSettings,
    family: Family,
    *,
    projection: Projection = lambda features: features,
    device: torch.device | None = None,
    autocast: Autocast = nullcontext,
) -> Measures:
    """Compare a model with one task's expert on the task's items.

    Only this expert and features of one batch are in memory. Final features are kept.

    Args:
        model: The model. Its weights do not change.
        base: The base, for task vectors, which are optional.
        expert: The expert.
        task: The task.
        batches: Batches of the model's inputs.
        settings: `decoder_rows` and `samples_per_task` are used.
        family: How the model is cut into blocks.
        projection: Applied to the final features.
        device: Device of the computation, by default the device of the model.
        autocast: Returns the context of forward passes.

    Raises:
        CalibrationError: If the expert's weights or the items do not fit the model.
    """
    home, model = device_of(model), split(model)
    modes = Modes.of(model)
    device = torch.device(device or home)
    copied(model, device, in_place=True)
    sources = {task: expert} if base is None else {task: expert, "_pretrained_": base}
    try:
        paired = [_paired(model, *entry, family, settings) for entry in sources.items()]
        batch_measures = []
        with paired[0].loaded(list(paired[0].keys)) as module, autocast():
            for number, batch in enumerate(take_samples(task, batches, settings, model)):
                inputs = to_device(batch.inputs, device)
                check_finite_inputs(inputs, task, number)
                with naming_task(task):
                    sides = model, module
                    batch_measures.append(
                        _compare(*sides, inputs, batch.samples, settings, family, projection)
                    )
        drift, *finals = zip(*batch_measures, strict=True)
        blocks = {block: torch.cat([part[block] for part in drift]) for block in drift[0]}
        cosines, features, expert_features = (torch.cat(part) for part in finals)
        vectors = None if base is None else _task_vectors(model, *paired)
    finally:
        modes.restore(model)
        model.to(home)
    return Measures(blocks, cosines, features, expert_features, vectors)


def _paired(
    model: nn.Module,
    name: str,
    source: nn.Module | ExpertSource,
    family: Family,
    settings: FeatCalSettings,
) -> ExpertModel:
    role = "base model" if name == "_pretrained_" else "expert"
    check_same_function(name, config_of(source), config_of(model), role=role)
    spared = set(tail_of(model, family.stages(model)[-1][-1]))
    weights = source_of(source)
    if find_open_clip_blocks(model):
        weights = SplitSource(weights)
    return ExpertModel(name, weights, model, role=role, spared=spared)


def _compare(
    model: nn.Module,
    expert: nn.Module,
    inputs: Any,
    items: int,
    settings: FeatCalSettings,
    family: Family,
    projection: Projection,
) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
    """Run both models on a batch and return the batch's share of `Measures`, on the CPU.

    For a language model, final features are the hidden states read by its head, at the positions
    that predict a target (without labels: at the last position). For other models they are the
    pooled output.
    """
    outputs: dict[str, Tensor] = {}
    crossed: dict[str, Tensor] = {}
    drift: dict[str, Tensor] = {}
    counted = _counted(family, model, inputs, settings)

    def keep(block: str, output: Tensor) -> None:
        outputs[block] = output.to("cpu", copy=True)  # stored for the comparison with the expert

    def cross(block: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the model's block on the inputs of the expert's block."""
        copies = {name: _copy(value) for name, value in kwargs.items()}
        output = model.get_submodule(block)(*map(_copy, args), **copies)
        crossed[block] = hidden_output(output)

    def split(block: str, output: Tensor) -> None:
        sides = [outputs.pop(block).to(output.device), output, crossed.pop(block)]
        if output.ndim == 4 and gives_images(model.get_submodule(block)):
            sides = [side.movedim(1, -1) for side in sides]
        columns = split_drift(*(rows_of(side, counted[block]) for side in sides))
        drift[block] = item_means(columns, items, counted[block]).cpu()

    with _hooked(model, counted, after=keep):
        finals = [_final(model, inputs)]
    with _hooked(expert, counted, before=cross, after=split):
        finals.append(_final(expert, inputs))
    rows = None if head_of(model) is None else final_rows(model, family, inputs)
    model_features, expert_features = (rows_of(projection(side), rows) for side in finals)
    cosines = cosine_similarity(model_features.double(), expert_features.double(), dim=1)[:, None]
    means = [
        item_means(part, items, rows).cpu() for part in (cosines, model_features, expert_features)
    ]
    features = [normalize(mean, dim=1).float() for mean in means[1:]]
    return drift, means[0].flatten(), features[0], features[1]


def _counted(
    family: Family, model: nn.Module, inputs: Any, settings: FeatCalSettings
) -> dict[str, CountedRows | None]:
    """Return the positions that count at each block's output, or None if all count."""
    rows: dict[str, CountedRows | None] = {}
    for index, stage in enumerate(family.stages(model)):
        masks = family.masks(model, inputs, index, rows_named(settings, inputs))
        rows |= dict.fromkeys(stage, Rows.of_masks(masks).valid)
    return rows


def _final(model: nn.Module, inputs: Any) -> Tensor:
    if head_of(model) is not None:
        return final_features(model, inputs)
    return final_features(getattr(model, "base_model", model), inputs).flatten(1)


@contextmanager
def _hooked(
    model: nn.Module,
    blocks: Iterable[str],
    *,
    before: Callable[..., None] = lambda *_: None,
    after: Callable[..., None],
) -> Iterator[None]:
    """Context in which blocks call `before(name, args, kwargs)` and `after(name, output)`."""
    handles = []
    for name in blocks:
        module = model.get_submodule(name)
        handles += [
            module.register_forward_pre_hook(
                lambda _, args, kwargs, name=name: before(name, args, kwargs), with_kwargs=True
            ),
            module.register_forward_hook(
                lambda _, __, output, name=name: after(name, hidden_output(output))
            ),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _copy(value: Any) -> Any:
    """Copy a block's argument for another run. A cache becomes None, because it stores a run."""
    return value.clone() if isinstance(value, Tensor) else without_cache(value)


def _task_vectors(
    model: nn.Module, expert: ExpertModel, base: ExpertModel
) -> tuple[float, float, float]:
    """Return the norms and the product of `theta - theta_0` and `theta_i - theta_0`."""
    sums = torch.zeros(3, dtype=torch.float64)
    for name, parameter in model.named_parameters():
        if name not in expert.keys or name not in base.keys:
            continue  # a head, which may be different in each model
        start = base.tensor(name).double()
        model_step, expert_step = parameter.double() - start, expert.tensor(name).double() - start
        pairs = ((model_step, model_step), (expert_step, expert_step), (model_step, expert_step))
        sums += torch.stack([(a * b).sum().cpu() for a, b in pairs])
    square, expert_square, product = sums.tolist()
    return square**0.5, expert_square**0.5, product
