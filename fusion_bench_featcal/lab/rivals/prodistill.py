"""ProDistill (arXiv 2502.12706): coefficients of task vectors trained block by block by gradients.

A reference line for methods in closed form: the same few unlabeled samples, the same order of
blocks, but Adam in place of a solve. Every entry of every parameter of a block has a coefficient
for each task, `W = W_0 + sum_i lambda_i * (W_i - W_0)`, all 0.3 at first. A block is trained so
that its output, given what the trained blocks before it give, is near that of each sample's expert,
given its own features. Parameters outside the blocks keep the coefficient 0.3.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.experts import ExpertSource, names_under
from fusion_bench_featcal.lab.rivals.blockwise import BlockStep, merge_blockwise
from fusion_bench_featcal.lab.rivals.training import shuffled_batches, task_generator
from fusion_bench_featcal.modules.groups import Group
from fusion_bench_featcal.problem import Autocast
from fusion_bench_featcal.rules.merging import MergingRule
from fusion_bench_featcal.rules.rule import GroupSums, Linear
from fusion_bench_featcal.setting_fields import check_settings, setting
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings
from fusion_bench_featcal.streams.batch import Batch
from fusion_bench_featcal.streams.rows import CountedRows, rows_of
from fusion_bench_featcal.streams.streams import Streams

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ProDistilling(MergingRule):
    """Settings of ProDistill; the defaults are its authors' for images."""

    coefficient: float = setting(
        0.3, "Of every task vector at first, and outside the blocks for good."
    )
    learning_rate: float = setting(1e-2, "Adam's step size.", gt=0)
    epochs: int = setting(100, "Passes over the samples for each block.", ge=1)
    batches_per_step: int = setting(
        8,
        "Batches of any task whose losses are added up for an update. 8 of 16 samples are the "
        "authors' 128.",
        ge=1,
    )

    def __post_init__(self) -> None:
        check_settings(self)

    def turns(self, groups: Sequence[Any]) -> list[Sequence[Any]]:
        """Solve nothing: every parameter of a block is trained."""
        return []

    def sums(self, group: Any, merged: Linear, base: Linear | None) -> GroupSums:
        """Refuse: no turn has a group."""
        raise NotImplementedError

    def start_scale(self, tasks: int) -> float:
        """Return that of task arithmetic with the first coefficient."""
        return self.coefficient * tasks


def merge_by_training(
    base: nn.Module,
    experts: Mapping[str, nn.Module | ExpertSource],
    batches: Mapping[str, Iterable[Any]],
    settings: FeatCalSettings,
    method: ProDistilling,
    *,
    device: torch.device | str | None = None,
    autocast: Autocast | None = None,
) -> nn.Module:
    """Merge experts by ProDistill. Arguments, result and errors are those of `merge_blockwise`."""
    training = partial(Training, base=base, method=method, seed=settings.seed)
    models = base, experts, batches
    return merge_blockwise(
        *models, settings, method, device=device, autocast=autocast, streams_type=training
    )


@dataclass(frozen=True)
class Lesson:
    """Input of a block in the trained model, and output of the sample's expert on its own."""

    call: Any
    target: Tensor
    rows: CountedRows | None


@dataclass(frozen=True)
class Training(Streams):
    """Streams that train each block before its samples pass on.

    Attributes:
        base: The base model.
        method: The settings.
        seed: Seeds the order of the samples.
    """

    base: nn.Module = field(default_factory=nn.Module)
    method: ProDistilling = field(default_factory=ProDistilling)
    seed: int = 0

    @property
    def runs_experts(self) -> bool:
        """Return True: their outputs are the targets."""
        return True

    def follow(
        self, task: str, batch: Batch, block: str, expert: nn.Module, groups: Iterable[Group]
    ) -> None:
        """Run a batch through the expert's block and note its output."""
        hidden, batch.exp = self.runner.step(expert, block, batch.exp)
        batch.noted[block] = [hidden]

    def advance(self, block: str) -> None:
        """Train a block and run all batches through it."""
        lessons = []
        for batch in (batch for task in self.tasks for batch in self.visits(task)):
            (expert,), counted = batch.noted[block], batch.rows.counted
            lessons.append(Lesson(batch.cal, rows_of(expert, counted), counted))
        tensors = self.model.state_dict()
        for name, value in self._trained(block, lessons).items():
            tensors[name].copy_(value)
        super().advance(block)

    @torch.inference_mode(False)  # tensors made in inference mode cannot be trained
    @torch.enable_grad()
    def _trained(self, block: str, lessons: Sequence[Lesson]) -> dict[str, Tensor]:
        """Train the coefficients of a block; its parameters.

        Raises:
            CalibrationError: If the training diverges, naming the setting.
        """
        starts, vectors = self._task_vectors(block)
        coefficients = {
            name: torch.full_like(stacked, self.method.coefficient).requires_grad_()
            for name, stacked in vectors.items()
        }

        def mixed() -> dict[str, Tensor]:
            return {n: starts[n] + (coefficients[n] * vectors[n]).sum(0) for n in starts}

        optimizer = torch.optim.Adam(coefficients.values(), lr=self.method.learning_rate)
        step, losses = BlockStep(self.runner, self.model, block), []
        for chosen in self._drawn(block, lessons):
            optimizer.zero_grad()
            parameters = mixed()
            loss = torch.stack([_loss(step, parameters, lesson) for lesson in chosen]).sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        trained = {name: value.detach() for name, value in mixed().items()}
        if not all(bool(torch.isfinite(value).all()) for value in trained.values()):
            raise CalibrationError(
                f"block {block}: ProDistill diverged, its weights are not finite. Lower "
                f"method.learning_rate (now {self.method.learning_rate})"
            )
        log.info("%s: loss %.4g, at the end %.4g", block, losses[0], losses[-1])
        return trained

    def _task_vectors(self, block: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the base's parameters of a block, and the experts' steps from them, `[i, ...]`."""
        base = dict(self.runner.family.view.shown(self.base).named_parameters())
        starts, vectors = {}, {}
        for name in names_under(dict(self.model.named_parameters()), [block]):
            start = base[name].detach().to(self.runner.device)
            starts[name] = start = start.to(torch.promote_types(start.dtype, torch.float32))
            experts = [expert.tensor(name).to(start) for expert in self.experts.values()]
            vectors[name] = torch.stack(experts) - start
        return starts, vectors

    def _drawn(self, block: str, lessons: Sequence[Lesson]) -> Iterator[list[Lesson]]:
        """Yield the lessons of each update, of all tasks in random order."""
        size = self.method.batches_per_step
        steps = self.method.epochs * -(-len(lessons) // size)
        generator = task_generator(self.seed, block, "batches")
        for positions in shuffled_batches(len(lessons), size, steps, generator):
            yield [lessons[int(position)] for position in positions]


def _loss(step: BlockStep, parameters: Mapping[str, Tensor], lesson: Lesson) -> Tensor:
    """Return the squared distance of the block's output to the expert's, summed over rows."""
    hidden = rows_of(step.run_with(parameters, lesson.call), lesson.rows)
    return (hidden.float() - lesson.target.float()).square().sum()
