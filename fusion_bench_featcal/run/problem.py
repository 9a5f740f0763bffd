"""One calibration, opened and checked: models, modules and samples."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from fusion_bench_featcal.core.float32_products import convolving_as_multiplying
from fusion_bench_featcal.core.kernels import (
    agreed_kernel,
    choose_kernel,
    processor,
    using_kernel,
    with_kernel,
)
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.experts import ExpertModel, ExpertSource, hollow_copy, source_of
from fusion_bench_featcal.experts.budget import Grant, limit_reads
from fusion_bench_featcal.experts.model_config import check_same_function
from fusion_bench_featcal.experts.working_model import WorkingModel, offloaded
from fusion_bench_featcal.families import Family, resolve_family, stages_of
from fusion_bench_featcal.families.check import compare_with_model
from fusion_bench_featcal.families.open_clip import split
from fusion_bench_featcal.modules.models import (
    device_of,
    dtype_of_features,
    gives_images,
    names_in_order,
    refuse_not_finite,
    tail_of,
)
from fusion_bench_featcal.modules.sites import BlockModules, find_all_modules, left_out
from fusion_bench_featcal.rules import rule_of, value_of
from fusion_bench_featcal.rules.rule import Rule
from fusion_bench_featcal.run.checkpoint import Checkpoint
from fusion_bench_featcal.run.finished import FinishedBlocks
from fusion_bench_featcal.run.log import CalibrationLog
from fusion_bench_featcal.run.processes import Processes
from fusion_bench_featcal.run.progress import Progress
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.streams.batch import Batch
from fusion_bench_featcal.streams.drift import DriftLog
from fusion_bench_featcal.streams.inputs import part_of, to_device
from fusion_bench_featcal.streams.samples import longest_sample, naming_task, take
from fusion_bench_featcal.streams.storage import storage_for
from fusion_bench_featcal.streams.streams import Streams

logger = logging.getLogger(__name__)

BASE = "_pretrained_"
"""Name of the base model in FusionBench's pools."""

COMPARED_SAMPLES = 2
"""Number of samples on which a family is compared with the model's forward pass."""

Autocast = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Request:
    """Arguments of `calibrate`, documented there."""

    merged: nn.Module
    base: nn.Module | ExpertSource | None
    experts: Mapping[str, nn.Module | ExpertSource]
    batches: Mapping[str, Iterable[Any]]
    settings: FeatCalSettings
    device: torch.device
    merged_weights: ExpertSource | None = None
    autocast: Autocast = nullcontext
    progress: bool = True
    processes: Processes = field(default_factory=Processes)

    @property
    def runnable(self) -> nn.Module:
        """Return the merged model. If it is only a structure, tensors are loaded when needed."""
        if self.merged_weights is None:
            return self.merged
        weights = WorkingModel(self.merged, self.merged_weights, device=self.device)
        return offloaded(weights, self.device)


@dataclass(frozen=True)
class Problem:
    """One calibration. Only the parameters of `model` and the samples' features change.

    Attributes:
        tasks: All tasks, including those of other processes.
        merged: The merged model.
        working: The calibrated model, with one block at a time in memory.
        base: The base model, or None if it is not read.
        experts: The expert of each task of this process.
        grant: Tensors of the experts that may be read.
        modules: The modules of each block.
        rule: The rule that calibrates blocks.
        streams: The samples of this process.
        processes: The processes, each of which works on some tasks.
        output: Stores finished blocks.
        dtype: Least precise dtype of sums over rows.
        kernel: Library that multiplies float32 matrices on the CPU.
        log: Records of every block.
        progress: Shows the current work.
    """

    tasks: Sequence[str]
    merged: nn.Module
    working: WorkingModel
    base: ExpertModel | None
    experts: Mapping[str, ExpertModel]
    grant: Grant
    modules: Mapping[str, BlockModules]
    rule: Rule
    streams: Streams
    processes: Processes
    output: Checkpoint
    dtype: torch.dtype
    kernel: str
    log: CalibrationLog
    progress: Progress

    @property
    def model(self) -> nn.Module:
        """Return the calibrated model, with only some tensors in memory."""
        return self.working.module

    @property
    def models(self) -> dict[str, ExpertModel]:
        """Return base and experts by name."""
        return ({} if self.base is None else {BASE: self.base}) | dict(self.experts)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Context of all work on blocks: its precision, kernel and progress bar."""
        with (
            torch.autocast(self.working.device.type, enabled=False),
            convolving_as_multiplying(),
            using_kernel(self.kernel),
            self.progress.bar,
        ):
            yield


@dataclass(frozen=True)
class CalibrationResult:
    """A calibrated model and its history.

    Attributes:
        model: The calibrated model, with class, dtype and device of the merged one. With
            `merged_weights` only its structure.
        log: Records of every block.
        reads: Count of the bytes read (see docs/runs.md).
        weights: The calibrated weights in `checkpoint_dir`, which every read checks for damage, or
            None without a folder.
    """

    model: nn.Module
    log: CalibrationLog
    reads: dict[str, Any] = field(default_factory=dict)
    weights: FinishedBlocks | None = None


def open_problem(request: Request, output: Checkpoint) -> Problem:
    """Open models and samples of a calibration, and check them.

    Args:
        request: The arguments of `calibrate`.
        output: Stores finished blocks.
    """
    request = without_fused_attention(request)
    settings, processes, device = request.settings, request.processes, request.device
    rule, samples = rule_of(settings), {}
    for task in processes.share(request.experts):
        processes.doing = f"inputs · {task}"
        batches = request.batches[task]
        samples[task] = take(task, batches, settings, request.merged, holds_out=rule.holds_out)
    kernel = agreed_kernel(processes.gather(choose_kernel(device)))
    family = resolve_family(settings.family, request.merged)
    reads_first = compared(request, rule, family, samples)
    processes.doing = "the models"
    merged, stages = request.merged, stages_of(family, request.merged)
    modules = find_all_modules(merged, stages, settings, calibrate_norm=rule.calibrate_norm)
    if kinds := left_out(modules):
        logger.warning("modules that stay as merged: %s", ", ".join(kinds))
    with request.autocast():
        doubt = rule.doubt(dtype_of_features(merged, stages[0][0], device))
    if doubt:
        logger.warning(doubt)
    working = WorkingModel(merged, request.merged_weights, device=device)
    base, experts = _opened(request, rule, working, stages[-1][-1])
    order = names_in_order(working.module, stages, modules, runs_experts=rule.runs_experts)
    budget, tasks = settings.expert_read_budget, list(request.experts)
    images = any(gives_images(merged.get_submodule(block)) for block in modules)
    streams = Streams(
        samples,
        family,
        stages,
        working,
        experts,
        rule,
        autocast=with_kernel(kernel, request.autocast),
        decoder_rows=value_of(settings, "decoder_rows"),
        reads_first=reads_first,
        drift=DriftLog(channels_first=images) if rule.runs_experts else None,
        storage=storage_for(settings, device),
    )
    log = CalibrationLog(family=family.name)
    log.add("engine", {"linear_kernel": kernel, "processor": processor()})
    return Problem(
        tasks=tasks,
        merged=merged,
        working=working,
        base=base,
        experts=experts,
        grant=limit_reads(experts, budget, order, working.merged, tasks, processes.gather),
        modules=modules,
        rule=rule,
        streams=streams,
        processes=processes,
        output=output,
        dtype=rule.dtype(len(tasks), device),
        kernel=kernel,
        log=log,
        progress=Progress(processes, device, [*modules], len(samples), show=request.progress),
    )


def without_fused_attention(request: Request) -> Request:
    """Return a request in which the attention of open_clip's models is split.

    Raises:
        CalibrationError: If the attention cannot be split, or a model is in files.
    """
    merged = split(request.merged)
    if merged is request.merged:
        return request

    def parted(model: Any) -> Any:
        if model is None or isinstance(model, nn.Module):
            return None if model is None else split(model)
        raise CalibrationError("an open_clip model is calibrated in memory: load it from its file")

    parted(request.merged_weights)
    experts = {task: parted(expert) for task, expert in request.experts.items()}
    return replace(request, merged=merged, base=parted(request.base), experts=experts)


def compared(
    request: Request, rule: Rule, family: Family, samples: Mapping[str, list[Batch]]
) -> bool:
    """Compare a family with the model's forward pass on the longest sample and the one behind it.

    Returns:
        Whether only the first position of the last block's output is read and counts.
    """
    model, needs_first = request.runnable, rule.reads_closing_rows
    priority = _, task, number, sample = longest_sample(samples, family, model)
    batch = samples[task][number]
    few = part_of(batch.inputs, batch.samples, slice(sample, sample + COMPARED_SAMPLES))
    with naming_task(task), request.autocast():
        inputs = to_device(few, device_of(model))
        reads_first = compare_with_model(family, model, inputs, needs_first=needs_first)
    return request.processes.decided(priority, reads_first)


def _opened(
    request: Request, rule: Rule, working: WorkingModel, last_block: str
) -> tuple[ExpertModel | None, dict[str, ExpertModel]]:
    """Open the base and the experts of this process's tasks. Only names and shapes are read.

    Raises:
        CalibrationError: If a model's weights or config do not fit the merged model.
    """
    like = working.module
    spared, shared = set(tail_of(like, last_block)), hollow_copy(like, working.device)

    def opened(name: str, model: Any, role: str) -> ExpertModel:
        try:
            source = source_of(model)
        except CalibrationError as error:
            raise CalibrationError(f"{role} {name!r}: {error}") from error
        options: Any = {"device": working.device, "spared": spared, "module": shared}
        expert = ExpertModel(name, source, like, role=role, **options)
        config = getattr(request.merged, "config", None)
        check_same_function(name, source.config, config, role=role)
        return expert

    has_base = request.base is not None and rule.reads_base
    base = opened(BASE, request.base, "base model") if has_base else None
    tasks = request.processes.share(request.experts)
    return base, {task: opened(task, request.experts[task], "expert") for task in tasks}


def check_merged(problem: Problem) -> None:
    """Refuse NaN and infinity in the merged model, naming the base or expert they came from."""

    def reader(source: ExpertModel) -> Callable[[str], object]:
        return lambda name: source.stored(name) if name in source.keys else None

    readers = map(reader, problem.models.values())
    refuse_not_finite(problem.merged, "the merged model", "Check how it was merged", readers)
