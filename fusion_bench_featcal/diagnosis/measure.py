"""Measurements of one model beside one task's expert: drift, final features, task vectors."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, normalize
from transformers.cache_utils import Cache

from fusion_bench_featcal.diagnosis.drift import item_means, split_drift
from fusion_bench_featcal.experts import ExpertModel, ExpertSource, source_of
from fusion_bench_featcal.experts.model_config import check_same_function, config_of
from fusion_bench_featcal.families import Family
from fusion_bench_featcal.families.base import hidden_output
from fusion_bench_featcal.methods.final_features import final_features, final_rows
from fusion_bench_featcal.modules.models import (
    Modes,
    copied,
    device_of,
    gives_images,
    head_of,
    tensors_of_head,
)
from fusion_bench_featcal.problem import Autocast
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.streams.inputs import check_finite_inputs, to_device
from fusion_bench_featcal.streams.rows import CountedRows, rows_of
from fusion_bench_featcal.streams.samples import naming_task, rows_named, take_samples

POSITIONS = ("all", "read")
"""Positions at which features are compared: all that count, or those whose final features are
read (CLIP's class token, positions of a text that predict a target)."""
Projection = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Measures:
    """Measurements of one model on one task's items.

    Attributes:
        drift: Block -> means over each item's positions, `[items, 9]`, with `drift.COLUMNS`.
        cosines: Cosine of the final features to the expert's, mean over each item's positions,
            `[items]`.
        features: Final features, mean over each item's positions, of norm 1, `[items, d]`.
        expert_features: The same of the expert.
        vectors: Norms of the model's and the expert's difference from the base, and their product;
            None without a base.
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

    Only this expert is in memory, and features of one batch at a time. The final ones are kept.

    Args:
        model: The model; its weights do not change.
        base: The base, for task vectors; or None.
        experts: Experts by task.
        task: The task.
        batches: Batches of the model's inputs.
        settings: `decoder_rows`, `samples_per_task` and `ignore_config` are used.
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
        parts = []
        with expert.loaded(list(expert.keys)) as module, (autocast or nullcontext)():
            pair = _Pair(shown, module, family, stages, settings, positions, projection)
            for number, batch in enumerate(take_samples(task, batches, settings, shown)):
                inputs = to_device(batch.inputs, device)
                check_finite_inputs(inputs, task, number)
                with naming_task(task):
                    parts.append(pair.compare(inputs, batch.samples))
        drift, *finals = zip(*parts, strict=True)
        cosines, features, expert_features = (torch.cat(part) for part in finals)
        blocks = {block: torch.cat([part[block] for part in drift]) for block in drift[0]}
        vectors = None if start is None else task_vectors(shown, start, expert)
    finally:
        modes.restore(shown)
        shown.to(home)
    return Measures(blocks, cosines, features, expert_features, vectors)


@dataclass(frozen=True)
class _Pair:
    """A model and an expert that run on the same inputs; fields are arguments of `measure`."""

    model: nn.Module
    expert: nn.Module
    family: Family
    stages: Sequence[Sequence[str]]
    settings: FeatCalSettings
    positions: str
    projection: Projection | None

    def compare(self, inputs: Any, items: int) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
        """Run both models on a batch; what `Measures` has of it, on the CPU.

        Of a language model, final features are the hidden states that its head reads, at the
        positions that predict a target (without labels: at the last position). Of other models
        they are the pooled output.
        """
        outputs: dict[str, Tensor] = {}
        crossed: dict[str, Tensor] = {}
        drift: dict[str, Tensor] = {}

        def keep(block: str, output: Tensor) -> None:
            outputs[block] = output.clone()

        def cross(block: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            """Run the model's block on what the expert's receives."""
            module = self.model.get_submodule(block)
            copies = {name: _copy(value) for name, value in kwargs.items()}
            crossed[block] = hidden_output(module(*map(_copy, args), **copies))

        def split(block: str, output: Tensor) -> None:
            counted, sides = rows[block], (outputs.pop(block), output, crossed.pop(block))
            if output.ndim == 4 and gives_images(self.model.get_submodule(block)):
                sides = tuple(side.movedim(1, -1) for side in sides)
            columns = split_drift(*(rows_of(side, counted) for side in sides))
            drift[block] = item_means(columns, items, counted).cpu()

        finals = [self._final(self.model, inputs, after=keep)]
        rows = self._rows(inputs, outputs)
        finals.append(self._final(self.expert, inputs, before=cross, after=split))
        read = self._read(inputs) if head_of(self.model) is not None else None
        mine, expert = (
            rows_of(side if self.projection is None else self.projection(side), read)
            for side in finals
        )
        cosines = cosine_similarity(mine.double(), expert.double(), dim=1)[:, None]
        means = [item_means(part, items, read).cpu() for part in (cosines, mine, expert)]
        features = [normalize(mean, dim=1).float() for mean in means[1:]]
        return drift, means[0].flatten(), features[0], features[1]

    def _final(self, model: nn.Module, inputs: Any, **hooks: Callable[..., None]) -> Tensor:
        """Return a model's final features, with hooks on its blocks."""
        has_head = head_of(model) is not None
        body = model if has_head else getattr(model, "base_model", model)
        blocks = [block for stage in self.stages for block in stage]
        with _hooked(model, blocks, **hooks):
            features = final_features(body, inputs)
        return features if has_head else features.flatten(1)

    def _rows(self, inputs: Any, outputs: Mapping[str, Tensor]) -> dict[str, CountedRows | None]:
        """Return the positions that count at each block's output; None: all."""
        reads = self.positions == "read"
        settings = self.settings.replace(decoder_rows="auto") if reads else self.settings
        rows: dict[str, CountedRows | None] = {}
        for index, stage in enumerate(self.stages):
            mask = self.family.row_weights(inputs, index, rows_named(settings, inputs))
            counted = None if mask is None else CountedRows.of_mask(mask)
            if reads and index == len(self.stages) - 1:
                closing = self.family.closing_rows(self.model, outputs[stage[-1]])
                is_known = closing is not None
                counted = CountedRows.of_weights(closing) if is_known else self._read(inputs)
            rows |= dict.fromkeys(stage, counted)
        return rows

    def _read(self, inputs: Any) -> CountedRows | None:
        """Return the positions whose final features a head reads; None: all."""
        settings = self.settings.replace(decoder_rows="auto")
        return final_rows(self.model, self.family, settings, inputs)


@contextmanager
def _hooked(
    model: nn.Module,
    blocks: Iterable[str],
    before: Callable[..., None] = lambda *_: None,
    after: Callable[..., None] = lambda *_: None,
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
    """Return a block's argument for another run; none for a cache, which would remember both."""
    if isinstance(value, Tensor):
        return value.clone()
    return None if isinstance(value, Cache) else value


def task_vectors(
    model: nn.Module, base: ExpertModel, expert: ExpertModel
) -> tuple[float, float, float]:
    """Return the norms and the product of `theta - theta_0` and `theta_i - theta_0`, without heads.

    Args:
        model: The model.
        base: The base.
        expert: The expert.
    """
    sums = torch.zeros(3, dtype=torch.float64)
    for name, parameter in model.named_parameters():
        if name not in expert.keys or name not in base.keys:
            continue  # a head, of which each model may have its own
        start = base.tensor(name).double()
        mine, theirs = parameter.detach().double() - start, expert.tensor(name).double() - start
        pairs = ((mine, mine), (theirs, theirs), (mine, theirs))
        sums += torch.stack([(a * b).sum().cpu() for a, b in pairs])
    square, expert_square, product = sums.tolist()
    return square**0.5, expert_square**0.5, product
