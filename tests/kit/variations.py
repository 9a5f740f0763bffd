"""Variations of a calibration: other forms of the same models, samples and settings."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_models import NO_TARGET, Suite
from torch import Tensor, nn

from fusion_bench_featcal import SafetensorsExpert

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


def stored(model: nn.Module, folder: Path) -> SafetensorsExpert:
    """A model's weights in two shards with an index, tied ones once, as transformers has them."""
    folder.mkdir(parents=True)
    state = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(state.items())}
    tensors = {name: state[name].detach().clone().contiguous() for name in first.values()}
    names = sorted(tensors)
    index = {}
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, folder / f"{number}.safetensors")
        index |= dict.fromkeys(part, f"{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return SafetensorsExpert(folder)


def wrapped(model: Any) -> Any:
    """Wrap a model's forward as FusionBench's loaders of classifiers do."""
    original_forward = model.forward
    model.forward = lambda *args, **kwargs: original_forward(*args, **kwargs)
    model.original_forward = original_forward
    return model


def all_wrapped(suite: Suite) -> Suite:
    """Models whose forward was set on the instance."""
    experts = {task: wrapped(expert) for task, expert in suite.experts.items()}
    return replace(suite, merged=wrapped(suite.merged), base=wrapped(suite.base), experts=experts)


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


def parted(suite: Suite, number: int) -> tuple[Suite, Suite]:
    """The suite without the last samples of each task, and with these alone."""

    def part(batches: list[Batch], *, last: bool) -> list[Batch]:
        first, chosen = sum(map(size_of, batches)) - number, []
        for batch in batches:
            count = min(first, size_of(batch))
            first -= count
            chosen.append(cut(batch, slice(count, None) if last else slice(count)))
        return [batch for batch in chosen if size_of(batch)]

    first, last = (changed(suite, partial(part, last=side)) for side in (False, True))
    return first, last


def tensors_of(suite: Suite) -> list[Tensor]:
    """All tensors of a suite's models and inputs."""
    models = (suite.merged, suite.base, *suite.experts.values())
    tensors = [tensor for model in models for tensor in model.state_dict().values()]
    for batches in suite.inputs.values():
        for batch in batches:
            tensors += batch.values() if isinstance(batch, Mapping) else [batch]
    return tensors
