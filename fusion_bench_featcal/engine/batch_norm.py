"""BatchNorm: statistics of the calibrated model's own features, then gain and shift.

The model keeps one mean and variance a channel for all tasks: those of a mixture in which every
task weighs the same. With `m_i` and `s_i` task i's mean and mean square of the features that a
BatchNorm receives, over N tasks,

    mean = sum m_i / N        variance = sum s_i / N - mean^2

Gain and shift follow as those of a LayerNorm (Eqs. 56-59), with `z = (x - mean) / sqrt(variance +
eps)`: `mean z` and `mean z^2` are functions of `m_i` and `s_i`. What a BatchNorm receives depends
on every BatchNorm before it, so that each has a turn of its own, in the order in which they run.

Modules behind a BatchNorm are solved from what they receive. Where all of a block are solved from
one look at it, the statistics are therefore estimated twice: first of the merged modules, whose
merged statistics fit none of their features, and then of the solved ones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fusion_bench_featcal.core import NormMoments, NormSystem, extrapolate_anchor
from fusion_bench_featcal.core.cholesky import solve_dtype
from fusion_bench_featcal.core.finite import not_finite
from fusion_bench_featcal.engine.checks import DeferredCheck, run_checks
from fusion_bench_featcal.engine.modules import Site
from fusion_bench_featcal.engine.problem import Problem
from fusion_bench_featcal.engine.recording import Recorder, Recording
from fusion_bench_featcal.engine.rows import CountedRows
from fusion_bench_featcal.engine.samples import Batch
from fusion_bench_featcal.engine.task_sums import not_finite_features
from fusion_bench_featcal.engine.team import Alone, Solved, Team
from fusion_bench_featcal.settings import CalibrationError


@dataclass(frozen=True)
class NormTurn:
    """A turn in which one BatchNorm changes.

    Attributes:
        block: The block.
        place: Name of the place at which the expert's tensors are read.
        tensors: Names of these tensors: gain and shift, if they are calibrated.
        site: The BatchNorm.
        runs_experts: Whether experts may run in it.
    """

    block: str
    place: str
    tensors: Sequence[str]
    site: Site
    runs_experts: ClassVar[bool] = False


class BatchNorms:
    """Turns of a block's BatchNorms, for any rule."""

    def __init__(self, problem: Problem, team: Alone | Team, place: str) -> None:
        """Apply to a problem.

        Args:
            problem: The problem.
            team: The processes that share the work.
            place: What the place is called at which a block's gains and shifts are read, with
                `{}` for the block.
        """
        self._problem, self._team, self._place = problem, team, place
        self._recorder = Recorder()

    def visits(self, block: str) -> dict[str, list[str]]:
        """Names of the gains and shifts of a block, by the place of their reading."""
        sites = self._problem.modules[block].batch_norms
        names = [name for site in sites for name in site.names]
        return {self._place.format(block): names} if sites else {}

    def order(self, block: str, batch: Batch | None) -> list[str]:
        """Names of a block's calibrated modules in the order in which they run.

        Those of the first process, so that all have the same. Empty for a block without BatchNorm.

        Args:
            block: The block.
            batch: A batch of any task; None: this process has none.

        Raises:
            CalibrationError: If a BatchNorm does not run once.
        """
        modules = self._problem.modules[block]
        if not modules.batch_norms:
            return []
        called: dict[str, Any] = {}
        if batch is not None:
            names = [site.name for site in (*modules.sites, *modules.batch_norms)]
            run = partial(self._problem.step, self._problem.model, block, batch.cal)
            called = self._recorder.record(self._problem.model, names, run).calls
            for site in modules.batch_norms:
                if len(called.get(site.name, ())) != 1:
                    raise _unfit(block, site.name, f"runs {len(called.get(site.name, ()))} times")
        return list(self._team.gather(list(called))[0])

    def turns(self, block: str, names: Sequence[str]) -> Iterator[NormTurn]:
        """The turns of those of some modules that are BatchNorms."""
        sites = {site.name: site for site in self._problem.modules[block].batch_norms}
        for name in names:
            if name in sites:
                place = self._place.format(block)
                yield NormTurn(block, place, sites[name].names, sites[name])

    def statistics(self, block: str, names: Sequence[str]) -> Iterator[NormTurn]:
        """Turns in which statistics alone change; none where they stay merged."""
        if self._problem.settings.batch_norm == "reestimate":
            for turn in self.turns(block, names):
                yield replace(turn, tensors=(), site=replace(turn.site, has_bias=False))

    def record(self, turn: NormTurn, batch: Batch) -> tuple[Recording, None]:
        """Run the model's block as far as the BatchNorm."""
        problem = self._problem
        return self._recorder.record(
            problem.model,
            [turn.site.name],
            partial(problem.step, problem.model, turn.block, batch.cal),
            stop_after=1 if problem.family.same_calls else None,
        ), None

    def task_sums(self, task: str, turn: NormTurn) -> "ChannelSums":
        """Sums of one task."""
        return ChannelSums(task, turn)

    def block_sums(self, turn: NormTurn) -> "BatchNormSums":
        """Sums of all tasks."""
        return BatchNormSums(self._problem, turn, self._team)


class NormsInOrder:
    """Turns of a block's BatchNorms, between those of its other modules.

    Attributes:
        done: Names of the BatchNorms that had their turns.
    """

    def __init__(self, norms: BatchNorms, block: str, batch: Batch | None) -> None:
        """Find the order in which modules run."""
        self._norms, self._block = norms, block
        self._waiting = norms.order(block, batch)
        self.done: list[str] = []

    def statistics(self) -> Iterator[NormTurn]:
        """Turns in which statistics alone change, before anything else does."""
        return self._norms.statistics(self._block, self._waiting)

    def before(self, module: str | None) -> Iterator[NormTurn]:
        """The turns of those that run before a module and had none yet; None: of all the rest."""
        end = self._waiting.index(module) if module in self._waiting else None
        names, self._waiting = self._waiting[:end], [] if end is None else self._waiting[end:]
        for turn in self._norms.turns(self._block, names):
            yield turn
            self.done.append(turn.site.name)


class ChannelSums:
    """One task's sums over what a BatchNorm receives.

    Attributes:
        task: The task.
        sums: Number of rows, and by channel their sum and sum of squares, `[2 d + 1]`; None: no
            batch was added.
    """

    def __init__(self, task: str, turn: NormTurn) -> None:
        """Start with no rows."""
        self.task, self._turn = task, turn
        self.sums: Tensor | None = None

    def add(
        self, model: nn.Module, cal: Recording, exp: None, valid: CountedRows | None, *rest: Any
    ) -> None:
        """Add a batch.

        Raises:
            CalibrationError: If only some positions count: BatchNorm takes its statistics of all.
        """
        name = self._turn.site.name
        if valid is not None:
            raise _unfit(self._turn.block, name, "is BatchNorm, and some positions are padding")
        (x,) = cal.of(name)
        rows = x.movedim(1, -1).reshape(-1, x.shape[1]).to(solve_dtype(x.device))
        count = rows.new_full((1,), len(rows))
        new = torch.cat([count, rows.sum(0), rows.square().sum(0)])
        self.sums = new if self.sums is None else self.sums + new


class BatchNormSums:
    """Sums over all tasks of what a BatchNorm receives, and its new tensors."""

    def __init__(self, problem: Problem, turn: NormTurn, team: Alone | Team) -> None:
        """Start with no task."""
        self._problem, self._turn, self._team = problem, turn, team
        module: Any = problem.model.get_submodule(turn.site.name)
        self._module, width = module, module.num_features
        wide = solve_dtype(problem.device)
        # By task: number of rows, sums, sums of squares; gain and shift, times the number of rows.
        self._sums = torch.zeros(
            len(problem.tasks), 1 + 4 * width, dtype=wide, device=problem.device
        )

    def add(self, sums: ChannelSums, expert: nn.Module) -> None:
        """Add what this process has of one task."""
        if sums.sums is None:
            return
        row = self._sums[self._problem.tasks.index(sums.task)]
        known = len(sums.sums)
        row[:known] = sums.sums
        if self._turn.site.has_bias:
            affine: list[Tensor] = [expert.get_parameter(n) for n in self._turn.site.names]
            row[known:] = torch.cat(affine).to(row) * row[0]

    def solve(self) -> Solved:
        """New statistics, gain and shift, as the settings ask for; one process finds them."""
        updates: dict[str, Tensor] = {}
        if self._team.add_up([self._sums]):
            run_checks([self._check(task, row) for task, row in self._rows()])
            updates = self._found()
        return dict(self._team.spread(updates, self._problem.model)), []

    def _rows(self) -> Iterator[tuple[str, Tensor]]:
        yield from zip(self._problem.tasks, self._sums, strict=True)

    def _check(self, task: str, row: Tensor) -> DeferredCheck:
        place = f"task {task}, block {self._turn.block}, module {self._turn.site.name}"
        return DeferredCheck(not_finite(row), not_finite_features(place, task))

    def _found(self) -> dict[str, Tensor]:
        name, module = self._turn.site.name, self._module
        count, rest = self._sums[:, :1], self._sums[:, 1:]
        first, second, gain, shift = (rest / count).chunk(4, dim=1)
        mean, variance = module.running_mean.to(first), module.running_var.to(first)
        updates: dict[str, Tensor] = {}
        if self._problem.settings.batch_norm == "reestimate":
            mean = first.mean(0)
            variance = (second.mean(0) - mean.square()).clamp_min(0)
            updates = {f"{name}.running_mean": mean, f"{name}.running_var": variance}
            # What is stored may be rounded, and gain and shift shall make up for that.
            mean, variance = (
                value.to(buffer.dtype).to(value)
                for value, buffer in (
                    (mean, module.running_mean),
                    (variance, module.running_var),
                )
            )
        if self._turn.site.has_bias:
            scale = (variance + module.eps).rsqrt()
            z = (first - mean) * scale
            z_square = (second - 2 * mean * first + mean.square()) * scale.square()
            updates |= self._affine(z, z_square, gain, shift)
        return updates

    def _affine(
        self, z: Tensor, z_square: Tensor, gain: Tensor, shift: Tensor
    ) -> dict[str, Tensor]:
        """Gain and shift by name, from each task's means of `z` and `z^2`, `[tasks, d]`."""
        settings, system, one = self._problem.settings, NormSystem(), z.new_ones(())
        for index in range(len(z)):
            moments = NormMoments(sum_z=z[index], sum_z_sq=z_square[index], weight=one)
            system.fold(moments, (gain[index], shift[index]))
        names = self._turn.site.names
        anchor = tuple(self._anchor(name) for name in names)
        solved = system.solve(
            (anchor[0], anchor[1]), ridge_lambda=settings.ridge_lambda, eps=settings.eps
        )
        return dict(zip(names, solved, strict=True))

    def _anchor(self, name: str) -> Tensor:
        base, rho = self._problem.base, self._problem.settings.anchor_rho
        merged = self._problem.model.get_parameter(name).detach()
        return extrapolate_anchor(merged, base.tensor(name) if base and rho != 1 else None, rho)


def _unfit(block: str, name: str, text: str) -> CalibrationError:
    return CalibrationError(
        f"block {block}: module {name} {text}. Exclude it: method.modules=['!{name}']"
    )
