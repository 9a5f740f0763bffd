"""Rules: whose features a block's sums are made of, and what the sums become."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

from torch import nn

from fusion_bench_featcal.engine.block import BlockSums
from fusion_bench_featcal.engine.problem import Problem
from fusion_bench_featcal.engine.recording import Recorder, Recording
from fusion_bench_featcal.engine.samples import Batch
from fusion_bench_featcal.engine.task_sums import TaskSums
from fusion_bench_featcal.engine.team import Solvable


class Rule(Protocol):
    """One method of changing blocks in forward order, applied to one problem.

    Attributes:
        runs_model: Whether the model's blocks run, each on what the changed ones before it gave.
        runs_experts: Whether each expert's blocks run on the expert's own features.
    """

    runs_model: bool
    runs_experts: bool

    def tensors(self, block: str) -> list[str]:
        """Names of the expert's tensors that a visit to a block needs."""
        ...

    def opened(self, task: str, names: Sequence[str]) -> AbstractContextManager[nn.Module]:
        """Context with a model that holds some of the expert's tensors, as `tensors` named them."""
        ...

    def task_sums(self, task: str, block: str, expert: nn.Module) -> TaskSums:
        """Sums of one task over one block, empty."""
        ...

    def record(
        self, block: str, expert: nn.Module, batch: Batch
    ) -> tuple[Recording, Recording | None]:
        """Run a batch through a block; the inputs to sum, and the expert's where they are used."""
        ...

    def follow(self, block: str, expert: nn.Module, batch: Batch) -> Recording:
        """Run a batch through the expert's block alone."""
        ...

    def block_sums(self, block: str) -> Solvable:
        """Sums of one block over tasks, empty."""
        ...


class FeatCalRule:
    """FeatCal: the model's features on their way to the experts' (Eqs. 10 to 17)."""

    runs_model = True

    def __init__(self, problem: Problem) -> None:
        """Apply to a problem."""
        self._problem = problem
        self._recorder = Recorder()
        self.runs_experts = problem.settings.runs_experts
        self._last = problem.stages[-1][-1]
        # No block needs what these blocks of an expert give.
        closing = problem.stages[-1:] if problem.family.hands_on else problem.stages
        self._closing = {stage[-1] for stage in closing}

    def tensors(self, block: str) -> list[str]:
        """All of the block where experts run, else those of the calibrated modules."""
        problem = self._problem
        return problem.tensors_of(block) if self.runs_experts else problem.calibrated_in(block)

    def opened(self, task: str, names: Sequence[str]) -> AbstractContextManager[nn.Module]:
        """The expert with what the visit needs."""
        return self._problem.experts[task].loaded(names)

    def task_sums(self, task: str, block: str, expert: nn.Module) -> TaskSums:
        """Sums in the precision that lambda asks for."""
        problem, settings = self._problem, self._problem.settings
        return TaskSums(
            block,
            task,
            problem.modules[block].sites,
            demo_weights=settings.token_weights == "demo_last_block" and block == self._last,
            mix_alpha=settings.mix_alpha,
            expert=expert,
            dtype=problem.row_dtype,
            mean_dtype=problem.fold_dtype,
        )

    def record(
        self, block: str, expert: nn.Module, batch: Batch
    ) -> tuple[Recording, Recording | None]:
        """Run both sides, each on its own features."""
        cal = self._run(self._problem.model, block, batch.cal, to_end=False)
        if not self.runs_experts:
            return cal, None
        exp = self.follow(block, expert, batch)
        if self._problem.settings.log_drift:
            batch.exp_hidden = exp.hidden
        return cal, exp

    def follow(self, block: str, expert: nn.Module, batch: Batch) -> Recording:
        """Run the expert's block, with hooks, as some modules compute otherwise with them."""
        exp = self._run(expert, block, batch.exp, to_end=block not in self._closing)
        batch.exp = exp.following
        return exp

    def _run(self, model: nn.Module, block: str, call: Any, *, to_end: bool) -> Recording:
        """Run a block; `to_end` False: only its modules' inputs, and what is logged, are needed."""
        problem = self._problem
        may_stop = problem.family.same_calls and not problem.settings.log_drift
        names = [site.name for site in problem.modules[block].sites]
        return self._recorder.record(
            model,
            names,
            partial(problem.step, model, block, call),
            needs_output=to_end or not may_stop,
        )

    def block_sums(self, block: str) -> BlockSums:
        """FeatCal's running sums."""
        return BlockSums(self._problem, block)
