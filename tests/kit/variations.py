"""Variations of a calibration: other forms of the same models and samples."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from tiny_models import NO_TARGET, Suite
from torch import Tensor

PADDING = {"input_ids": 17, "attention_mask": 0, "labels": NO_TARGET}
Batch = Any


def cut(batch: Batch, samples: slice) -> Batch:
    """Some samples of a batch."""
    if isinstance(batch, Mapping):
        return {name: value[samples] for name, value in batch.items()}
    return batch[samples]


def size_of(batch: Batch) -> int:
    return len(next(iter(batch.values())) if isinstance(batch, Mapping) else batch)


def changed(suite: Suite, change: Callable[[list[Batch]], list[Batch]]) -> Suite:
    """The suite with other batches of every task."""
    return replace(suite, inputs={task: change(batches) for task, batches in suite.inputs.items()})


def backwards(suite: Suite) -> Suite:
    """Tasks in the other order."""
    experts, inputs = (dict(reversed(d.items())) for d in (suite.experts, suite.inputs))
    return replace(suite, experts=experts, inputs=inputs)


def alone(suite: Suite) -> Suite:
    """Every sample as a separate batch."""
    return changed(
        suite, lambda bs: [cut(b, slice(i, i + 1)) for b in bs for i in range(size_of(b))]
    )


def longer(suite: Suite) -> Suite:
    """Three more positions of padding, and arbitrary tokens at all that is padding."""

    def one(batch: Batch) -> Batch:
        ids = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 17)
        return {
            name: torch.cat([value, torch.full((len(value), 3), PADDING[name])], 1)
            for name, value in {**batch, "input_ids": ids}.items()
        }

    return changed(suite, lambda batches: [one(batch) for batch in batches])


def wrap(suite: Suite) -> None:
    """Set each model's forward on the instance, as FusionBench's loaders of classifiers do."""
    for model in models_of(suite):
        model.forward = (lambda plain: lambda *args, **named: plain(*args, **named))(model.forward)


def models_of(suite: Suite) -> list[Any]:
    return [suite.merged, suite.base, *suite.experts.values()]


def tensors_of(suite: Suite) -> list[Tensor]:
    """All tensors of a suite's models and inputs."""
    tensors = [tensor for model in models_of(suite) for tensor in model.state_dict().values()]
    for batches in suite.inputs.values():
        for batch in batches:
            tensors += batch.values() if isinstance(batch, Mapping) else [batch]
    return tensors
