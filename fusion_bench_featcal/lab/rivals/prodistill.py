"""ProDistill: coefficients of task vectors trained block by block by gradients.

A parameter is `W_0 + sum_i c_i * (W_i - W_0)`, with a coefficient for each entry. A block's inputs
are the outputs of the trained blocks before it, and its targets are the outputs of each sample's
expert.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.experts import names_under
from fusion_bench_featcal.families.open_clip import split
from fusion_bench_featcal.lab.rivals import training
from fusion_bench_featcal.lab.rivals.mergers import BlockStep, Merger
from fusion_bench_featcal.lab.rivals.registry import method
from fusion_bench_featcal.modules.groups import Group
from fusion_bench_featcal.modules.models import load_updates
from fusion_bench_featcal.rules.rule import GroupSums, Linear
from fusion_bench_featcal.setting_fields import setting
from fusion_bench_featcal.streams.batch import Batch, CountedRows, rows_of
from fusion_bench_featcal.streams.streams import Streams

log = logging.getLogger(__name__)

Lesson = tuple[Any, CountedRows | None, Tensor]
"""A block's arguments, the counted positions of its output, and the expert's output there."""


@method(
    "featcal_baselines/prodistill",
    source="Xu et al., ICML 2025, arXiv 2502.12706",
    without=["modules"],  # all parameters of the blocks are trained
)
class ProDistill(Merger):
    """ProDistill: coefficients of the experts' task vectors, trained by gradients.

    There is one for each entry of every parameter. They are trained block by block towards the
    experts' features.
    """

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

    def turns(self, groups: Sequence[Any]) -> list[Sequence[Any]]:
        """Return no turn, because every parameter of a block is trained."""
        return []

    def sums(self, group: Any, merged: Linear, base: Linear | None) -> GroupSums:
        """Raise an error. Without turns this is never called."""
        raise NotImplementedError

    def start_scale(self, tasks: int) -> float:
        """Return the scale of task arithmetic with the initial coefficient."""
        return self.coefficient * tasks

    def streams_type(self, base: nn.Module) -> Callable[..., Streams]:
        """Return a function that creates the streams for training blocks."""
        return partial(TrainingStreams, base=base)


@dataclass(frozen=True)
class TrainingStreams(Streams):
    """Streams that train each block before its samples advance."""

    base: Any = None  # the base model

    @property
    def runs_experts(self) -> bool:
        """Return True, because the outputs of experts are the targets."""
        return True

    def follow(
        self, task: str, batch: Batch, block: str, expert: nn.Module, groups: Iterable[Group]
    ) -> None:
        """Run a batch through the expert's block and note its output."""
        batch.exp = self.step(expert, block, batch.exp)
        batch.noted[block] = batch.exp.hidden

    def advance(self, block: str) -> None:
        """Train a block and run all batches through it."""
        lessons = []
        for batch in (batch for task in self.tasks for batch in self.visits(task)):
            expert, counted = batch.noted[block], batch.rows.valid
            lessons.append((batch.cal, counted, rows_of(expert, counted)))
        load_updates(self.model, block, self._trained(block, lessons), self.rule.remedy)
        super().advance(block)

    @torch.inference_mode(False)  # tensors created in inference mode cannot be trained
    @torch.enable_grad()
    def _trained(self, block: str, lessons: Sequence[Lesson]) -> dict[str, Tensor]:
        """Train the coefficients of a block and return the block's parameters."""
        method: Any = self.rule
        starts, vectors = self._task_vectors(block)
        coefficients = {
            name: torch.full_like(stacked, method.coefficient).requires_grad_()
            for name, stacked in vectors.items()
        }

        def mixed() -> dict[str, Tensor]:
            return {n: starts[n] + (coefficients[n] * vectors[n]).sum(0) for n in starts}

        optimizer = torch.optim.Adam(coefficients.values(), lr=method.learning_rate)
        step, losses = BlockStep(self, self.model, block), []
        size = method.batches_per_step
        steps = method.epochs * -(-len(lessons) // size)
        batches = training.shuffled_batches(len(lessons), size, method.seed, block)
        for positions in islice(batches, steps):
            optimizer.zero_grad()
            parameters = mixed()
            chosen = [_loss(step, parameters, *lessons[int(position)]) for position in positions]
            loss = torch.stack(chosen).sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        trained = {name: value.detach() for name, value in mixed().items()}
        training.check_trained(trained.values(), f"block {block}: ProDistill", method.learning_rate)
        log.info("%s: loss %.4g, at the end %.4g", block, losses[0], losses[-1])
        return trained

    def _task_vectors(self, block: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the base's parameters of a block, and the experts' steps from them, `[i, ...]`."""
        base = dict(split(self.base).named_parameters())
        starts, vectors = {}, {}
        for name in names_under(dict(self.model.named_parameters()), [block]):
            start = base[name].detach().to(self.working.device)
            starts[name] = start = start.to(torch.promote_types(start.dtype, torch.float32))
            experts = [expert.tensor(name).to(start) for expert in self.experts.values()]
            vectors[name] = torch.stack(experts) - start
        return starts, vectors


def _loss(
    step: BlockStep,
    parameters: Mapping[str, Tensor],
    inputs: Any,
    rows: CountedRows | None,
    target: Tensor,
) -> Tensor:
    """Return the squared distance between outputs of block and expert, summed over rows."""
    hidden = rows_of(step.run_with(parameters, inputs), rows)
    return (hidden.float() - target.float()).square().sum()
