"""ProDistill: coefficients of task vectors trained block by block by gradients.

A parameter is `W_0 + sum_i c_i * (W_i - W_0)`, with a coefficient for each entry. A block's inputs
are the outputs of the trained blocks before it, and its targets are the outputs of each sample's
expert.
"""

import logging
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fusion_bench_featcal.lab.rivals import training
from fusion_bench_featcal.lab.rivals.mergers import Merger
from fusion_bench_featcal.run.problem import Problem
from fusion_bench_featcal.settings.fields import setting
from fusion_bench_featcal.streams.batch import CountedRows, rows_of

log = logging.getLogger(__name__)

Lesson = tuple[Any, CountedRows | None, Tensor]
"""A block's arguments, the counted positions of its output, and the expert's output there."""


class ProDistill(
    Merger,
    option="featcal_baselines/prodistill",
    source="Xu et al., ICML 2025, arXiv 2502.12706",
    without=["modules"],  # all parameters of the blocks are trained
):
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

    def start_scale(self, tasks: int) -> float:
        """Return the scale of task arithmetic with the initial coefficient."""
        return self.coefficient * tasks

    def block(self, problem: Problem, block: str) -> dict[str, Tensor]:
        """Run the experts through a block, and return its parameters trained towards them."""
        streams, lessons = problem.streams, list[Lesson]()
        for task in streams.tasks:
            with problem.experts[task].loaded(streams.tensors_of(block)) as expert:
                for batch in streams.visits(task):
                    batch.exp, counted = streams.step(expert, block, batch.exp), batch.rows.valid
                    lessons.append((batch.cal, counted, rows_of(batch.exp.hidden, counted)))
            problem.progress.step()
        return self._trained(problem, block, lessons)

    @torch.inference_mode(False)  # tensors created in inference mode cannot be trained
    @torch.enable_grad()
    def _trained(
        self, problem: Problem, block: str, lessons: Sequence[Lesson]
    ) -> dict[str, Tensor]:
        """Train the coefficients of a block and return the block's parameters."""
        starts, vectors = _task_vectors(problem, block)
        coefficients = {
            name: torch.full_like(stacked, self.coefficient).requires_grad_()
            for name, stacked in vectors.items()
        }

        def mixed() -> dict[str, Tensor]:
            return {n: starts[n] + (coefficients[n] * vectors[n]).sum(0) for n in starts}

        optimizer = torch.optim.Adam(coefficients.values(), lr=self.learning_rate)
        run, losses, size = BlockRun(problem, block), [], self.batches_per_step
        steps = self.epochs * -(-len(lessons) // size)
        batches = training.shuffled_batches(len(lessons), size, self.seed, block)
        for positions in islice(batches, steps):
            optimizer.zero_grad()
            parameters = mixed()
            chosen = [run.loss(parameters, *lessons[int(position)]) for position in positions]
            loss = torch.stack(chosen).sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        trained = {name: value.detach() for name, value in mixed().items()}
        training.check_trained(trained.values(), f"block {block}: ProDistill", self.learning_rate)
        log.info("%s: loss %.4g, at the end %.4g", block, losses[0], losses[-1])
        return trained


def _task_vectors(problem: Problem, block: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the base's parameters of a block, and the experts' steps from them, `[i, ...]`."""
    assert problem.base is not None  # a merger has one
    starts, vectors = {}, {}
    for leaf, _ in problem.model.get_submodule(block).named_parameters():
        name = f"{block}.{leaf}"
        start = problem.base.tensor(name)
        starts[name] = start = start.to(torch.promote_types(start.dtype, torch.float32))
        experts = [expert.tensor(name).to(start) for expert in problem.experts.values()]
        vectors[name] = torch.stack(experts) - start
    return starts, vectors


class BlockRun(nn.Module):
    """One block of the calibrated model, whose parameters are replaced in each call."""

    def __init__(self, problem: Problem, block: str) -> None:
        super().__init__()
        self.model = problem.model
        self._step = lambda call: problem.streams.step(problem.model, block, call).hidden

    def forward(self, call: Any) -> Tensor:
        """Run the block and return its hidden output."""
        return self._step(call)

    def loss(
        self,
        parameters: Mapping[str, Tensor],
        call: Any,
        rows: CountedRows | None,
        target: Tensor,
    ) -> Tensor:
        """Return the squared distance between outputs of block and expert, summed over rows."""
        dtypes = {name: tensor.dtype for name, tensor in self.model.state_dict().items()}
        replaced = {f"model.{name}": t.to(dtypes[name]) for name, t in parameters.items()}
        hidden = rows_of(functional_call(self, replaced, (call,)), rows)
        return (hidden.float() - target.float()).square().sum()
