"""The stages that samples with images or sounds run in a model with several towers."""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.errors.place import error_context
from fusion_bench_featcal.families.base import (
    Call,
    ForwardStopped,
    call_model,
    evaluating,
    stoppable,
)
from fusion_bench_featcal.families.lists import find_stages, head_of, other_towers
from fusion_bench_featcal.families.skipping import as_skipped_output, skipping
from fusion_bench_featcal.families.stack import STACK, Stack
from fusion_bench_featcal.families.towers import Towers
from fusion_bench_featcal.modules.models import device_of
from fusion_bench_featcal.modules.sites import is_linear
from fusion_bench_featcal.run.inputs import Runtime
from fusion_bench_featcal.streams.batch import Batch
from fusion_bench_featcal.streams.inputs import media_in, part_of, to_device


def towers_of(model: nn.Module, samples: Mapping[str, Sequence[Batch]], runtime: Runtime) -> Stack:
    """Return the family of a model with several towers for the samples of all processes.

    One sample of each kind of inputs, by their names, shows the stages that it runs.

    Args:
        model: The model, with weights.
        samples: The batches of each task of this process.
        runtime: Where it runs.
    """
    every = ((task, batch) for task, batches in samples.items() for batch in reversed(batches))
    kinds = {(task, *sorted(names)): b for task, b in every if (names := media_in(b.inputs))}
    lists, orders = _lists(model), dict[Any, list[list[str]]]()
    for (task, *names), batch in kinds.items():
        inputs = to_device(part_of(batch.inputs, batch.samples, slice(1)), device_of(model))
        with error_context(task=task), runtime.autocast():
            orders[task, *names] = stages_in_order(model, lists, inputs)
    everywhere = runtime.processes.gather_dict(orders)
    stages = list[list[str]]()
    for kind in sorted(everywhere):
        stages += [stage for stage in everywhere[kind] if stage not in stages]
    return Towers([*stages, lists[-1]]) if stages else STACK


def _lists(model: nn.Module) -> list[list[str]]:
    """Return the blocks of towers, in parts that end where features are read, and the decoder's.

    The config says where: `vision_feature_layer` (LLaVA), `deepstack_visual_indexes` (Qwen3-VL).
    """
    names, config = {module: name for name, module in model.named_modules()}, model.config
    read: Any = getattr(config, "vision_feature_layer", None)
    deep = getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None)
    lists = list[list[str]]()
    for tower in other_towers(model):
        blocks = [names[block] for block in tower.children()]
        ends = {len(blocks)}
        if re.search("vis|image", names[tower]):
            layers = [read] if isinstance(read, int) else read or [-1]
            ends = {layer if layer >= 0 else len(blocks) + 1 + layer for layer in layers}
            ends |= {number + 1 for number in deep or ()}
        parts = (blocks[start:end] for start, end in pairwise([0, *sorted(ends)]))
        lists += [part for part in parts if part]
    return [*lists, *find_stages(model)]


@torch.no_grad()
def stages_in_order(
    model: nn.Module, lists: Sequence[Sequence[str]], inputs: Any
) -> list[list[str]]:
    """Return the stages before the decoder that a pass of the model runs, in order.

    These are lists of blocks, and linear modules after the first of them that change what the
    decoder receives.

    Args:
        model: The model, with weights.
        lists: Its blocks. The decoder's are the last ones.
        inputs: A sample of its inputs.
    """
    first, head = {blocks[0]: [*blocks] for blocks in lists[:-1]}, head_of(model)
    inside = tuple(f"{block}." for blocks in lists for block in blocks)
    linear = [
        name
        for name, module in model.named_modules()
        if is_linear(module) and not name.startswith(inside) and module is not head
    ]
    decoder, calls = lists[-1], list[str]()

    def received(hooks: Mapping[str, Callable[..., Any]]) -> list[Tensor]:
        """Return what the decoder's blocks receive in a pass with forward hooks, unchanged."""
        hidden = list[Tensor]()

        def skipped(name: str, call: Call) -> Tensor:
            hidden.append(call.hidden)
            if name == decoder[-1]:
                raise ForwardStopped
            return as_skipped_output(call.hidden, STACK.entries)

        handles = (model.get_submodule(n).register_forward_hook(h) for n, h in hooks.items())
        with evaluating(model), skipping(model, decoder, skipped), stoppable(*handles):
            call_model(model, inputs)
        return hidden

    whole = received({n: lambda *_, n=n: calls.append(n) for n in (*first, *linear)})
    stages = list[list[str]]()
    for name in calls:
        if name in first:
            stages.append(first[name])
        elif stages and calls.count(name) == 1:
            changed = received({name: lambda *call: -call[-1]})
            stages += [[name]] if not all(map(torch.equal, whole, changed)) else []
    return stages
