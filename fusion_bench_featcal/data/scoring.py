"""Scores of a model on test samples with a choice among classes or tokens."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import BatchFeature

from fusion_bench_featcal.data.generation import row_losses
from fusion_bench_featcal.families.base import NO_TARGET
from fusion_bench_featcal.modules.models import device_of
from fusion_bench_featcal.results.names import ACCURACY, LOSS, WORD_ERRORS

TensorBatch = Mapping[str, Tensor]


class Score(NamedTuple):
    """Scores of a task's test samples.

    Attributes:
        accuracy: Share of correct samples or, for long or free texts, of correct tokens, 0 to 1.
        losses: Mean cross-entropy of each sample's targets, float64 `[samples]`.
        correct: Whether each sample is correct, bool `[samples]`. None if accuracy counts tokens.
        unended: Number of samples in which only the end token is wrong.
        metric: Name of the metric by which models are compared.
        terms: Terms of this metric, float64 `[samples]`, of which higher ones are better. None if
            it is the loss or, with `correct`, the accuracy.
    """

    accuracy: float
    losses: Tensor
    correct: Tensor | None
    unended: int = 0
    metric: str = ACCURACY
    terms: Tensor | None = None

    @property
    def loss(self) -> float:
        """Mean loss."""
        return self.losses.mean().item()

    @property
    def compared(self) -> Tensor:
        """One value per sample, float64 `[samples]`, of which higher ones are better."""
        if self.terms is not None:
            return self.terms
        return -self.losses if self.correct is None else self.correct.double()

    @property
    def value(self) -> float:
        """The metric: the mean of `compared`, or the mean loss, or 1 - the mean for error rates."""
        mean = self.compared.mean().item()
        return {LOSS: -mean, WORD_ERRORS: 1 - mean}.get(self.metric, mean)


@dataclass(frozen=True)
class Tests:
    """A task's test samples.

    A text counts as right if each target token is the model's first choice given the tokens before
    it, because greedy search would then generate it.

    Attributes:
        batches: Returns the batches for a model.
        targets: Returns logits `[batch, n, choices]` of a model and target numbers `[batch, n]`,
            -100 for none.
        by_token: Whether accuracy counts tokens, not samples.
        order: Index of each sample of the batches, if they are not in order.
        ends: End tokens of targets.
    """

    batches: Callable[[nn.Module], Iterable[TensorBatch]]
    targets: Callable[[Any, TensorBatch], tuple[Tensor, Tensor]]
    by_token: bool = False
    order: Sequence[int] | None = None
    ends: Sequence[int] = ()

    @torch.no_grad()
    def score(self, model: nn.Module) -> Score:
        """Score a model."""
        device, dtype, rows = device_of(model), next(model.parameters()).dtype, []
        for batch in self.batches(model):
            moved = BatchFeature(dict(batch)).to(device, dtype)
            logits, targets = self.targets(model, moved)
            is_target = targets != NO_TARGET
            right = (logits.argmax(dim=-1) == targets) & is_target
            ends = torch.isin(targets, torch.tensor(self.ends, dtype=torch.long, device=device))
            but_end = (right | ~is_target | ends).all(dim=1)
            counts = right.sum(dim=1), is_target.sum(dim=1)
            rows.append((row_losses(logits, targets), *counts, but_end))
        columns = [torch.cat(column).cpu() for column in zip(*rows, strict=True)]
        if self.order is not None:
            back = torch.tensor(self.order).argsort()
            columns = [column[back] for column in columns]
        losses, right, count, but_end = columns
        correct = right == count
        unended = int((but_end & ~correct).sum())
        if self.by_token:
            accuracy = right.sum().item() / max(count.sum().item(), 1)
            return Score(accuracy, losses.double(), None, unended, LOSS)
        return Score(correct.double().mean().item(), losses.double(), correct, unended)


def own_logits(model: nn.Module, batch: TensorBatch) -> Tensor:
    """Return the class logits of a model with a head."""
    return model(**batch).logits


def class_tests(
    batches: Callable[[nn.Module], Iterable[TensorBatch]],
    batch_size: int,
    labels: Sequence[int],
    logits: Callable[[Any, TensorBatch], Tensor] = own_logits,
    order: Sequence[int] | None = None,
) -> Tests:
    """Return test samples with labels, which are numbers of a head's classes.

    Args:
        batches: Returns the model's inputs.
        batch_size: Samples per batch.
        labels: The labels of all samples.
        logits: Returns class logits of a model for a batch.
        order: Index of each sample of the batches, if they are not in order.
    """
    chosen = labels if order is None else [labels[number] for number in order]
    numbers = torch.tensor(chosen).split(batch_size)

    def labelled(model: nn.Module) -> Iterable[TensorBatch]:
        pairs = zip(batches(model), numbers, strict=True)
        return ({**batch, "labels": labels} for batch, labels in pairs)

    def targets(model: object, batch: TensorBatch) -> tuple[Tensor, Tensor]:
        inputs = dict(batch)
        labels = inputs.pop("labels")
        return logits(model, inputs).to(labels.device)[:, None], labels[:, None]

    return Tests(labelled, targets, order=order)
