"""Mergers that work block by block, on the experts' features of FeatCal's samples."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from fusion_bench_featcal.calibration import result_of
from fusion_bench_featcal.core.float32_products import exact_products
from fusion_bench_featcal.experts import ExpertSource, LazyModel, source_of
from fusion_bench_featcal.experts.copies import copied_module
from fusion_bench_featcal.fusionbench.method_inputs import MethodInputs
from fusion_bench_featcal.fusionbench.pool_models import BASE_MODEL, load_pool_model
from fusion_bench_featcal.fusionbench.program import counting_in
from fusion_bench_featcal.fusionbench.rows import SampleSettings
from fusion_bench_featcal.modules.groups import Group, record
from fusion_bench_featcal.modules.models import device_of, load_updates
from fusion_bench_featcal.rules.rule import Rule
from fusion_bench_featcal.run.blocks import groups_of
from fusion_bench_featcal.run.checkpoint import Checkpoint
from fusion_bench_featcal.run.devices import usual_torch
from fusion_bench_featcal.run.inputs import Autocast, Inputs, Runtime
from fusion_bench_featcal.run.problem import Problem, open_problem
from fusion_bench_featcal.run.turns import add_task, empty_sums_of, solve, tensors_of
from fusion_bench_featcal.settings import Blocks
from fusion_bench_featcal.streams.batch import Batch
from fusion_bench_featcal.streams.checks import Checks
from fusion_bench_featcal.streams.samples import check_inputs
from fusion_bench_featcal.streams.task_sums import empty_task_sums


class Merger(Rule, SampleSettings, Blocks):
    """A merger for any model family.

    Blocks are merged in forward order. Linear weights are solved from the inputs of each expert's
    modules, by `sums`. All other parameters are the experts' mean.

    Attributes:
        features: Input features of an expert's block: the features of the `expert`, or the output
            of the preceding `merged` blocks.
    """

    features = "expert"
    estimates_statistics = False

    @property
    def runs_experts(self) -> bool:
        """Return True, because the inputs of experts' modules are summed."""
        return True

    def check(self, inputs: MethodInputs) -> None:
        """Refuse a pool without a base."""
        inputs.require_base("is needed for its structure")

    def merge(self, inputs: MethodInputs) -> nn.Module:
        """Merge a pool's experts. Raises as `merge_models`."""
        batches = self.take_batches(inputs)
        options = {"device": inputs.fabric.device, "autocast": inputs.fabric.autocast}
        return self.merge_models(load_base(inputs), inputs.experts(), batches, **options)

    @usual_torch()
    @torch.no_grad()
    def merge_models(
        self,
        base: nn.Module,
        experts: Mapping[str, nn.Module | ExpertSource],
        batches: Mapping[str, Iterable[object]],
        *,
        device: torch.device | str | None = None,
        autocast: Autocast | None = None,
    ) -> nn.Module:
        """Merge experts block by block in forward order.

        Takes and raises the same as `calibrate`. The result has the structure, dtype and
        device of the base, which is not changed.
        """
        start_device = device_of(base)
        settings = self.calibration_settings.replace(rule=self)
        check_inputs(base, experts, batches, self)
        device = torch.device(device or start_device)
        start = copied_module(base).to(device)
        load_means(start, experts, self.start_scale(len(experts)))
        inputs = Inputs(start, base, experts, batches)
        runtime = Runtime(device, autocast or nullcontext)
        problem = open_problem(inputs, self, settings.completed.options, runtime, Checkpoint())
        with problem.computing():
            self.merge_blocks(problem)
        tasks = problem.streams.tasks
        self.sample_counts.update({task: problem.streams.counts(task) for task in tasks})
        return result_of(problem).model.to(start_device)

    def merge_blocks(self, problem: Problem) -> None:
        """Merge all blocks of the problem's model."""
        streams = problem.streams
        for index, stage in enumerate(streams.stages):
            streams.begin(index)
            for block in stage:
                problem.progress.at(block)
                with streams.loaded(block):
                    updates = self.block(problem, block)
                    load_updates(problem.model, block, updates, self.remedy)
                    streams.advance(block)
                    get = problem.model.get_parameter
                    problem.working.finish({name: get(name).detach() for name in updates})

    def block(self, problem: Problem, block: str) -> dict[str, Tensor]:
        """Return merged parameters of a block, and run the experts' features through it."""
        groups = [group for turn in self.turns(groups_of(problem, block)) for group in turn]
        sums = empty_sums_of(problem, block, groups)
        checks = Checks(block)
        for task in problem.streams.tasks:
            with problem.experts[task].loaded(problem.streams.tensors_of(block)) as expert:
                options = problem.model, expert, self, problem.dtype
                rows = {group: empty_task_sums(group, *options) for group in groups}
                for batch in problem.streams.visits(task):
                    inputs = self.expert_inputs(problem, block, expert, batch, groups)
                    for group in groups:
                        with group.place(block, task), exact_products():
                            rows[group].add(batch, inputs[group.name])
                for group in groups:
                    moments = add_task(sums[group], group, block, task, rows[group])
                    checks.add(task, group.name, moments, [])
            problem.progress.step()
        checks.run(problem.processes.gather)
        return solve(problem, block, sums, tensors_of(problem, block))[0]

    def expert_inputs(
        self, problem: Problem, block: str, expert: nn.Module, batch: Batch, groups: Sequence[Group]
    ) -> dict[str, Tensor]:
        """Run a batch through an expert's block, and return the inputs of its modules."""
        call = batch.calibrated if self.features == "merged" else batch.expert
        run = partial(problem.streams.step, expert, block, call)
        recorded = record(expert, [group.name for group in groups], run)
        batch.expert = recorded.result
        return recorded.inputs

    def start_scale(self, tasks: int) -> float:
        """Return the factor of the experts' mean step from the base in the initial model."""
        return 1.0


def load_base(inputs: MethodInputs) -> nn.Module:
    """Load the pool's base, with whole numbers as in the experts' files."""
    return counting_in(torch.int64, load_pool_model(inputs.modelpool, BASE_MODEL))


def load_means(
    model: nn.Module, experts: Mapping[str, nn.Module | ExpertSource], scale: float
) -> list[LazyModel]:
    """Set every floating-point tensor of a model, the base, to the experts' mean.

    A parameter's step from the base is scaled. Buffers, such as running variances, become means.
    Returns the experts as sources of the model's tensors.
    """
    tensors = model.state_dict(keep_vars=True)
    weights = [
        LazyModel(f"expert {task!r}", source_of(expert), model) for task, expert in experts.items()
    ]
    for tensor, name in {id(t): (t.data, name) for name, t in tensors.items()}.values():
        if tensor.is_floating_point():
            wide = torch.promote_types(tensor.dtype, torch.float32)
            mean = sum(e.tensor(name).to(wide) for e in weights) / len(weights)
            is_scaled = scale != 1 and isinstance(tensors[name], nn.Parameter)
            tensor.copy_(tensor + scale * (mean - tensor) if is_scaled else mean)
    return weights
