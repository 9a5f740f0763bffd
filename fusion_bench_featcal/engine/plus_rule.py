"""FeatCal+: modules are solved one after another, each towards what the features still lack."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.engine.batch_norm import (
    BatchNorms,
    BatchNormSums,
    NormsInOrder,
    NormTurn,
)
from fusion_bench_featcal.engine.block import cost_of_solving
from fusion_bench_featcal.engine.checks import run_checks
from fusion_bench_featcal.engine.finished_parts import Tail, adding, finished_parts, replayed
from fusion_bench_featcal.engine.fold_rows import FOLDS, FoldRows
from fusion_bench_featcal.engine.group_sums import Features, GroupSums, TaskRows
from fusion_bench_featcal.engine.module_groups import (
    Group,
    find_groups,
    hidden_before,
    hidden_behind,
)
from fusion_bench_featcal.engine.parted_sums import PartedRows, PartedSums
from fusion_bench_featcal.engine.problem import Problem
from fusion_bench_featcal.engine.recording import Recorder, Recording
from fusion_bench_featcal.engine.rows import CountedRows
from fusion_bench_featcal.engine.rules import FeatCalRule, Rule, Streams, Turn
from fusion_bench_featcal.engine.samples import Batch, batch_generator, weighs_by_sensitivity
from fusion_bench_featcal.engine.sensitivity import final_rows, sensitivities
from fusion_bench_featcal.engine.task_sums import counted_in
from fusion_bench_featcal.engine.task_weights import (
    OneTaskSquares,
    Squares,
    TaskSquares,
    Weights,
    square_of,
    weight_of,
)
from fusion_bench_featcal.engine.team import Alone, Solved, Team
from fusion_bench_featcal.settings import CalibrationError


@dataclass(frozen=True)
class ExpertTurn(Turn):
    """A block's first turn: experts run once, and what later turns need of them is marked."""

    groups: tuple[Group, ...]


@dataclass(frozen=True)
class GroupTurn(Turn):
    """A turn in which modules are solved.

    Attributes:
        groups: Groups of modules by their number in the block.
        owners: The process that solves each of them.
        finished: Parts of the block that change no more.
        tails: Tails of such parts, which are not among `finished`.
        writers: Modules in finished parts that write to the hidden features.
    """

    groups: Mapping[int, Group]
    owners: Sequence[int]
    finished: tuple[str, ...] = ()
    tails: tuple[Tail, ...] = ()
    writers: tuple[str, ...] = ()


class PlusRule(Rule):
    """Residual targets, modules in their order and lambdas by held-out error, or some of these."""

    runs_model = runs_experts = True
    shows_drift_before = False  # no turn runs the whole block as it was merged

    def __init__(self, problem: Problem, team: Alone | Team) -> None:
        """Apply to a problem.

        Args:
            problem: The problem.
            team: The processes that share the work.
        """
        self._problem, self._team, self._recorder = problem, team, Recorder()
        self._norms = BatchNorms(problem, team, _weights_of("{}"))
        self._weights: Weights = {}
        self._finished: tuple[str, ...] = ()
        self._tails: tuple[Tail, ...] = ()
        self._whole: Tail | None = None

    def tensors_before(self, stage: int) -> list[str]:
        """Tensors that lead to the stage; all where the expert runs whole for its rows' weights."""
        return (
            list(self._problem.model.state_dict())
            if self.weighs(stage)
            else super().tensors_before(stage)
        )

    def weighs(self, stage: int) -> bool:
        """Return whether a batch may come to a stage without its rows' weights."""
        is_first = stage == 0 or not self._problem.family.hands_on
        return is_first and weighs_by_sensitivity(self._problem.settings, self._problem.model)

    def weigh(self, task: str, stage: int, expert: nn.Module, inputs: Any, batch: Batch) -> None:
        """Run the expert whole, and back from its final features."""
        if not self.weighs(stage) or batch.sensitivity is not None:
            return
        problem = self._problem
        # Copies are behind their originals, or in batches of their own, and have the same signs.
        originals = batch.samples - batch.copies or batch.samples
        numbers = [batch.start + index % originals for index in range(batch.samples)]
        names = [site.name for m in problem.modules.values() for site in m.sites]
        purpose, seed = "sensitivity", problem.settings.seed
        with problem.autocast():
            batch.sensitivity = sensitivities(
                expert,
                inputs,
                names,
                [stage[0] for stage in problem.stages],
                final_rows(problem, inputs),
                [batch_generator(purpose, seed, task, number) for number in numbers],
            )

    def visits(self, block: str) -> dict[str, list[str]]:
        """All of the block, and then the calibrated modules once more."""
        problem = self._problem
        weights = problem.calibrated_in(block)
        return {block: problem.tensors_of(block), _weights_of(block): weights}

    def base_visits(self, block: str) -> dict[str, list[str]]:
        """The calibrated modules' weights: biases follow from the means and have no anchor."""
        sites = self._problem.modules[block].sites
        return {_weights_of(block): [site.weight_name for site in sites]}

    def opened(self, task: str, names: Sequence[str]) -> AbstractContextManager[nn.Module]:
        """The expert with what the visit needs."""
        return self._problem.experts[task].loaded(names)

    def turns(self, block: str, streams: Streams) -> Iterator[ExpertTurn | GroupTurn | NormTurn]:
        """The experts' turn, and one for each group of modules or one for all of them.

        A BatchNorm has its turn as soon as the modules before it have changed.
        """
        problem = self._problem
        first = next((batches[0] for batches in streams.values() if batches), None)
        # Those of the first process, so that all have the same: it always has samples.
        found = None if first is None else find_groups(problem, block, first)
        groups = tuple(self._team.gather(found)[0] or ())
        yield ExpertTurn(block, block, problem.tensors_of(block), groups)
        numbered = dict(enumerate(groups))
        owners = self._team.owners([self._cost(group) for group in groups])
        alone = problem.settings.order == "module"
        solved: list[Group] = []
        norms = NormsInOrder(self._norms, block, first)
        if not alone:
            yield from norms.statistics()
        self._finish(block, solved, norms.done)
        for part in [{n: g} for n, g in numbered.items()] if alone else [numbered]:
            if alone:
                yield from norms.before(next(iter(part.values())).first)
                self._finish(block, solved, norms.done)
            names = [name for group in part.values() for site in group.sites for name in site.names]
            finished, tails = self._finished, self._tails
            writers = tuple(
                g.first for g in groups if g.writes and g.first.startswith(_inside(finished))
            )
            place, dealt = _weights_of(block), [owners[number] for number in part]
            yield GroupTurn(block, place, names, part, dealt, finished, tails, writers)
            solved += part.values()
            self._finish(block, solved, norms.done)
        yield from norms.before(None)
        self._finish(block, solved, norms.done)

    def _cost(self, group: Group) -> float:
        get = self._problem.model.get_parameter
        weights = [site.oriented(get(site.weight_name)) for site in group.sites]
        return cost_of_solving(weights, group.parts)

    def _finish(self, block: str, solved: Sequence[Group], norms: Sequence[str]) -> None:
        """Find the parts of a block that change no more: what they give is the same from now on."""
        problem = self._problem
        self._finished, self._tails, self._whole = (), (), None
        if not problem.family.same_calls:
            return
        modules = problem.modules[block]
        sites = [site.name for site in (*modules.sites, *modules.batch_norms)]
        names = [*norms, *(site.name for group in solved for site in group.sites)]
        parts = finished_parts(problem.model, block, sites, names)
        self._tails = tuple(group.tail for group in solved if group.tail is not None)
        self._finished = tuple(set(parts) - {tail.part for tail in self._tails})
        writers = [group for group in solved if group.writes]
        if writers and len(writers) == len(self._tails):  # all of them, if the last one closes
            self._whole = writers[-1].whole

    def advance(self, block: str, batch: Batch) -> tuple[Tensor, Any]:
        """Run the block, but for parts whose outputs the batch still has."""
        model, tails = self._problem.model, self._completed(batch, self._tails)
        if self._whole is not None and tails == [*self._tails]:
            context = adding(model, self._whole, [batch.marks[tail.module] for tail in tails])
        else:
            kept = [name for name in self._finished if name in batch.marks]
            context = replayed(model, batch, kept, tails)
        with context:
            result = self._problem.step(model, block, batch.cal)
        batch.marks.clear()
        return result

    def _completed(self, batch: Batch, tails: Sequence[Tail]) -> list[Tail]:
        """The tails whose modules' outputs the batch has, or gets here from the inputs it has."""
        problem = self._problem
        for tail in tails:
            if tail.mark in batch.marks:
                with problem.autocast():
                    module = problem.model.get_submodule(tail.module)
                    batch.marks[tail.module] = module(batch.marks.pop(tail.mark))
        return [tail for tail in tails if tail.module in batch.marks]

    def block_sums(
        self, turn: ExpertTurn | GroupTurn | NormTurn
    ) -> "TaskSquares | TurnSums | BatchNormSums":
        """Sums of a turn, empty."""
        if isinstance(turn, NormTurn):
            return self._norms.block_sums(turn)
        if isinstance(turn, ExpertTurn):
            return TaskSquares(turn.block, turn.groups, self._team, self.adopt)
        self._sums = TurnSums(self._problem, turn, self._team)
        return self._sums

    def adopt(self, weights: Weights) -> None:
        """Take over each task's weight, by group, for the turns to come."""
        self._weights = weights

    def task_sums(
        self, task: str, turn: ExpertTurn | GroupTurn | NormTurn, expert: nn.Module
    ) -> Any:
        """Sums of one task in a turn."""
        if isinstance(turn, NormTurn):
            return self._norms.task_sums(task, turn)
        if isinstance(turn, ExpertTurn):
            return OneTaskSquares(task)
        weights = self._weights[task]
        factor = self._problem.settings.task_factors.get(task, 1.0)
        rows: dict[int, TaskRows | PartedRows] = {}
        for number, sums in self._sums.by_group.items():
            weight = factor * weights[number]
            rows[number] = (
                PartedRows(sums, task, expert, weight)
                if isinstance(sums, PartedSums)
                else TaskRows(sums, task, expert, weight)
            )
        return TurnRows(rows)

    def record(
        self, turn: ExpertTurn | GroupTurn | NormTurn, expert: nn.Module, batch: Batch
    ) -> tuple[Recording, Any]:
        """Run the expert, or the model with the modules as they are by now."""
        if isinstance(turn, NormTurn):
            return self._norms.record(turn, batch)
        if isinstance(turn, ExpertTurn):
            return self._watch(turn, expert, batch)
        return self._look(turn, batch)

    def follow(self, block: str, expert: nn.Module, batch: Batch) -> Recording:
        """Run a batch through the expert's block alone, with hooks as in its turn."""
        names = [site.name for site in self._problem.modules[block].sites]
        return self._run_expert(block, expert, batch, dict.fromkeys(names, type))

    def _run_expert(self, block: str, expert: nn.Module, batch: Batch, outputs: Any) -> Recording:
        run = partial(self._problem.step, expert, block, batch.exp)
        recording = self._recorder.record(
            expert, [block, *outputs], run, outputs=outputs, copied=[block]
        )
        batch.exp = recording.following
        return recording

    def _watch(
        self, turn: ExpertTurn, expert: nn.Module, batch: Batch
    ) -> tuple[Recording, Squares]:
        """Run the expert's block; mark what later turns need, and sum squares of outputs."""
        problem, outputs = self._problem, dict[str, Any]()
        masks = [self._counted(turn.block, group, batch) for group in turn.groups]
        for group, mask in zip(turn.groups, masks, strict=True):
            for site in group.sites:
                square = partial(square_of, mask=mask)
                outputs[site.name] = Tensor.clone if _is_marked(group) else square
        exp = self._run_expert(turn.block, expert, batch, outputs)
        squares: Squares = {}
        for number, (group, mask) in enumerate(zip(turn.groups, masks, strict=True)):
            calls = [exp.calls.get(site.name, []) for site in group.sites]
            if any(other != calls[0] for other in calls):
                raise self._unlike(turn.block, group)
            given = [o for site in group.sites for o in exp.outputs.get(site.name, ())]
            batch.marks[group.mark] = self._mark(turn.block, group, exp)
            values = [square_of(o, mask) for o in given] if _is_marked(group) else given
            weights = [weight_of(x, mask) for x in exp.of(group.first)]
            nothing = torch.zeros((), device=problem.device)  # where a batch does not reach it
            squares[number] = [sum(values, start=nothing), sum(weights, start=nothing)]
        if problem.settings.log_drift:
            batch.exp_hidden = exp.hidden
        return exp, squares

    def _mark(self, block: str, group: Group, exp: Recording) -> list[Tensor]:
        """The expert's features that a group's turn needs."""
        if group.closes:
            assert exp.hidden is not None  # as the expert's block runs to its end
            return [exp.hidden]  # which is kept anyway
        return [hidden_behind(block, group, exp)] if group.writes else exp.of(group.first)

    def _look(self, turn: GroupTurn, batch: Batch) -> tuple[Recording, dict[int, Features]]:
        """Run the model's block as far as the turn's modules."""
        problem, groups = self._problem, turn.groups
        names = [group.first for group in groups.values()]
        writes = any(group.writes for group in groups.values())
        behind = {name for group in groups.values() for name in group.behind}
        tails = self._completed(batch, turn.tails)
        # What a part that will be replayed adds to the hidden features is noted with its output.
        noted = [name for name in sorted({*behind, *turn.writers}) if name not in batch.marks]
        notes = sum(group.calls for group in groups.values()) + len(noted) + writes
        with replayed(problem.model, batch, turn.finished, tails):
            cal = self._recorder.record(
                problem.model,
                [turn.block, *names] if writes else names,
                partial(problem.step, problem.model, turn.block, batch.cal),
                outputs=dict.fromkeys(noted, Tensor.clone),
                stop_after=notes if problem.family.same_calls else None,
                copied=[turn.block],
            )
        cal.outputs |= {name: [batch.marks[name]] for name in behind - set(noted)}
        batch.marks.update({n: cal.outputs[n][0] for n in turn.writers if n in noted})
        folds = FOLDS if problem.settings.ridge == "kfold" else 1
        features: dict[int, Features] = {}
        for number, group in groups.items():
            mark, inputs = batch.marks.pop(group.mark), cal.of(group.first)
            seen = [hidden_before(turn.block, group, cal)] if group.writes else inputs
            shapes = [x.shape for x in seen]
            if [x.shape for x in mark] != shapes or len(inputs) != len(shapes):
                raise self._unlike(turn.block, group)
            drifts = [exp - own for exp, own in zip(mark, seen, strict=True)]
            counted = self._counted(turn.block, group, batch)
            if counted is not None and group.sites[0].patches is not None:
                raise CalibrationError(
                    f"block {turn.block}: module {group.first} is a convolution, whose patches no "
                    "mask of positions and no method.row_weights=sensitivity fits. Exclude it: "
                    f"method.modules=['!{group.first}']"
                )
            rows = FoldRows.of(batch, counted, folds)
            features[number] = Features(inputs, drifts, rows)
            if group.tail is not None and problem.family.same_calls:
                batch.marks[group.tail.mark] = inputs[0]
        return cal, features

    def _counted(self, block: str, group: Group, batch: Batch) -> CountedRows | None:
        """Rows of a group's inputs that count."""
        if group.mark in batch.other:  # no module is named like it
            return batch.other[group.mark]
        counted = counted_in(group.sites[0], batch.valid, batch.other)
        if batch.sensitivity is not None:
            counted = _weighed(group, batch.sensitivity, counted)
            batch.other = {**batch.other, group.mark: counted}
            return counted
        if not group.closing:
            return counted
        if block not in batch.other:
            hidden = batch.cal.hidden
            mask = self._problem.family.closing_rows(self._problem.model, hidden)
            assert mask is not None  # as the group was found by it
            batch.other = {**batch.other, block: CountedRows.of_mask(mask)}
        return batch.other[block]

    def _unlike(self, block: str, group: Group) -> CalibrationError:
        return CalibrationError(
            f"block {block}: module {group.first} is not called alike for all samples and models, "
            f"which method.order=block with method.target=module and method.ridge=fixed may "
            f"support. Or exclude it: method.modules=['!{group.first}']"
        )


def _is_marked(group: Group) -> bool:
    """Return whether the hidden features behind a group are made of modules' outputs."""
    return group.writes and not group.closes


def rule_of(problem: Problem, team: Alone | Team) -> FeatCalRule | PlusRule:
    """The rule that the settings ask for."""
    rule = FeatCalRule if problem.settings.is_paper else PlusRule
    return rule(problem, team)


def _weighed(
    group: Group, sensitivity: Mapping[str, Tensor], counted: CountedRows | None
) -> CountedRows | None:
    """Rows that count, weighted by the sensitivity at all of a group's modules together."""
    known = [sensitivity[site.name] for site in group.sites if site.name in sensitivity]
    if not known or (counted is not None and known[0].shape != counted.shape):
        return counted
    weights = torch.stack(known).sum(0)
    if counted is not None:
        weights = weights * counted.mask()
    return CountedRows.of_weights(weights)


def _inside(parts: Sequence[str]) -> tuple[str, ...]:
    """Beginnings of the names of what is inside parts of a block."""
    return tuple(f"{part}." for part in parts)


def _weights_of(block: str) -> str:
    """Name of the place at which a block's calibrated modules are read."""
    return f"{block} · weights"


@dataclass
class TurnRows:
    """One task's rows, by group."""

    by_group: Mapping[int, TaskRows | PartedRows]

    def add(self, model: nn.Module, cal: Recording, exp: dict[int, Features], *rows: Any) -> None:
        """Add a batch's."""
        for number, features in exp.items():
            self.by_group[number].add(features)


class TurnSums:
    """Sums of a turn's groups over tasks, and their solves."""

    def __init__(self, problem: Problem, turn: GroupTurn, team: Alone | Team) -> None:
        self._problem, self._team, self._owners = problem, team, turn.owners
        self.by_group: dict[int, GroupSums | PartedSums] = {
            number: (PartedSums if group.parts > 1 else GroupSums)(problem, turn.block, group)
            for number, group in turn.groups.items()
        }

    def add(self, sums: TurnRows, expert: nn.Module) -> None:
        """End one task."""
        for rows in sums.by_group.values():
            rows.close()

    def solve(self) -> Solved:
        """Solve every group in its process, which gives the others what it found."""
        dealt = [*zip(self.by_group.values(), self._owners, strict=True)]
        run_checks([check for sums, _ in dealt for check in sums.checks])
        complete = [sums for sums, owner in dealt if self._team.add_up(sums.tensors(), owner)]
        solved = [sums.solve() for sums in complete]
        updates = {name: tensor for found, _ in solved for name, tensor in found.items()}
        spread = self._team.spread(updates, self._problem.model)
        records = [iter(noted) for noted in self._team.gather([noted for _, noted in solved])]
        return dict(spread), [record for _, owner in dealt for record in next(records[owner])]
