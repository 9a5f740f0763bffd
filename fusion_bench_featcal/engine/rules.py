"""Rules: whose features a block's sums are made of, and what the sums become."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from fusion_bench_featcal.engine.batch_norm import BatchNorms, BatchNormSums, ChannelSums, NormTurn
from fusion_bench_featcal.engine.block import BlockSums
from fusion_bench_featcal.engine.problem import Problem
from fusion_bench_featcal.engine.recording import NO_OUTPUTS, Outputs, Recorder, Recording
from fusion_bench_featcal.engine.routing import RoutedInputs
from fusion_bench_featcal.engine.samples import Batch
from fusion_bench_featcal.engine.task_sums import TaskSums
from fusion_bench_featcal.engine.team import Alone, Solvable, Team

Streams = Mapping[str, list[Batch]]
"""Each task's batches on their way through the blocks."""


@dataclass(frozen=True)
class Turn:
    """Modules of a block that are solved from one look at the samples.

    Attributes:
        block: The block.
        place: Name of the place at which the expert's tensors are read.
        tensors: Names of these tensors.
        runs_experts: Whether experts may run in it.
    """

    block: str
    place: str
    tensors: Sequence[str]
    runs_experts: ClassVar[bool] = True


class Rule(Protocol):
    """One method of changing blocks in forward order, applied to one problem.

    Attributes:
        runs_model: Whether the model's blocks run, each on what the changed ones before it gave.
        runs_experts: Whether each expert's blocks run on the expert's own features.
        shows_drift_before: Whether the drift of the merged block is logged, which runs it whole.
    """

    runs_model: bool
    runs_experts: bool
    shows_drift_before: bool
    _problem: Problem

    def tensors_before(self, stage: int) -> list[str]:
        """Names of the expert's tensors that its way to a stage's first block needs."""
        return self._problem.tensors_before(stage) if self.runs_experts else []

    def weigh(self, task: str, stage: int, expert: nn.Module, inputs: Any, batch: Batch) -> None:
        """Find the weights of a batch's rows, before its way through a stage."""

    def visits(self, block: str) -> dict[str, list[str]]:
        """Names of the expert's tensors that a block needs, by the place of their reading."""
        ...

    def base_visits(self, block: str) -> dict[str, list[str]]:
        """Names of the base's tensors that its anchors need, by the place of their reading."""
        return {}

    def turns(self, block: str, streams: Streams) -> Iterable[Any]:
        """The turns in which a block changes; the samples are at the block when it is asked for."""
        ...

    def opened(self, task: str, names: Sequence[str]) -> AbstractContextManager[nn.Module]:
        """Context with a model that holds some of the expert's tensors, as `visits` named them."""
        ...

    def task_sums(self, task: str, turn: Any, expert: nn.Module) -> Any:
        """Sums of one task in a turn, empty."""
        ...

    def record(self, turn: Any, expert: nn.Module, batch: Batch) -> tuple[Recording, Any]:
        """Run a batch through a block; the inputs to sum, and what is summed of the expert's."""
        ...

    def follow(self, block: str, expert: nn.Module, batch: Batch) -> Recording:
        """Run a batch through the expert's block alone."""
        ...

    def advance(self, block: str, batch: Batch) -> tuple[Tensor, Any]:
        """Run a batch through the changed block; its hidden output and the next block's input."""
        return self._problem.step(self._problem.model, block, batch.cal)

    def block_sums(self, turn: Any) -> Solvable:
        """Sums of a turn over tasks, empty."""
        ...


class FeatCalRule(Rule):
    """FeatCal: the model's features on their way to the experts' (Eqs. 10 to 17)."""

    runs_model = shows_drift_before = True

    def __init__(self, problem: Problem, team: Alone | Team) -> None:
        """Apply to a problem.

        Args:
            problem: The problem.
            team: The processes that share the work.
        """
        self._problem = problem
        self._recorder = Recorder()
        self._norms = BatchNorms(problem, team, "{} · batch norms")
        self.runs_experts = problem.settings.runs_experts
        self._last = problem.stages[-1][-1]
        # No block needs what these blocks of an expert give.
        closing = problem.stages[-1:] if problem.family.hands_on else problem.stages
        self._closing = {stage[-1] for stage in closing}

    def visits(self, block: str) -> dict[str, list[str]]:
        """All of the block where experts run, else what the calibrated modules hold."""
        problem = self._problem
        runs = self.runs_experts
        needed = problem.tensors_of(block) if runs else problem.calibrated_in(block)
        return {block: needed} | self._norms.visits(block)

    def base_visits(self, block: str) -> dict[str, list[str]]:
        """All parameters of the calibrated modules."""
        names = [n for site in self._problem.modules[block].sites for n in site.names]
        return {block: names} | self._norms.visits(block)

    def turns(self, block: str, streams: Streams) -> Iterator[Turn | NormTurn]:
        """One with all modules, and before and after it one for each BatchNorm."""
        first = next((batches[0] for batches in streams.values() if batches), None)
        order = self._norms.order(block, first)
        yield from self._norms.statistics(block, order)
        yield Turn(block, block, self.visits(block)[block])
        yield from self._norms.turns(block, order)

    def opened(self, task: str, names: Sequence[str]) -> AbstractContextManager[nn.Module]:
        """The expert with what the visit needs."""
        return self._problem.experts[task].loaded(names)

    def task_sums(
        self, task: str, turn: Turn | NormTurn, expert: nn.Module
    ) -> TaskSums | ChannelSums:
        """Sums in the precision that lambda asks for."""
        if isinstance(turn, NormTurn):
            return self._norms.task_sums(task, turn)
        problem, settings = self._problem, self._problem.settings
        return TaskSums(
            turn.block,
            task,
            problem.modules[turn.block].sites,
            demo_weights=settings.token_weights == "demo_last_block" and turn.block == self._last,
            mix_alpha=settings.mix_alpha,
            expert=expert,
            dtype=problem.row_dtype,
            mean_dtype=problem.fold_dtype,
        )

    def record(
        self, turn: Turn | NormTurn, expert: nn.Module, batch: Batch
    ) -> tuple[Recording, Recording | None]:
        """Run both sides, each on its own features; for a BatchNorm the model alone."""
        if isinstance(turn, NormTurn):
            return self._norms.record(turn, batch)
        problem, exp = self._problem, None
        routed = RoutedInputs(turn.block, problem.modules[turn.block], problem.autocast)
        names = [site.name for site in routed.modules.sites] + routed.noted
        cal = self._run(problem.model, turn.block, batch.cal, names, routed.outputs, to_end=False)
        if self.runs_experts:
            exp = self.follow(turn.block, expert, batch)
            if problem.settings.log_drift:
                batch.exp_hidden = exp.hidden
        routed.complete(problem.model, cal, expert, exp, batch.valid)
        return cal, exp

    def follow(self, block: str, expert: nn.Module, batch: Batch) -> Recording:
        """Run the expert's block, with hooks, as some modules compute otherwise with them."""
        modules = self._problem.modules[block]
        names = [site.name for site in modules.sites if not site.routed]
        names += [mixture.router for mixture in modules.mixtures]
        exp = self._run(expert, block, batch.exp, names, to_end=block not in self._closing)
        batch.exp = exp.following
        return exp

    def _run(
        self,
        model: nn.Module,
        block: str,
        call: Any,
        names: Sequence[str],
        outputs: Outputs = NO_OUTPUTS,
        *,
        to_end: bool,
    ) -> Recording:
        """Run a block; `to_end` False: only its modules' inputs, and what is logged, are needed."""
        problem = self._problem
        may_stop = problem.family.same_calls and not problem.modules[block].mixtures
        return self._recorder.record(
            model,
            names,
            partial(problem.step, model, block, call),
            needs_output=to_end or not may_stop or problem.settings.log_drift,
            outputs=outputs,
        )

    def block_sums(self, turn: Turn | NormTurn) -> BlockSums | BatchNormSums:
        """FeatCal's running sums."""
        if isinstance(turn, NormTurn):
            return self._norms.block_sums(turn)
        return BlockSums(self._problem, turn.block)
