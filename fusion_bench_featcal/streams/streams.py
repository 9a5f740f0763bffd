"""All tasks' batches on their way through the calibrated model and the experts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.experts import ExpertModel
from fusion_bench_featcal.experts.working_model import WorkingModel
from fusion_bench_featcal.modules.groups import Group
from fusion_bench_featcal.modules.hooks import Recorded, record
from fusion_bench_featcal.modules.models import tensors_before_stage, tensors_of_block
from fusion_bench_featcal.modules.sites import Site
from fusion_bench_featcal.rules.rule import Rule
from fusion_bench_featcal.settings import CalibrationError
from fusion_bench_featcal.streams.batch import OUTPUT, Batch
from fusion_bench_featcal.streams.drift import AFTER, BEFORE, MERGED, DriftLog
from fusion_bench_featcal.streams.inputs import check_finite_inputs, to_device
from fusion_bench_featcal.streams.last_rows import LastRows
from fusion_bench_featcal.streams.rows import Rows, counted_by_fold
from fusion_bench_featcal.streams.runner import Runner
from fusion_bench_featcal.streams.samples import naming_task
from fusion_bench_featcal.streams.storage import DeviceStorage


@dataclass(frozen=True)
class Streams:
    """The batches of each task of this process, advanced stage by stage and block by block.

    Attributes:
        tasks: The batches of each task.
        runner: Runs blocks of models.
        working: The calibrated model, with one block at a time in memory.
        experts: The expert of each task.
        rule: How blocks are calibrated.
        drift: Compares the features of model and experts, or None.
        storage: Storage of features: the device, the host or disk.
        last_rows: Counted positions in modules of the last block, if they differ from earlier ones.
        aside: The merged model for held-out samples, if running one of its blocks or starting a
            stage needs blocks that are already calibrated. None uses the calibrated model.
    """

    tasks: Mapping[str, list[Batch]]
    runner: Runner
    working: WorkingModel
    experts: Mapping[str, ExpertModel]
    rule: Rule
    drift: DriftLog | None = None
    storage: DeviceStorage = field(default_factory=DeviceStorage)
    last_rows: LastRows | None = None
    aside: WorkingModel | None = None

    @property
    def model(self) -> nn.Module:
        """Return the model that is being calibrated, with only some tensors in memory."""
        return self.working.module

    @property
    def merged(self) -> nn.Module:
        """Return the model that computes the merged model's features of held-out samples."""
        return self.model if self.aside is None else self.aside.module

    @contextmanager
    def loaded(self, block: str) -> Iterator[None]:
        """Context with a block of the calibrated model in memory, with merged weights at first."""
        with self._in_memory(tensors_of_block(self.model, self.runner.family, block)):
            yield

    @contextmanager
    def _in_memory(self, names: Sequence[str]) -> Iterator[None]:
        with ExitStack() as stack:
            for model in (self.working, self.aside):
                if model is not None:
                    stack.enter_context(model.loaded(names))
            yield

    @property
    def runs_experts(self) -> bool:
        """Return whether experts run, for the rule or for a comparison."""
        return self.rule.runs_experts or self.drift is not None

    def begin(self, index: int) -> None:
        """Advance all batches to the first block of a stage. Earlier stages must be calibrated."""
        runner = self.runner
        names = tensors_before_stage(self.model, runner.family, runner.stages, index)
        with self._in_memory(names):
            for task, batches in self.tasks.items():
                with naming_task(task):
                    for number, batch in enumerate(self.storage.visits(batches)):
                        self._begin(task, number, batch, index)
        for task, batches in self.tasks.items() if self.runs_experts else ():
            with self.experts[task].loaded(names) as expert, naming_task(task):
                for batch in self.storage.visits(batches):
                    inputs = to_device(batch.inputs, runner.device)
                    batch.exp = runner.begin(expert, inputs, index, batch.exp)
        if index == len(runner.stages) - 1:
            for batch in (batch for batches in self.tasks.values() for batch in batches):
                batch.inputs = None

    def _begin(self, task: str, number: int, batch: Batch, index: int) -> None:
        runner = self.runner
        inputs = to_device(batch.inputs, runner.device)
        batch.rows = runner.rows(inputs, index, self.rule.folds)
        if index == 0 and batch.rows.valid is None:  # padding may be arbitrary
            check_finite_inputs(inputs, task, number)
        batch.cal = runner.begin(self.model, inputs, index, batch.cal)
        if self.drift is not None:
            compared = runner.compared(self.merged, index, batch)
            batch.rows = replace(batch.rows, compared=compared)
        if batch.is_held_out:
            merged = batch.cal
            if index:
                merged = runner.begin(self.merged, inputs, index, batch.merged)
            batch.merged = merged

    def tensors_of(self, block: str) -> list[str]:
        """Return the names of an expert's tensors for running a block."""
        return tensors_of_block(self.model, self.runner.family, block)

    def is_last(self, block: str) -> bool:
        """Return whether the model's head reads the output of a block."""
        return block == self.runner.stages[-1][-1]

    def visits(self, task: str) -> Iterator[Batch]:
        """Yield a task's batches, each with its features on the device."""
        return self.storage.visits(self.tasks[task])

    def counts(self, task: str) -> dict[str, int]:
        """Return the numbers of a task's samples and of held-out ones, for the log."""
        held_out = sum(batch.samples for batch in self.tasks[task] if batch.is_held_out)
        counts = {"samples": sum(batch.samples for batch in self.tasks[task])}
        return counts | ({"held_out": held_out} if held_out else {})

    def used(self, task: str) -> int:
        """Return the number of a task's samples in the sums, including copies."""
        return sum(b.rows.samples for b in self.tasks[task] if not b.is_held_out)

    def names_of_last_rows(self, block: str, sites: Sequence[Site]) -> list[str]:
        """Return names of modules of the last block with separate counted positions."""
        first = self._first()
        with self.storage.loaded(first):
            mask, run = self._last_mask(block, first), partial(self._hidden, block, first)
            if mask is None or self.last_rows is None:
                return []
            return self.last_rows.modules(self.model, block, sites, run, mask)

    def record_first(self, block: str, sites: Sequence[Site]) -> tuple[Recorded, Rows]:
        """Run one batch through a block to its end and record the inputs of modules."""
        first = self._first()
        with self.storage.loaded(first):
            run = partial(self.runner.step, self.model, block, first.cal)
            return record(self.model, [site.name for site in sites], run), first.rows

    def narrow(self, block: str, names: Sequence[str]) -> None:
        """Use the positions chosen by `last_rows` in some modules of the last block."""
        for batches in self.tasks.values() if names else ():
            for batch in self.storage.visits(batches):
                mask = self._last_mask(block, batch)
                assert mask is not None  # as in the first batch
                other = dict.fromkeys(names, counted_by_fold(mask, self.rule.folds))
                batch.rows = replace(batch.rows, other=other | {**batch.rows.other})

    def _first(self) -> Batch:
        return next(iter(self.tasks.values()))[0]

    def _hidden(self, block: str, batch: Batch) -> Tensor:
        return self.runner.step(self.model, block, batch.cal)[0]

    def _last_mask(self, block: str, batch: Batch) -> Tensor | None:
        assert self.last_rows is not None  # the caller has checked
        hidden = getattr(batch.cal, "hidden", None)
        hidden = self._hidden(block, batch) if hidden is None else hidden
        return self.last_rows.mask(self.model, block, hidden, batch.rows.counted)

    def follow(
        self, task: str, batch: Batch, block: str, expert: nn.Module, groups: Iterable[Group]
    ) -> None:
        """Run a batch through the expert's block and store features of the groups' modules.

        A held-out batch also runs through the merged model's block.
        """
        step = partial(self.runner.step, expert, block, batch.exp)
        if batch.is_held_out:
            hidden, batch.exp = step()
            of_merged, batch.merged = self.runner.step(self.merged, block, batch.merged)
            if self.drift is not None:
                self.drift.add(MERGED, task, batch, of_merged, hidden)
        else:
            hidden = self._note(batch, expert, step, groups)
        if self.drift is not None:
            batch.noted[OUTPUT] = [hidden]

    def _note(self, batch: Batch, expert: nn.Module, step: Any, groups: Iterable[Group]) -> Tensor:
        """Run the expert's block and return its hidden output."""
        linear = [group for group in groups if group.kind == "linear"]
        linear = linear if self.rule.runs_experts else []
        compared = [g for g in linear if self.rule.notes_outputs and g.has_few_outputs]
        inputs = [group.name for group in linear if group not in compared]
        outputs = [site.name for group in compared for site in group.sites]
        recorded = record(expert, inputs, step, outputs=outputs)
        hidden, batch.exp = recorded.result
        batch.noted = recorded.inputs
        for group in compared:
            calls = zip(*(recorded.outputs[site.name] for site in group.sites), strict=True)
            batch.noted[group.name] = [torch.cat(call, -1) for call in calls]
        return hidden

    def inputs_of(
        self, task: str, batch: Batch, block: str, groups: Sequence[Group], *, watched: bool
    ) -> Mapping[str, list[Tensor]]:
        """Run a batch through the calibrated block up to the last of some groups.

        Args:
            task: The task.
            batch: The batch.
            block: The block.
            groups: The groups.
            watched: Whether the block's output before its update is compared with the expert.

        Returns:
            Each group's inputs, by the name of its first module, one per call.

        Raises:
            CalibrationError: If modules of a group receive different tensors.
        """
        run = partial(self.runner.step, self.model, block, batch.cal)
        watched = watched and self.drift is not None and self.rule.folds == 1
        stops = self.runner.family.same_calls and not watched
        calls = sum(group.calls * len(group.sites) for group in groups) if stops else None
        names = [site.name for group in groups for site in group.sites]
        inputs = (recorded := record(self.model, names, run, calls=calls)).inputs
        for group in groups:
            received = [list(map(id, inputs.get(site.name, ()))) for site in group.sites]
            if any(other != received[0] for other in received[1:]):
                names = ", ".join(site.name for site in group.sites)
                raise CalibrationError(
                    f"task {task}, block {block}: modules {names} share their input otherwise than "
                    "in the first batch, which is not supported. Exclude them: "
                    f"method.modules=['!{group.name}', ...]"
                )
        if watched and self.drift is not None:
            hidden, (expert,) = recorded.result[0], batch.noted[OUTPUT]
            self.drift.add(BEFORE, task, batch, hidden, expert, is_last=self.is_last(block))
        return inputs

    def advance(self, block: str) -> None:
        """Run all batches through a calibrated block."""
        is_last = self.is_last(block)
        for task in self.tasks:
            for batch in self.visits(task):
                noted = batch.noted.pop(OUTPUT, None)
                if is_last and noted is None:
                    continue
                hidden, batch.cal = self.runner.step(self.model, block, batch.cal)
                if self.drift is not None and noted is not None:
                    self.drift.add(AFTER, task, batch, hidden, noted[0], is_last=is_last)
