"""Least-squares solutions for layers outside the blocks, from one pass of every expert."""

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.core.float32_products import exact_products
from fusion_bench_featcal.experts import ExpertModel
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.families.base import call_model
from fusion_bench_featcal.modules.groups import Group, find_groups
from fusion_bench_featcal.modules.hooks import Recorded, record
from fusion_bench_featcal.modules.models import device_of, head_of
from fusion_bench_featcal.modules.sites import site_of
from fusion_bench_featcal.rules.rule import Rule
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings
from fusion_bench_featcal.streams.batch import Batch
from fusion_bench_featcal.streams.inputs import to_device
from fusion_bench_featcal.streams.samples import take
from fusion_bench_featcal.streams.task_rows import empty_rows, empty_sums


def load_outside(
    model: nn.Module,
    base: nn.Module,
    experts: Mapping[str, ExpertModel],
    batches: Mapping[str, Iterable[Any]],
    settings: FeatCalSettings,
    rule: Rule,
) -> None:
    """Solve the model's linear layers, convolutions and LayerNorms outside the blocks.

    Their inputs are recorded in a whole pass of each expert over its samples. Everything else
    outside the blocks (biases, shifts, embeddings) does not change.

    Args:
        model: The model, which receives the solutions.
        base: The base model.
        experts: The experts by task.
        batches: Each task's model inputs.
        settings: `samples_per_task` and `family` are used.
        rule: Creates the sums of a layer.

    Raises:
        CalibrationError: If the model is a language model.
    """
    if head_of(model) is not None:
        raise CalibrationError(
            "method.outside=true solves the layers around an image model's blocks; a language "
            "model's embedding and head are no such layers. Set method.outside=false"
        )
    device, dtype = device_of(model), rule.dtype(len(experts), device_of(model))
    samples = {task: take(task, batches[task], settings, model) for task in experts}
    groups = _groups_outside(model, settings, next(iter(samples.values()))[0])

    def start(name: str) -> Tensor:
        return base.get_parameter(name).to(device)

    sums = {group: empty_sums(group, model, start, rule, dtype) for group in groups}
    for task, expert in experts.items():
        with expert.loaded(model.state_dict()) as module, exact_products():
            rows = {group: empty_rows(group, module, module, rule, dtype) for group in groups}
            for batch in samples[task]:
                recorded = _recorded(module, [group.name for group in groups], batch)
                for group, task_rows in rows.items():
                    task_rows.add(batch, recorded.inputs[group.name])
            for group, task_rows in rows.items():
                sums[group].add(task, task_rows.finished(), task_rows.expert)
    for group, group_sums in sums.items():
        for name, value in group.updates(group_sums.solve().linear, biases=False).items():
            model.get_parameter(name).data.copy_(value)


def _groups_outside(model: nn.Module, settings: FeatCalSettings, first: Batch) -> list[Group]:
    """Return the layers outside the blocks that run and share their weight with no other layer."""
    family = resolve_family(settings.family, model)
    stages = family.stages(family.view.arranged(model))
    blocks = tuple(f"{block}." for stage in stages for block in stage)
    counts = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    sites = [
        site
        for name, module in model.named_modules()
        if not f"{name}.".startswith(blocks)
        and isinstance(module, nn.Linear | nn.Conv2d | nn.LayerNorm)
        and counts[id(module.weight)] == 1
        and (site := site_of(name, module)) is not None
    ]
    model.eval()
    recorded = _recorded(model, [site.name for site in sites], first)
    sites = [site for site in sites if site.name in recorded.inputs]
    return find_groups(model, "outside the blocks", sites, recorded, lambda _: None)


def _recorded(model: nn.Module, names: list[str], batch: Batch) -> Recorded:
    """Run a model on a batch and record the inputs of some modules."""
    return record(
        model, names, partial(call_model, model, to_device(batch.inputs, device_of(model)))
    )
