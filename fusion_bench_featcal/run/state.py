"""One calibration, opened and checked: models, modules and samples."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.core.float32_products import convolving_as_multiplying
from fusion_bench_featcal.core.kernels import (
    agreed_kernel,
    choose_kernel,
    processor,
    using_kernel,
    with_kernel,
)
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.place import error_context
from fusion_bench_featcal.errors.plurals import pluralize
from fusion_bench_featcal.errors.words import option, user_term
from fusion_bench_featcal.experts import LazyModel, meta_copy, source_of
from fusion_bench_featcal.experts.budget import ReadPlan, limit_reads
from fusion_bench_featcal.experts.model_config import check_same_function
from fusion_bench_featcal.experts.pairing import refuse_more_blocks
from fusion_bench_featcal.experts.similarity import warn_about_unrelated_models
from fusion_bench_featcal.experts.working_model import WorkingModel, offloaded
from fusion_bench_featcal.families import STACK, resolve_family, stages_of, text_tower
from fusion_bench_featcal.families.check import compare_with_model
from fusion_bench_featcal.modules.block_modules import BlockModules, find_all_modules
from fusion_bench_featcal.modules.models import (
    device_of,
    dtype_of_features,
    expert_tensor_names,
    gives_images,
    tensors_outside_blocks,
)
from fusion_bench_featcal.rules.rule import Rule
from fusion_bench_featcal.run.as_merged import left_as_merged, left_by_names
from fusion_bench_featcal.run.checkpoint import Checkpoint
from fusion_bench_featcal.run.inputs import Inputs, Runtime
from fusion_bench_featcal.run.log import CalibrationLog
from fusion_bench_featcal.run.processes import Processes
from fusion_bench_featcal.run.progress import Progress
from fusion_bench_featcal.run.towers import towers_of
from fusion_bench_featcal.settings.options import Options
from fusion_bench_featcal.streams.batch import Batch
from fusion_bench_featcal.streams.inputs import part_of, to_device
from fusion_bench_featcal.streams.samples import longest_sample, take
from fusion_bench_featcal.streams.storage import storage_for
from fusion_bench_featcal.streams.streams import Streams
from fusion_bench_featcal.streams.task_sums import DriftLog

logger = logging.getLogger(__name__)

BASE_MODEL = "_pretrained_"
"""Name of the base model in FusionBench's pools."""

COMPARED_SAMPLES = 2
"""Number of samples on which a family is compared with the model's forward pass."""


@dataclass(frozen=True)
class CalibrationState:
    """Everything that one calibration works with.

    The fields are fixed. The contents of `working`, `streams`, `checkpoint`, `log` and `progress`
    change, and the counts of bytes that were read.

    Attributes:
        tasks: All tasks, including those of other processes.
        working: The calibrated model, with one block at a time in memory.
        base: The base model, or None if it is not read.
        experts: The expert of each task of which this process may have samples.
        read_plan: Tensors of the experts that may be read.
        modules: The modules of each block.
        rule: The rule that calibrates blocks.
        streams: The samples of this process.
        processes: The processes, each of which works on some of the samples.
        checkpoint: Stores finished blocks.
        dtype: Sums over rows have at least this precision.
        kernel: Library that multiplies float32 matrices on the CPU.
        log: Records of every block.
        progress: Shows the current work.
    """

    tasks: Sequence[str]
    working: WorkingModel
    base: LazyModel | None
    experts: Mapping[str, LazyModel]
    read_plan: ReadPlan
    modules: Mapping[str, BlockModules]
    rule: Rule
    streams: Streams
    processes: Processes
    checkpoint: Checkpoint
    dtype: torch.dtype
    kernel: str
    log: CalibrationLog
    progress: Progress

    @property
    def model(self) -> nn.Module:
        """Return the calibrated model, with only some tensors in memory."""
        return self.working.module

    @property
    def models(self) -> dict[str, LazyModel]:
        """Return base and experts by name."""
        return ({} if self.base is None else {BASE_MODEL: self.base}) | dict(self.experts)

    def sum_task(self, task: str, tensors: Sequence[Tensor]) -> bool:
        """Add up a task's sums over its samples, and return whether this process completes them.

        What is not linear in the samples, such as a task's weight, is computed there alone. Nothing
        is exchanged if one process has all samples of the task.
        """
        processes, owner = self.processes, self.tasks.index(task) % self.processes.size
        if processes.divides_batches(self.tasks):
            processes.reduce_sum(tensors, owner)
        return processes.rank == owner

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Context of all work on blocks: its precision, kernel and progress bar."""
        with convolving_as_multiplying(), using_kernel(self.kernel), self.progress.bar:
            yield


def prepare_calibration(
    inputs: Inputs, rule: Rule, options: Options, runtime: Runtime, checkpoint: Checkpoint
) -> CalibrationState:
    """Open models and samples of a calibration, and check them.

    Args:
        inputs: The models and samples.
        rule: Calibrates blocks.
        options: Options, with the rule's values in place of null.
        runtime: Where it runs.
        checkpoint: Stores finished blocks.
    """
    inputs, processes, device = inputs.with_split_attention(), runtime.processes, runtime.device
    samples = divided_samples(inputs, rule, options, processes)
    kernel = agreed_kernel(processes.gather(choose_kernel(device)))
    working = WorkingModel(inputs.merged, inputs.merged_weights, device=device)
    model = working.structure if working.is_in_memory else offloaded(working, device)
    family = resolve_family(options.family, inputs.merged)
    if family is STACK and text_tower(model) is not None:
        family = towers_of(model, samples, runtime)
    stages = stages_of(family, inputs.merged)
    # The family must give the model's outputs on the longest sample and the one after it. If the
    # head uses only the first position of the last block's output, no other one counts there.
    priority = _, task, number, sample = longest_sample(samples, family, model)
    batch, needs_first = samples[task][number], rule.counts_read_positions_only
    few = part_of(batch.inputs, batch.samples, slice(sample, sample + COMPARED_SAMPLES))
    with error_context(task=task), runtime.autocast():
        few = to_device(few, device_of(model))
        reads_first = compare_with_model(family, model, stages, few, needs_first=needs_first)
    head_reads_first = processes.value_of_min(priority, reads_first)
    processes.doing = "the models"
    modules = find_all_modules(
        inputs.merged, stages, options.modules, calibrate_norm=rule.calibrate_norm
    )
    with runtime.autocast():
        features = dtype_of_features(inputs.merged, stages[0][0], runtime.device)
    if warning := rule.dtype_warning(features):
        logger.warning(warning)
    base, experts = open_models(inputs, working, rule, processes, stages)
    order = expert_tensor_names(working.module, stages, modules, runs_experts=rule.runs_experts)
    budget, tasks = options.expert_read_budget, list(inputs.experts)
    if base is not None and budget is None:
        named = {user_term("expert", task): experts[task] for task in processes.own_tasks(tasks)}
        warn_about_unrelated_models({**named, "merged": working}, base)
    read_plan = limit_reads(experts, budget, order, working, tasks, processes.gather_dict)
    modules = without_fixed_batchnorms(modules, rule, working, experts, processes)
    images = any(gives_images(inputs.merged.get_submodule(block)) for block in modules)
    streams = Streams(
        samples,
        family,
        stages,
        working,
        experts,
        processes.sum_counts,
        features=rule.features,
        records_experts=rule.runs_experts,
        autocast=with_kernel(kernel, runtime.autocast),
        decoder_rows=options.decoder_rows or rule.decoder_rows,
        head_reads_first=head_reads_first,
        drift=DriftLog(channels_first=images) if rule.runs_experts else None,
        storage=storage_for(options.activations, device),
    )
    log = CalibrationLog(family=family.name)
    log.add("engine", {"linear_kernel": kernel, "processor": processor()})
    if budget is None:
        as_merged = left_as_merged(working, experts.values(), stages, modules, processes.gather)
    else:  # comparing tensors would read more of the experts than the budget allows
        as_merged = left_by_names(working.structure, stages, modules)
    log.add_as_merged(as_merged)
    passes = 2 if rule.balance else 1
    return CalibrationState(
        tasks=tasks,
        working=working,
        base=base,
        experts=experts,
        read_plan=read_plan,
        modules=modules,
        rule=rule,
        streams=streams,
        processes=processes,
        checkpoint=checkpoint,
        dtype=rule.dtype(len(tasks), device),
        kernel=kernel,
        log=log,
        progress=Progress(
            processes, device, [*modules], len(samples), show=runtime.progress, passes=passes
        ),
    )


def divided_samples(
    inputs: Inputs, rule: Rule, options: Options, processes: Processes
) -> dict[str, list[Batch]]:
    """Return the batches of each task that this process works on.

    If whole tasks cannot be divided evenly among the processes, batches of all tasks are counted
    through, and dealt out like cards. Samples are held out and augmented before that, so both do
    not depend on the number of processes.

    Raises:
        CalibrationError: If there are more processes than batches.
    """
    samples, count = dict[str, list[Batch]](), 0
    is_divided = processes.divides_batches(inputs.experts)
    for task in processes.sampled_tasks(inputs.experts):
        processes.doing = f"inputs · {task}"
        batches: Any = inputs.batches[task]
        if is_divided and hasattr(batches, "compute_all"):
            # Without this, each process would let the expert write all answers.
            batches.compute_all = processes.compute_all
        taken = take(task, batches, options, inputs.merged, holds_out=rule.holds_out)
        first = (processes.rank - count) % processes.size
        samples[task] = taken[first :: processes.size] if is_divided else taken
        count += len(taken)
    if is_divided and count < processes.size:
        raise CalibrationError(
            f"only {count} of {processes.size} processes would get a batch of samples. Start at "
            f"most {count}{user_term('processes')}, or divide the samples into smaller batches: "
            f"{option('batch_size')}"
        )
    return samples


def open_models(
    inputs: Inputs,
    working: WorkingModel,
    rule: Rule,
    processes: Processes,
    stages: Sequence[Sequence[str]],
) -> tuple[LazyModel | None, dict[str, LazyModel]]:
    """Open the base and the experts of the tasks of which this process may have samples.

    This reads names and shapes of base and experts. A merged model in memory is also checked for
    NaN and infinite values.

    Raises:
        CalibrationError: If a model's weights or config do not fit the merged model, or if the
            merged model has NaN or infinite values.
    """
    merged, config = working.module, getattr(inputs.merged, "config", None)
    optional = set(tensors_outside_blocks(merged, stages))
    shared, device = meta_copy(merged, working.device), working.device

    def opened(label: str, model: Any) -> LazyModel:
        with error_context(label):
            source = source_of(model)
        lazy = LazyModel(label, source, merged, device=device, optional=optional, module=shared)
        check_same_function(label, source.config, config)
        refuse_more_blocks(label, source, lazy.keys, stages)
        return lazy

    has_base = inputs.base is not None and rule.reads_base
    base = opened(user_term("base"), inputs.base) if has_base else None
    tasks = processes.sampled_tasks(inputs.experts)
    experts = {task: opened(user_term("expert", task), inputs.experts[task]) for task in tasks}
    if working.is_in_memory:
        working.refuse_not_finite([base, *experts.values()] if base else experts.values())
    return base, experts


def without_fixed_batchnorms(
    modules: Mapping[str, BlockModules],
    rule: Rule,
    working: WorkingModel,
    experts: Mapping[str, LazyModel],
    processes: Processes,
) -> dict[str, BlockModules]:
    """Return the modules without the BatchNorms whose running statistics must not be estimated.

    Without `estimates_statistics` these are all BatchNorms. Otherwise they are those whose
    statistics all experts share with the merged model: such experts were tuned with frozen
    statistics, so they do not normalise with the statistics of their own data.
    """

    def is_shared(name: str) -> bool:
        tensors = (f"{name}.running_mean", f"{name}.running_var")
        return all(
            torch.allclose(expert.tensor(tensor), working.tensor(tensor), rtol=1e-5)
            for expert in experts.values()
            for tensor in tensors
        )

    sites = [site for block_modules in modules.values() for site in block_modules.sites]
    fixed = {site.name for site in sites if site.kind == "statistics"}
    if rule.estimates_statistics:
        fixed = set.intersection(*processes.gather({*filter(is_shared, fixed)}))
        if fixed:
            shared = pluralize(len(fixed), "BatchNorm")
            logger.warning("left unchanged: the experts share the statistics of %s", shared)
    return {
        block: replace(part, sites=tuple(site for site in part.sites if site.name not in fixed))
        for block, part in modules.items()
    }
