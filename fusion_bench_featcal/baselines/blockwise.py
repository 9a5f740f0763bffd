"""Merging block by block in closed form: the loop that RegMean, RegMean++ and LOT share.

It is FeatCal's loop with other choices: whose features are summed, what is done to the sums, and
which weight anchors them. Hooks, sums, families and expert weights are FeatCal's own.
"""

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fusion_bench_featcal.baselines.least_squares import GainMean, LinearMean, shrink_off_diagonal
from fusion_bench_featcal.core import frobenius_norm
from fusion_bench_featcal.core.float32_products import exact_products
from fusion_bench_featcal.core.moments import moment_dtype, weight_of_norm
from fusion_bench_featcal.core.products import mirror_lower
from fusion_bench_featcal.engine.block import load_updates
from fusion_bench_featcal.engine.modules import BlockModules, Site, find_all_modules
from fusion_bench_featcal.engine.recording import Recorder
from fusion_bench_featcal.engine.run import Autocast, Modes, device_of, leading_to, needed_by
from fusion_bench_featcal.engine.samples import (
    Batch,
    check_inputs,
    naming_task,
    take_samples,
    to_device,
)
from fusion_bench_featcal.engine.task_sums import TaskSums
from fusion_bench_featcal.experts import ExpertModel, ExpertSource, names_under, source_of
from fusion_bench_featcal.experts.model_config import check_same_function, config_of
from fusion_bench_featcal.families import Family, resolve_family
from fusion_bench_featcal.families.views import view_of
from fusion_bench_featcal.progress import progress_bar
from fusion_bench_featcal.settings import FeatCalSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Choices that tell one closed-form merger from another.

    Attributes:
        stream: Whose hidden features each expert's block receives: those of the `expert` itself,
            or those of the `merged` blocks before it.
        anchor: The weight that input directions without energy keep: the experts' `mean`, or the
            `base`.
        off_diagonal: Factor of each gram's entries off the diagonal, 0 to 1.
        task_weights: `equal`, or `unit_gram`: each gram has Frobenius norm 1 (FeatCal's, Eq. 14).
        weighs_gains: Whether a LayerNorm's gain is weighted by each channel's energy; else it is
            the experts' mean, as biases, shifts and everything outside the blocks always are.
    """

    stream: Literal["expert", "merged"]
    anchor: Literal["mean", "base"]
    off_diagonal: float = 1.0
    task_weights: Literal["equal", "unit_gram"] = "equal"
    weighs_gains: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.off_diagonal <= 1:
            raise ValueError(f"method.off_diagonal must be in [0, 1], got {self.off_diagonal!r}")
        if self.task_weights not in ("equal", "unit_gram"):
            raise ValueError(
                f"method.task_weights must be equal or unit_gram, got {self.task_weights!r}"
            )


@dataclass
class _Merging:
    """Everything a merging works with; `model` is the one thing it changes."""

    model: nn.Module
    base: nn.Module
    experts: dict[str, ExpertModel]
    family: Family
    rule: Rule
    settings: FeatCalSettings
    autocast: Autocast
    modules: dict[str, BlockModules]
    recorder: Recorder = field(default_factory=Recorder)


@torch.inference_mode(False)  # hooks tell tensors apart by version, which inference mode lacks
@torch.no_grad()
def merge_blockwise(
    base: nn.Module,
    experts: Mapping[str, nn.Module | ExpertSource],
    batches: Mapping[str, Iterable[Any]],
    settings: FeatCalSettings,
    rule: Rule,
    *,
    device: torch.device | str | None = None,
    autocast: Autocast | None = None,
    progress: bool = True,
) -> nn.Module:
    """Merge experts block by block in forward order.

    Args:
        base: The base model, which gives structure, dtype and device. It is not changed.
        experts: Each task's expert: a module, or a source of its weights.
        batches: Each task's unlabeled model inputs, as `calibrate` takes them.
        settings: `samples_per_task`, `modules`, `family` and, for `unit_gram`, `eps` are used.
        rule: The method.
        device: Where to compute; None: where the base is.
        autocast: Makes the context for forward passes; statistics are never inside it.
        progress: Whether to show a progress bar.

    Returns:
        The merged model.

    Raises:
        CalibrationError: If the run cannot go on; the message names the place and the setting.
        ValueError: If the family is unknown.
    """
    settings = settings.replace(calibrate_norm=rule.weighs_gains, anchor_rho=1.0)
    check_inputs(base, experts, batches, settings)
    family = resolve_family(settings.family, base)
    for task, expert in experts.items():
        check_same_function(task, config_of(expert), config_of(base), settings.ignore_config)
    view, home = view_of(family), device_of(base)
    base = view.shown(base)
    stages = family.stages(base)
    model = copy.deepcopy(base).to(device or home).eval().requires_grad_(False)
    run = _Merging(
        model=model,
        base=base,
        experts={
            task: ExpertModel(task, view.source(source_of(expert)), model)
            for task, expert in experts.items()
        },
        family=family,
        rule=rule,
        settings=settings,
        autocast=autocast or nullcontext,
        modules=find_all_modules(base, stages, settings),
    )
    _load_means(model, list(run.experts.values()))
    tasks = {task: take_samples(task, batches[task], settings, base) for task in experts}
    bar = progress_bar(total=len(run.modules), unit="block", show=progress)
    with torch.autocast(device_of(model).type, enabled=False), bar:
        for index, stage in enumerate(stages):
            tasks = streams = _begin_stage(run, stages, index, tasks)
            for block in stage:
                bar.set_description(f"merging {block}")
                _merge_block(run, block, streams)
                bar.update()
    Modes.of(base).restore(model)
    return view.restored(model).to(home)


def _load_means(model: nn.Module, experts: Sequence[ExpertModel]) -> None:
    """Give every floating tensor the experts' mean; one of each is in memory at a time."""
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            wide = moment_dtype(tensor.dtype)
            total = sum((expert.tensor(name).to(wide) for expert in experts), start=0)
            tensor.copy_(total / len(experts))


def _begin_stage(
    run: _Merging, stages: list[list[str]], index: int, tasks: Mapping[str, Iterable[Batch]]
) -> dict[str, list[Batch]]:
    """Run every task's samples up to a stage's first block, in the model that feeds it."""
    stem = leading_to(run.model, run.family, stages, index)
    device = device_of(run.model)
    streams: dict[str, list[Batch]] = {}
    for task, batches in tasks.items():
        streams[task] = []
        own = run.rule.stream == "expert"
        with run.experts[task].loaded(stem) if own else nullcontext(run.model) as feeder:
            for batch in batches:
                inputs = to_device(batch.inputs, device)
                begun = Batch(batch.inputs if len(stages) > 1 else None, batch.samples)
                with naming_task(task):
                    begun.find_rows(run.family, inputs, index, run.settings.decoder_rows)
                    with run.autocast():
                        begun.cal = run.family.begin(feeder, inputs, stages[index][0])
                streams[task].append(begun)
    return streams


def _merge_block(run: _Merging, block: str, streams: Mapping[str, list[Batch]]) -> None:
    """Sum over every expert's block, solve, load, and feed what the next block receives."""
    sites = {site.name: site for site in run.modules[block].sites}
    anchors = {s.name: s.oriented(_anchor(run, s)) for s in sites.values()}
    floor = 1 - run.rule.off_diagonal
    linear = {
        n: LinearMean(anchors[n], floor=floor) for n, s in sites.items() if s.kind == "linear"
    }
    gains = {n: GainMean(anchors[n]) for n, s in sites.items() if s.kind == "norm"}
    for task, batches in streams.items():
        with _candidate(run, task, block) as candidate:
            sums = _collect(run, candidate, task, block, batches)
            for names, linear_sums in sums.linear.items():
                mean_gram = linear_sums.means().gram
                mirror_lower(mean_gram)
                gram = _gram(run, mean_gram)
                for name in names:
                    weight = candidate.get_parameter(sites[name].weight_name)
                    linear[name].add(gram, sites[name].oriented(weight))
            for name, norm in sums.norm.items():
                gain = candidate.get_parameter(sites[name].weight_name)
                gains[name].add(norm.sum_z_sq / norm.weight, gain)
    updates: dict[str, Tensor] = {}
    for name, mean in linear.items():
        weight, seen = mean.solve()
        log.debug("%s: %d of %d input directions were seen", name, seen, weight.shape[1])
        updates[sites[name].weight_name] = sites[name].oriented(weight)
    updates |= {sites[name].weight_name: mean.solve() for name, mean in gains.items()}
    load_updates(run.model, block, updates)
    if run.rule.stream == "merged":
        for batch in (batch for batches in streams.values() for batch in batches):
            with run.autocast():
                _, batch.cal = run.family.step(run.model, block, batch.cal)


def _collect(
    run: _Merging, candidate: nn.Module, task: str, block: str, batches: list[Batch]
) -> TaskSums:
    """One task's sums over the inputs of its expert's modules."""
    sums = TaskSums(block, task, run.modules[block].sites, demo_weights=False)
    for batch in batches:

        def step(call: Any = batch.cal) -> Any:
            with run.autocast():
                return run.family.step(candidate, block, call)

        names = [site.name for site in sums.sites]
        (_, following), inputs = run.recorder.record(candidate, names, step)
        with exact_products():
            sums.add(candidate, inputs, None, batch.valid, batch.other)
        if run.rule.stream == "expert":
            batch.cal = following
    sums.check()
    return sums


def _anchor(run: _Merging, site: Site) -> Tensor:
    """The parameter that unseen directions keep; before a block is solved, the model has means."""
    source = run.model if run.rule.anchor == "mean" else run.base
    parameter = source.get_parameter(site.weight_name).detach()
    return parameter.to(device_of(run.model))


def _gram(run: _Merging, mean_gram: Tensor) -> Tensor:
    """The mean gram, shrunk and weighted by the method's rule."""
    gram = shrink_off_diagonal(mean_gram, run.rule.off_diagonal)
    if run.rule.task_weights == "equal":
        return gram
    return gram * weight_of_norm(frobenius_norm(mean_gram), run.settings.eps)


def _candidate(run: _Merging, task: str, block: str) -> AbstractContextManager[nn.Module]:
    """The model whose block runs: the expert, or the merged model with the expert's block."""
    if run.rule.stream == "merged":
        inside = names_under(run.model.state_dict(), [block])
        return _grafted(run.model, run.experts[task], inside)
    return run.experts[task].loaded(needed_by(run.model, run.family, block))


@contextmanager
def _grafted(model: nn.Module, expert: ExpertModel, names: list[str]) -> Iterator[nn.Module]:
    """The model with some of an expert's tensors in place of its own, which come back after."""
    tensors = model.state_dict()
    own = {name: tensors[name].clone() for name in names}
    try:
        for name in names:
            tensors[name].copy_(expert.tensor(name))
        yield model
    finally:
        for name, tensor in own.items():
            tensors[name].copy_(tensor)
