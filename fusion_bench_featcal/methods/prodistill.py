"""ProDistill (arXiv 2502.12706): coefficients of task vectors trained block by block by gradients.

A reference line for methods in closed form: the same few unlabeled samples, the same order of
blocks, but Adam in place of a solve. Every entry of every parameter of a block has a coefficient
for each task, `W = W_0 + sum_i lambda_i * (W_i - W_0)`, all 0.3 at first. A block is trained so
that its output, given what the trained blocks before it give, is near that of each sample's expert,
given its own features. Parameters outside the blocks keep the coefficient 0.3.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fusion_bench_featcal.core.moments import moment_dtype
from fusion_bench_featcal.engine.problem import Problem
from fusion_bench_featcal.engine.recording import Recorder, Recording
from fusion_bench_featcal.engine.rows import CountedRows, rows_of
from fusion_bench_featcal.engine.rules import Rule, Streams, Turn
from fusion_bench_featcal.engine.samples import Batch
from fusion_bench_featcal.experts import names_under
from fusion_bench_featcal.methods.training import shuffled_batches, task_generator
from fusion_bench_featcal.setting_checks import POSITIVE, Check, integer, is_number, problems_of
from fusion_bench_featcal.settings import CalibrationError

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ProDistilling:
    """Settings of ProDistill; the defaults are its authors' for images.

    Attributes:
        coefficient: Of every task vector at first, and outside the blocks for good.
        learning_rate: Adam's step size, > 0.
        epochs: Passes over the samples for each block, >= 1.
        batches_per_step: Batches whose losses are added up for an update, >= 1: with 16 samples in
            a batch the authors' 128, of all tasks in random order.
    """

    coefficient: float = 0.3
    learning_rate: float = 1e-2
    epochs: int = 100
    batches_per_step: int = 8

    checks: ClassVar[dict[str, Check]] = {
        "coefficient": ("a finite number", is_number),
        "learning_rate": POSITIVE,
        "epochs": integer(1),
        "batches_per_step": integer(1),
    }

    def __post_init__(self) -> None:
        if problems := problems_of(self, self.checks):
            raise ValueError("; ".join(f"method.{problem}" for problem in problems))

    @property
    def weighs_gains(self) -> bool:
        """No: every parameter of a block is trained."""
        return False

    def start(self, problem: Problem, base: nn.Module, samples: Any) -> None:
        """Give the model the first coefficient everywhere (task arithmetic)."""
        for name, tensor in problem.model.state_dict().items():
            if tensor.is_floating_point():
                wide = moment_dtype(tensor.dtype)
                start = tensor.to(wide)
                steps = (
                    expert.tensor(name).to(wide) - start for expert in problem.experts.values()
                )
                tensor.copy_(start + self.coefficient * sum(steps))

    def rule(self, problem: Problem, base: nn.Module) -> "ProDistillRule":
        """The rule of the block loop."""
        return ProDistillRule(problem, self, base)


@dataclass(frozen=True)
class BlockLesson:
    """Input of a block in the trained model, and output of the sample's expert on its own."""

    call: Any
    target: Tensor
    rows: CountedRows | None


class TaskLessons(list[BlockLesson]):
    """The lessons of one task at one block, collected while its samples pass by."""

    def add(self, *_: Any) -> None:
        """Sum nothing: the rule has added the lesson."""

    def check(self) -> None:
        """Accept anything: training finds what is not finite."""


class ProDistillRule(Rule):
    """Runs model and experts on their own features, and trains each block."""

    runs_model = runs_experts = True
    shows_drift_before = False

    def __init__(self, problem: Problem, method: ProDistilling, base: nn.Module) -> None:
        self._problem, self._method, self._base = problem, method, base
        self._recorder = Recorder()
        self._lessons = TaskLessons()

    def visits(self, block: str) -> dict[str, list[str]]:
        """All that running the block needs."""
        return {block: self._problem.tensors_of(block)}

    def turns(self, block: str, streams: Streams) -> list[Turn]:
        """One."""
        return [Turn(block, block, self.visits(block)[block])]

    def opened(self, task: str, names: Sequence[str]) -> Any:
        """The expert with its block."""
        return self._problem.experts[task].loaded(names)

    def task_sums(self, task: str, turn: Turn, expert: nn.Module) -> TaskLessons:
        """No lesson yet."""
        self._lessons = TaskLessons()
        return self._lessons

    def record(self, turn: Turn, expert: nn.Module, batch: Batch) -> tuple[Recording, None]:
        """Run the expert's block, and note the lesson; the model's runs in training."""
        call = batch.cal
        hidden = self.follow(turn.block, expert, batch).hidden
        assert hidden is not None  # the pass ran to its end
        self._lessons.append(BlockLesson(call, rows_of(hidden, batch.valid), batch.valid))
        return Recording(output=(hidden, None)), None  # of which rows are counted

    def follow(self, block: str, expert: nn.Module, batch: Batch) -> Recording:
        """Run the expert's block on the expert's features."""
        recording = self._recorder.record(
            expert, [], lambda: self._problem.step(expert, block, batch.exp)
        )
        batch.exp = recording.following
        return recording

    def block_sums(self, turn: Turn) -> "BlockTraining":
        """The block's training, which takes the tasks one by one."""
        return BlockTraining(self._problem, self._method, self._base, turn.block)


class _Step(nn.Module):
    """One block of a model as a module of its own, whose parameters may be replaced in a call."""

    def __init__(self, problem: Problem, block: str) -> None:
        super().__init__()
        self.model = problem.model
        self._step = lambda call: problem.step(problem.model, block, call)[0]

    def forward(self, call: Any) -> Tensor:
        return self._step(call)


class BlockTraining:
    """Coefficients of one block's task vectors, and the lessons that they are trained by."""

    def __init__(
        self, problem: Problem, method: ProDistilling, base: nn.Module, block: str
    ) -> None:
        """Start with no task."""
        self._problem, self._method, self._block = problem, method, block
        model = dict(problem.model.named_parameters())
        self._start = {
            name: base.get_parameter(name).detach().to(problem.device).to(_wide(model[name]))
            for name in names_under(model, [block])
        }
        self._vectors: dict[str, list[Tensor]] = {name: [] for name in self._start}
        self._lessons: list[BlockLesson] = []

    def add(self, sums: TaskLessons, expert: nn.Module) -> None:
        """Take a task: its lessons, and the expert's task vector in this block."""
        for name, start in self._start.items():
            own = expert.get_parameter(name).detach().to(start)
            self._vectors[name].append(own - start)
        self._lessons += sums

    @torch.inference_mode(False)  # tensors made in inference mode cannot be trained
    @torch.enable_grad()
    def solve(self) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        """Train, and return the new parameters; nothing is logged of them.

        Raises:
            CalibrationError: If the training diverges, naming the setting.
        """
        method = self._method
        vectors = {name: torch.stack(parts) for name, parts in self._vectors.items()}
        coefficients = {
            name: torch.full_like(stacked, method.coefficient).requires_grad_()
            for name, stacked in vectors.items()
        }
        optimizer = torch.optim.Adam(coefficients.values(), lr=method.learning_rate)
        run, losses = _Step(self._problem, self._block), []
        for chosen in self._drawn():
            optimizer.zero_grad()
            parameters = self._mixed(vectors, coefficients)
            loss = torch.stack([_loss(run, parameters, lesson) for lesson in chosen]).sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        found = {name: value.detach() for name, value in self._mixed(vectors, coefficients).items()}
        if not all(bool(torch.isfinite(value).all()) for value in found.values()):
            raise CalibrationError(
                f"block {self._block}: ProDistill diverged, its weights are not finite. Lower "
                f"method.learning_rate (now {method.learning_rate})"
            )
        log.info("%s: loss %.4g, at the end %.4g", self._block, losses[0], losses[-1])
        return found, []

    def _drawn(self) -> Iterator[list[BlockLesson]]:
        """Lessons of each update, of all tasks in random order."""
        method, number = self._method, len(self._lessons)
        steps = method.epochs * -(-number // method.batches_per_step)
        generator = task_generator(self._problem.settings.seed, self._block, "batches")
        for positions in shuffled_batches(number, method.batches_per_step, steps, generator):
            yield [self._lessons[int(position)] for position in positions]

    def _mixed(
        self, vectors: Mapping[str, Tensor], coefficients: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Parameters with the coefficients of now."""
        return {
            name: start + (coefficients[name] * vectors[name]).sum(0)
            for name, start in self._start.items()
        }


def _wide(parameter: Tensor) -> torch.dtype:
    return moment_dtype(parameter.dtype)


def _loss(run: _Step, parameters: Mapping[str, Tensor], lesson: BlockLesson) -> Tensor:
    """Squared distance of the block's output to the expert's, summed over rows."""
    own = dict(run.model.named_parameters())
    replaced = {f"model.{name}": value.to(own[name].dtype) for name, value in parameters.items()}
    hidden = rows_of(functional_call(run, replaced, (lesson.call,)), lesson.rows)
    return (hidden.float() - lesson.target.float()).square().sum()
