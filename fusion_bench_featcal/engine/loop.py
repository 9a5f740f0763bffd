"""The loop over blocks in forward order (Algorithm 1), shared by FeatCal, RegMean and LOT."""

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fusion_bench_featcal.checkpoints import NoCheckpoints
from fusion_bench_featcal.core.drift import weight_distance
from fusion_bench_featcal.core.float32_products import exact_products
from fusion_bench_featcal.core.products import summing_in
from fusion_bench_featcal.engine.activations import UNLIMITED, Activations
from fusion_bench_featcal.engine.block import load_updates
from fusion_bench_featcal.engine.held_out import compared_rows
from fusion_bench_featcal.engine.log import Reporter
from fusion_bench_featcal.engine.problem import Problem
from fusion_bench_featcal.engine.rules import Rule, Streams, Turn
from fusion_bench_featcal.engine.samples import (
    Batch,
    check_finite_inputs,
    find_rows,
    naming_task,
    to_device,
)
from fusion_bench_featcal.engine.team import Alone, Solvable, Team
from fusion_bench_featcal.engine.visits import Visit, accounts_of, relative_updates, task_record
from fusion_bench_featcal.experts.reading import Reads, stage_place

if TYPE_CHECKING:
    from fusion_bench_featcal.checkpoints.store import Checkpoints


class BlockLoop:
    """Changes a model's blocks one after another, each from the features that reach it.

    Of the parts that a caller may leave out, those given do something only where they are asked
    to: several processes, kept blocks, features that wait elsewhere.
    """

    def __init__(
        self,
        problem: Problem,
        rule: Rule,
        reads: Reads,
        reporter: Reporter,
        *,
        team: Alone | Team | None = None,
        kept: "Checkpoints | NoCheckpoints | None" = None,
        activations: Activations | None = None,
        merged: nn.Module | None = None,
    ) -> None:
        """Put the loop together.

        Args:
            problem: Models, blocks and settings.
            rule: The method.
            reads: What is read of base and experts, and where.
            reporter: Progress and log.
            team: The processes that share the work; None: this one does everything.
            kept: Blocks that an earlier run has finished; None: there are none.
            activations: Where features wait between blocks; None: where they are.
            merged: The merged model, for samples that are held out where running a block or going
                to a stage takes more than blocks that have not changed yet.
        """
        self._problem, self._rule, self._reads, self._reporter = problem, rule, reads, reporter
        self._team, self._kept = team or Alone(), kept or NoCheckpoints()
        self._activations = activations or Activations((None, UNLIMITED))
        self._merged = merged
        self._waiting: list[tuple[str, dict[str, Tensor]]] = []  # updates, with order=model
        reads.experts, reads.visits = problem.experts, self._visits()
        if problem.base is not None and problem.settings.needs_base:
            reads.base = problem.base
            for block in problem.modules:
                reads.base_visits |= rule.base_visits(block)

    def _visits(self) -> dict[str, list[str]]:
        """Names of the tensors that every expert's visit to a place needs, in forward order."""
        visits: dict[str, list[str]] = {}
        for index, stage in enumerate(self._problem.stages):
            visits[stage_place(index)] = self._rule.tensors_before(index)
            for block in stage:
                visits |= self._rule.visits(block)
        return visits

    def run(self, samples: Mapping[str, Iterable[Batch]]) -> None:
        """Change every block.

        Args:
            samples: Each task's batches.
        """
        for index, stage in enumerate(self._problem.stages):
            self._reads.enter(stage_place(index))
            is_over = self._is_over(index)
            streams = self._pass_by(samples) if is_over else self._begin_stage(index, samples)
            self._kept.start()
            for block in stage:
                if self._kept.has(block):
                    self._reads.enter(block)
                    self._restore(block, {} if is_over else streams)
                else:
                    self._change(block, streams)
            samples = streams
        for block, updates in self._waiting:
            load_updates(self._problem.model, block, updates)
        self._team.gather(None)  # none ends well while another still fails
        self._kept.finish(self._reporter.log)

    def _change(self, block: str, streams: Streams) -> None:
        """In each turn collect from every task, solve and load; advance (Algorithm 1's loop)."""
        start = time.perf_counter()
        changed: dict[str, None] = {}
        records: list[dict[str, Any]] = []
        images = self._problem.gives_images(block)
        is_last = block == self._problem.stages[-1][-1]
        changes: dict[str, Tensor] = {}
        visits = {task: Visit(self._problem.device, images, is_last) for task in streams}
        for turn in self._rule.turns(block, streams):
            self._reads.enter(turn.place)
            sums = self._rule.block_sums(turn)
            for task, batches in streams.items():
                self._collect(turn, task, batches, visits[task], sums)
            self._reporter.at(f"{block} · solve")
            with exact_products():
                updates, solved = self._team.solve(sums, self._problem.model)
            changes |= self._changes(block, updates)
            if self._problem.settings.order == "model":
                self._waiting.append((block, updates))
            else:
                load_updates(self._problem.model, block, updates)
            changed |= dict.fromkeys(updates)
            records += solved
        for task, batches in streams.items():
            self._reporter.at(f"{block} · {task} (update)")
            self._advance(block, batches, visits[task])
            self._reporter.progress.update()
        self._log(block, visits, records, changes, time.perf_counter() - start)
        self._kept.keep(block, self._problem.model, list(changed), self._reporter.log)

    def _collect(
        self, turn: Turn, task: str, batches: list[Batch], visit: Visit, into: Solvable
    ) -> None:
        """Sum one task's module inputs over its batches and fold them into the turn's sums."""
        problem, rule = self._problem, self._rule
        self._reporter.at(f"{turn.block} · {task}")
        self._reads.expect_after(turn.place, task)
        with (
            visit.watched(runs_experts=turn.runs_experts),
            rule.opened(task, turn.tensors) as expert,
        ):
            sums = rule.task_sums(task, turn, expert)
            if visit.is_first:
                visit.measure_weights(problem.modules[turn.block].sites, expert)
            for number, batch in enumerate(batches):
                if batch.held:
                    if visit.is_first:
                        self._compare(turn.block, expert, batch, visit)
                        batches[number] = self._activations.settled(batch)
                    continue
                cal, exp = rule.record(turn, expert, batch)
                visit.count(batch, batch.cal.hidden if cal.hidden is None else cal.hidden)
                if rule.shows_drift_before and visit.is_first and cal.hidden is not None:
                    visit.add_drift("before", cal.hidden, batch)
                with summing_in(problem.settings.sums_precision, problem.device):
                    sums.add(problem.model, cal, exp, batch.valid, batch.other)
                batches[number] = self._activations.settled(batch)
            with exact_products():
                if self._team.combine(sums, problem.device):
                    into.add(sums, expert)
        visit.expert_bytes[turn.place] = self._reads.read(task, turn.place)

    def _compare(self, block: str, expert: nn.Module, batch: Batch, visit: Visit) -> None:
        """Compare the block as it was merged with the expert's, in a batch that is held out."""
        batch.exp_hidden = self._rule.follow(block, expert, batch).hidden
        visit.samples += batch.samples
        visit.held_out += batch.samples
        visit.compare("merged", self._step_merged(block, batch), batch)

    def _step_merged(self, block: str, batch: Batch) -> Tensor:
        """Run a block that has not changed yet as the merged model would."""
        model = self._problem.model if self._merged is None else self._merged
        hidden, batch.merged = self._problem.step(model, block, batch.merged)
        return hidden

    def _advance(self, block: str, batches: list[Batch], visit: Visit | None = None) -> None:
        """Run the changed block, whose outputs the next block receives; log the drift left."""
        if not self._rule.runs_model:
            return
        last = block == self._problem.stages[-1][-1]
        for number, batch in enumerate(batches):
            if last and (visit is None or batch.exp_hidden is None):
                break
            hidden, batch.cal = self._rule.advance(block, batch)
            if visit is not None and batch.held:
                visit.compare("after", hidden, batch)
            elif visit is not None and self._problem.settings.order != "model":  # as it was yet
                visit.add_drift("after", hidden, batch)
            batch.exp_hidden = None
            batches[number] = self._activations.settled(batch)

    def _begin_stage(self, index: int, samples: Mapping[str, Iterable[Batch]]) -> Streams:
        """Run every task's samples up to a stage's first block, on the sides that the rule runs.

        Earlier stages have been changed by then. They run whole on both sides, but for families
        that hand on what their last blocks gave.
        """
        problem = self._problem
        streams: dict[str, list[Batch]] = {}
        for task, batches in samples.items():
            self._reporter.at(f"inputs · {task}")
            self._reads.expect_after(stage_place(index), task)
            streams[task] = []
            with problem.experts[task].loaded(self._reads.visits[stage_place(index)]) as expert:
                for batch in batches:
                    streams[task].append(self._begin(task, index, batch, expert))
        read = {task: self._reads.read(task, stage_place(index)) for task in samples}
        for task, (nbytes, *_) in self._team.collected(self._team.gather(read)).items():
            record = {"task": task, "stage": index, "expert_bytes": nbytes}
            self._reporter.log.add("inputs", record)
        return streams

    def _begin(self, task: str, index: int, batch: Batch, expert: nn.Module) -> Batch:
        """Run a batch up to a stage's first block."""
        problem, rule = self._problem, self._rule
        ends = (batch.cal, batch.exp, batch.merged) if problem.family.hands_on else (None,) * 3
        batch.cal = batch.exp = batch.merged = None
        self._activations.release(batch)
        inputs, cal, exp = to_device(batch.inputs, problem.device), None, None
        with naming_task(task):
            rows = find_rows(problem, inputs, index)
            if index == 0 and rows[0] is None:  # padding may hold anything
                check_finite_inputs(inputs, task, batch.index)
            if rule.runs_model:
                cal = problem.begin(problem.model, index, inputs, ends[0])
            if rule.runs_experts:
                exp = problem.begin(expert, index, inputs, ends[1])
        kept = batch.inputs if len(problem.stages) > 1 else None
        begun = self._activations.batch(kept, batch.samples, batch.index, cal, exp)
        begun.valid, begun.other, begun.start = *rows, batch.start
        begun.sensitivity, begun.copies = batch.sensitivity, batch.copies
        with naming_task(task):
            if batch.held:
                self._begin_merged(index, inputs, begun, ends[2])
            else:
                if problem.settings.log_drift and rule.runs_model and rule.runs_experts:
                    begun.compared = compared_rows(problem, index, inputs, begun)
                rule.weigh(task, index, expert, inputs, begun)
        return begun

    def _begin_merged(self, index: int, inputs: Any, batch: Batch, end: Any) -> None:
        """Take a batch that is held out to a stage's first block as the merged model would."""
        problem, batch.held = self._problem, True
        batch.compared = compared_rows(problem, index, inputs, batch)
        model = problem.model if self._merged is None else self._merged
        batch.merged = problem.begin(model, index, inputs, end) if index else batch.cal

    def _is_over(self, index: int) -> bool:
        """Return whether a stage's blocks are all kept, and nothing that they give is needed."""
        stages = self._problem.stages
        needed = stages[index:] if self._problem.family.hands_on else [stages[index]]
        return all(self._kept.has(block) for stage in needed for block in stage)

    def _pass_by(self, samples: Mapping[str, Iterable[Batch]]) -> Streams:
        """Take every task's samples past a stage that is over: nothing has to run."""
        streams: dict[str, list[Batch]] = {}
        for task, batches in samples.items():
            streams[task] = []
            for batch in batches:
                batch.inputs = batch.inputs if len(self._problem.stages) > 1 else None
                streams[task].append(batch)
        return streams

    def _restore(self, block: str, streams: Streams) -> None:
        """Load what an earlier run made of a block, and run the samples through it as it did."""
        held = [batch for batches in streams.values() for batch in batches if batch.held]
        for batch in held:
            self._step_merged(block, batch)
        self._kept.restore(block, self._problem.model, self._reporter.log)
        for task, batches in streams.items():
            self._reporter.at(f"{block} · {task} (restored)")
            if self._rule.runs_experts:
                with self._rule.opened(task, self._reads.visits[block]) as expert:
                    for batch in batches:
                        self._rule.follow(block, expert, batch)
            self._advance(block, batches)
        self._reporter.progress.update(len(self._problem.experts))
        self._kept.confirm(block)

    def _changes(self, block: str, updates: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Norms of the updates of weights, by module."""
        get = self._problem.model.get_parameter
        return {
            site.name: weight_distance(updates[site.weight_name], get(site.weight_name).detach())
            for site in self._problem.modules[block].sites
            if site.kind == "linear" and site.weight_name in updates
        }

    def _log(
        self,
        block: str,
        visits: Mapping[str, Visit],
        records: list[dict[str, Any]],
        changes: Mapping[str, Tensor],
        seconds: float,
    ) -> None:
        """Log what all processes did at a block."""
        log = self._reporter.log
        own, norms = accounts_of(visits, changes)
        gathered = self._team.gather((own, seconds))
        collected = self._team.collected([accounts for accounts, _ in gathered])
        for task, accounts in collected.items():
            log.add("task", task_record(block, task, accounts))
        relative = relative_updates(norms, [accounts[0] for accounts in collected.values()])
        for record in records:
            if record.get("module") in relative:
                record["relative_update"] = relative[record["module"]]
            log.add(record.pop("kind", "module"), record)
        left = list(self._problem.modules[block].left)
        log.add("block", {"block": block, "seconds": max(s for _, s in gathered), "left": left})
