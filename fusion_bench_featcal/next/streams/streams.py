"""All tasks' batches on their way through the calibrated model and through their experts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.engine.problem import tensors_before_stage, tensors_of_block
from fusion_bench_featcal.engine.samples import check_finite_inputs, naming_task, to_device
from fusion_bench_featcal.experts import ExpertModel
from fusion_bench_featcal.next.modules.groups import Group
from fusion_bench_featcal.next.modules.hooks import Recorded, record
from fusion_bench_featcal.next.rules.rule import Rule
from fusion_bench_featcal.next.streams.batch import Batch, Rows, counted_by_fold
from fusion_bench_featcal.next.streams.closing import closing_modules
from fusion_bench_featcal.next.streams.drift import AFTER, BEFORE, MERGED, Watch
from fusion_bench_featcal.next.streams.runner import Runner


@dataclass(frozen=True)
class Streams:
    """The batches of each task of this process, brought forward stage by stage and block by block.

    Attributes:
        tasks: The batches of each task.
        runner: Runs blocks of models.
        model: The calibrated model.
        experts: The expert of each task.
        rule: How blocks are calibrated.
        watch: Looks on at features.
        merged: The merged model for held-out samples, where running one of its blocks or going to a
            stage takes blocks that have been calibrated. None: the calibrated model does.
    """

    tasks: Mapping[str, list[Batch]]
    runner: Runner
    model: nn.Module
    experts: Mapping[str, ExpertModel]
    rule: Rule
    watch: Watch
    merged: nn.Module | None = None

    @property
    def runs_experts(self) -> bool:
        """Return whether experts run, for the rule or to be looked at."""
        return self.rule.runs_experts or self.watch.needs_features

    def begin(self, index: int) -> None:
        """Bring all batches to the first block of a stage; earlier stages have been calibrated."""
        runner = self.runner
        names = tensors_before_stage(self.model, runner.family, runner.stages, index)
        for task, batches in self.tasks.items():
            with (
                self.experts[task].loaded(names if self.runs_experts else []) as expert,
                naming_task(task),
            ):
                for number, batch in enumerate(batches):
                    self._begin(task, number, batch, expert, index)

    def _begin(self, task: str, number: int, batch: Batch, expert: nn.Module, index: int) -> None:
        runner, model = self.runner, self.merged or self.model
        inputs = to_device(batch.inputs, runner.device)
        batch.rows = runner.rows(inputs, index, self.rule.folds)
        if index == 0 and batch.rows.valid is None:  # padding may hold anything
            check_finite_inputs(inputs, task, number)
        batch.cal = runner.begin(self.model, inputs, index, batch.cal)
        if self.runs_experts:
            batch.exp = runner.begin(expert, inputs, index, batch.exp)
        if self.watch.needs_features:
            batch.rows = replace(batch.rows, compared=runner.compared(model, index, batch))
        if batch.is_held_out:
            merged = runner.begin(model, inputs, index, batch.merged) if index else batch.cal
            batch.merged = merged
        if index == len(runner.stages) - 1:
            batch.inputs = None

    def tensors_of(self, block: str) -> list[str]:
        """Return the names of an expert's tensors that running a block needs."""
        return tensors_of_block(self.model, self.runner.family, block)

    def is_last(self, block: str) -> bool:
        """Return whether the model reads its final features behind a block."""
        return block == self.runner.stages[-1][-1]

    def first(self) -> Batch:
        """Return one batch of any task."""
        return next(iter(self.tasks.values()))[0]

    def narrow(self, block: str, modules: Sequence[str]) -> None:
        """Count in the last block only positions that the model reads on, where that is possible.

        Args:
            block: A block; all but the last one stay as they are.
            modules: Names of its linear modules.
        """
        if not self.is_last(block) or not self.rule.reads_closing_rows or not modules:
            return
        first, family = self.first(), self.runner.family
        run = partial(self.runner.step, self.model, block, first.cal)
        mask = family.closing_rows(self.model, run()[0])
        if mask is None:
            return
        names = closing_modules(self.model, block, modules, lambda: run()[0], mask)
        for batches in self.tasks.values():
            for batch in batches:
                read = family.closing_rows(self.model, batch.cal.hidden)
                assert read is not None  # as of the first batch
                counted = counted_by_fold(read, self.rule.folds, has_tables=False)
                others = dict.fromkeys(names, counted) | {**batch.rows.other}
                batch.rows = replace(batch.rows, other=others)

    def record_first(self, block: str, names: Sequence[str]) -> tuple[Recorded, Rows]:
        """Run one batch through a block to its end and note what modules receive."""
        batch = self.first()
        run = partial(self.runner.step, self.model, block, batch.cal)
        return record(self.model, names, run), batch.rows

    def follow(
        self, task: str, batch: Batch, block: str, expert: nn.Module, groups: Iterable[Group]
    ) -> None:
        """Run a batch through the expert's block and note features of the groups' modules.

        A held-out batch runs through the merged model's block, too.
        """
        step = partial(self.runner.step, expert, block, batch.exp)
        if batch.is_held_out:
            hidden, batch.exp = step()
            own, batch.merged = self.runner.step(self.merged or self.model, block, batch.merged)
            self.watch.add(MERGED, task, batch, own, hidden)
        else:
            hidden = self._note(batch, expert, step, groups)
        if self.watch.needs_features:
            batch.noted[block] = [hidden]

    def _note(self, batch: Batch, expert: nn.Module, step: Any, groups: Iterable[Group]) -> Tensor:
        """Run the expert's block; its hidden output."""
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
        self, task: str, batch: Batch, block: str, groups: Sequence[Group]
    ) -> Mapping[str, list[Tensor]]:
        """Run a batch through the calibrated block as far as some groups; what they receive."""
        run = partial(self.runner.step, self.model, block, batch.cal)
        watched = self.watch.needs_features and block in batch.noted and self.rule.folds == 1
        stops = self.runner.family.same_calls and not watched
        calls = sum(group.calls for group in groups) if stops else None
        recorded = record(self.model, [group.name for group in groups], run, calls=calls)
        if watched:
            hidden, expert = recorded.result[0], batch.noted[block][0]
            self.watch.add(BEFORE, task, batch, hidden, expert, is_last=self.is_last(block))
        return recorded.inputs

    def advance(self, block: str) -> None:
        """Run all batches through a block that has been calibrated."""
        is_last = self.is_last(block)
        for task, batches in self.tasks.items():
            for batch in batches:
                if is_last and block not in batch.noted:
                    continue
                hidden, batch.cal = self.runner.step(self.model, block, batch.cal)
                if block in batch.noted:
                    expert = batch.noted.pop(block)[0]
                    self.watch.add(AFTER, task, batch, hidden, expert, is_last=is_last)
