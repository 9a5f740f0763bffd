"""A calibration of one batch without weights: the engine's own steps on the meta device."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fusion_bench_featcal.core.kfold import GRID
from fusion_bench_featcal.engine.activations import tensor_bytes
from fusion_bench_featcal.engine.block import Names
from fusion_bench_featcal.engine.fold_rows import FOLDS
from fusion_bench_featcal.engine.mixtures import find_mixtures
from fusion_bench_featcal.engine.modules import find_all_modules
from fusion_bench_featcal.engine.plus_rule import PlusRule, TurnRows, rule_of
from fusion_bench_featcal.engine.problem import Problem
from fusion_bench_featcal.engine.rules import Rule
from fusion_bench_featcal.engine.samples import Batch
from fusion_bench_featcal.engine.sensitivity import sensitivities
from fusion_bench_featcal.engine.task_sums import TaskSums
from fusion_bench_featcal.engine.team import Alone
from fusion_bench_featcal.experts.reading import stage_place
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.plan.metering import metered
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings

LENGTH = 512
"""Tokens of a text of unknown length."""


@dataclass(frozen=True)
class Group:
    """Linear modules that share an input, and so a Gram matrix."""

    names: Names
    width: int  # features of the input
    outputs: tuple[int, ...]  # features of each module's output
    summed: int  # bytes of one task's sums
    has_cross: bool  # whether there is a cross moment among them
    turn: int | None = None  # in which its sums are kept; None: one task's sums, then the block's
    factors: int = 1  # number of factorisations of its system


@dataclass(frozen=True)
class Place:
    """One batch at a block, or on its way to a stage's first block; sizes in bytes."""

    name: str
    needed: Sequence[str]  # the expert's tensors that are read for it
    flops: Mapping[str, int]  # by steps of `estimate.Plan.stages`
    peak: int  # most that is alive while the batch passes
    carried: int  # features that the batch keeps meanwhile
    calibrated: int = 0  # number of calibrated values
    parameters: int = 0  # size of the block's parameters
    groups: tuple[Group, ...] = ()
    later: Mapping[str, Sequence[str]] = field(default_factory=dict)  # tensors that are read again


@dataclass(frozen=True)
class DryRun:
    """A calibration's work on one batch of one task."""

    family: str
    samples: int  # in the batch
    stages: tuple[tuple[Place, ...], ...]  # each: the way to its first block, then its blocks
    tied: Mapping[str, str]  # name of every tensor -> the first name of the same tensor
    sizes: Mapping[str, int]  # bytes by first name
    dtype: torch.dtype

    @property
    def places(self) -> list[Place]:
        """All places in order."""
        return list(chain.from_iterable(self.stages))

    @property
    def blocks(self) -> list[Place]:
        """All blocks in forward order."""
        return [block for _, *blocks in self.stages for block in blocks]


def dry_run(model: nn.Module, inputs: Any, settings: FeatCalSettings, tasks: int) -> DryRun:
    """Calibrate a model without weights with one batch.

    Args:
        model: Structure of the merged model, on the meta device.
        inputs: One batch of inputs on the meta device, without masks.
        settings: Settings of the calibration.
        tasks: Number of tasks.

    Raises:
        CalibrationError: If the model cannot be calibrated.
        ValueError: If no family fits it.
    """
    family = resolve_family(settings.family, model)
    model = family.view.shown(model)
    stages = family.stages(model)
    problem = Problem(
        model=model,
        base=None,
        experts={},
        tasks=tuple(map(str, range(tasks))),
        family=family,
        settings=settings,
        stages=stages,
        modules=find_all_modules(model, stages, settings, routed=settings.is_paper),
        autocast=nullcontext,
    )
    if any(find_mixtures(model, block) for block in problem.modules):
        raise CalibrationError(
            f"{type(model).__name__} is a mixture of experts: without weights nothing tells how "
            "many positions reach an expert, so that time and memory cannot be planned"
        )
    rule = rule_of(problem, Alone())
    if isinstance(rule, PlusRule):
        rule.adopt({"": defaultdict(lambda: 1.0)})
    first = next(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
    batch = Batch(inputs if len(stages) > 1 else None, len(first))
    places = tuple(_stage(problem, rule, index, inputs, batch) for index in range(len(stages)))
    tensors = model.state_dict(keep_vars=True)
    names = {id(tensor): name for name, tensor in reversed(tensors.items())}
    return DryRun(
        family=family.name,
        samples=batch.samples,
        stages=places,
        tied={name: names[id(tensor)] for name, tensor in tensors.items()},
        sizes={name: tensors[name].nbytes for name in names.values()},
        dtype=next(model.parameters()).dtype,
    )


def _stage(
    problem: Problem, rule: Rule, index: int, inputs: Any, batch: Batch
) -> tuple[Place, ...]:
    """Take a batch through a stage; blocks that do the same are run once."""
    ends = (batch.cal, batch.exp) if problem.family.hands_on else (None, None)
    with metered("stem") as meter:
        batch.cal = problem.begin(problem.model, index, inputs, ends[0])
        if rule.runs_experts:
            batch.exp = problem.begin(problem.model, index, inputs, ends[1])
        if isinstance(rule, PlusRule) and rule.weighs(index):
            names = [site.name for modules in problem.modules.values() for site in modules.sites]
            firsts = [stage[0] for stage in problem.stages]
            generators = [torch.Generator()] * batch.samples
            sensitivities(problem.model, inputs, names, firsts, None, generators)
    needed = rule.tensors_before(index)
    places = [Place(stage_place(index), needed, meter.flops, meter.peak, _carried(batch))]
    known: dict[Any, Place] = {}
    for block in problem.stages[index]:
        kind = _kind(problem, block)
        if kind not in known:
            known[kind] = _block(problem, rule, block, batch)
        visits = rule.visits(block)
        place = replace(known[kind], name=block, needed=visits.pop(block), later=visits)
        if block == problem.stages[-1][-1] and not problem.settings.log_drift:
            place = replace(place, flops={**place.flops, "update": 0})  # nothing follows it
        places.append(place)
        if len(places) == 2 or problem.family.whole_model:  # a stage's first block may do more
            known.clear()
    return tuple(places)


def _kind(problem: Problem, block: str) -> Any:
    """Key of blocks that do the same."""
    parameters = problem.model.get_submodule(block).named_parameters()
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in parameters)
    sites = tuple(site.name.removeprefix(block) for site in problem.modules[block].sites)
    return shapes, sites


def _block(problem: Problem, rule: Rule, block: str, batch: Batch) -> Place:
    """Take a batch through a block as `BlockLoop` does, and on to the next one."""
    model, modules = problem.model, problem.modules[block]
    get, groups, peak, carried = model.get_parameter, list[Group](), 0, 0
    with metered("search") as meter:
        for number, turn in enumerate(rule.turns(block, {"": [batch]})):
            rule.block_sums(turn)
            sums = rule.task_sums("", turn, model)
            meter.step = "passes"
            cal, exp = rule.record(turn, model, batch)
            peak, carried = peak or meter.peak, max(carried, _carried(batch))
            meter.step = "moments"
            sums.add(model, cal, exp, None)
            groups += _groups(problem, turn.block, number, sums)
            meter.step = "search"
        meter.step = "update"
        _, batch.cal = rule.advance(block, batch)
    batch.exp_hidden = None
    return Place(
        name=block,
        needed=(),
        flops=meter.flops,
        peak=peak,
        carried=carried,
        calibrated=sum(get(name).numel() for site in modules.sites for name in site.names),
        parameters=sum(p.nbytes for p in model.get_submodule(block).parameters()),
        groups=tuple(groups),
    )


def _groups(problem: Problem, block: str, turn: int, sums: Any) -> Iterator[Group]:
    """The groups of modules of which there are sums of one task."""
    get = problem.model.get_parameter
    sites = {site.name: site for site in problem.modules[block].sites}

    def outputs(names: Names) -> tuple[int, ...]:
        return tuple(len(sites[n].oriented(get(sites[n].weight_name))) for n in names)

    if isinstance(sums, TaskSums):
        for names, linear in sums.linear.items():
            summed = sum(tensor.nbytes for tensor in linear.tensors())
            has_cross = linear.cross is not None
            yield Group(names, len(linear.gram), outputs(names), summed, has_cross)
    elif isinstance(sums, TurnRows):
        for rows in sums.by_group.values():
            rows.flush()
            into = rows.sums
            names = tuple(site.name for site in into.group.sites)
            summed = sum(tensor.nbytes for tensor in into.tensors())
            factors = len(GRID) * FOLDS + problem.settings.stages if into.kfold else 1
            width = into.weight.shape[1]
            yield Group(names, width, outputs(names), summed, rows.has_cross, turn, factors)


def _carried(batch: Batch) -> int:
    return tensor_bytes((batch.inputs, batch.cal, batch.exp, batch.exp_hidden, dict(batch.marks)))


def example_inputs(model: nn.Module, samples: int, length: int, target_length: int) -> Any:
    """A batch of a model's inputs on the meta device.

    Args:
        model: The model.
        samples: Number of samples.
        length: Tokens of a text; pixels of an image's side where the model's config names none.
        target_length: Tokens of an encoder-decoder's target.

    Raises:
        ValueError: If the model has no config.
    """
    config: Any = getattr(model, "config", None)
    if config is None:
        raise ValueError(
            f"{type(model).__name__} has no config that tells its inputs; featcal plan knows the "
            "models of transformers"
        )
    if takes_images(model):
        side = getattr(config, "image_size", length)
        channels = getattr(config, "num_channels", 3)
        return {"pixel_values": torch.empty(samples, channels, side, side, device="meta")}
    ids = torch.empty(samples, length, dtype=torch.long, device="meta")
    if getattr(model, "main_input_name", "") == "input_features":  # Whisper's convolutions halve
        frames = 2 * config.max_source_positions
        sounds = torch.empty(samples, config.num_mel_bins, frames, device="meta")
        return {"input_features": sounds, "labels": ids.new_empty(samples, target_length)}
    if getattr(config, "is_encoder_decoder", False):
        return {"input_ids": ids, "labels": ids.new_empty(samples, target_length)}
    return {"input_ids": ids}


def takes_images(model: nn.Module) -> bool:
    """Tell whether a model's inputs are images."""
    images = getattr(model, "main_input_name", None) == "pixel_values"
    return images or hasattr(getattr(model, "config", None), "image_size")


def needs_length(model: nn.Module) -> bool:
    """Tell whether the size of a model's inputs does not follow from its config."""
    if takes_images(model):
        return not hasattr(getattr(model, "config", None), "image_size")
    return getattr(model, "main_input_name", None) == "input_ids"


def length_for(model: nn.Module, given: int | None, max_length: int | None = None) -> int:
    """Size of a model's inputs for `example_inputs`: as given, else `max_length`, else 512.

    Raises:
        ValueError: If the model takes images, and neither its config nor `given` tells their size.
    """
    if given is None and takes_images(model) and needs_length(model):
        raise ValueError(
            f"the config of {type(model).__name__} names no image size: give the side of an image "
            "in pixels by --length, such as --length 224"
        )
    return given or max_length or LENGTH


def without_masks(inputs: Any) -> Any:
    """A batch on the meta device without masks, whose values models look at."""
    if isinstance(inputs, Mapping):
        inputs = {k: value for k, value in inputs.items() if not k.endswith("attention_mask")}
    return tree_map_only(Tensor, lambda tensor: tensor.to("meta"), inputs)
