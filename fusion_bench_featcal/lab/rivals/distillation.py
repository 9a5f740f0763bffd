"""Distillation of final features by gradients: a reference for closed-form methods."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.data.embeddings import Pooling
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.experts import names_under
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.fusionbench.method_inputs import MethodInputs
from fusion_bench_featcal.lab.rivals.features import final_features, final_rows
from fusion_bench_featcal.lab.rivals.gradient_training import GradientTraining
from fusion_bench_featcal.settings import Blocks
from fusion_bench_featcal.streams.batch import Batch, Positions, rows_of
from fusion_bench_featcal.streams.inputs import to_device
from fusion_bench_featcal.streams.samples import take_samples


@dataclass(frozen=True)
class DistillationBatch:
    """One batch of a task.

    Attributes:
        inputs: The model's inputs.
        positions: The counted positions of its final features, or None for all.
        target: The expert's final features at these positions, `[n, d]`.
        norm: Mean square of all final features of the expert, 0-dim.
        pooling: How an encoder's embeddings are made, if these are its final features.
        samples: Number of samples.
        is_held_out: Whether the batch is only measured and not trained on.
    """

    inputs: Any
    positions: Positions | None
    target: Tensor
    norm: Tensor
    pooling: Pooling | None
    samples: int
    is_held_out: bool = False

    def loss(self, model: nn.Module) -> Tensor:
        """Return the relative squared distance between model and expert, 0-dim."""
        features = rows_of(final_features(model, self.inputs, self.pooling), self.positions)
        return (features - self.target).square().mean() / self.norm


class Distillation(
    GradientTraining,
    Blocks,
    option="featcal_baselines/distillation",
    source="ours",
    without=("modules",),
):
    """Distillation: training of a merged model's blocks towards the experts' final features.

    The loss is the squared distance to the expert's final features relative to their squared norm,
    averaged over tasks. Labels are not used as targets. In language models they only determine the
    counted positions. Embeddings, the norm after the last block and the head keep merged weights.
    It needs several times the model's memory.
    """

    def trained_names(self, student: nn.Module) -> list[str]:
        """Return the names of the parameters of blocks."""
        stages = resolve_family(self.family, student).stages(student)
        blocks = [block for stage in stages for block in stage]
        return names_under(dict(student.named_parameters()), blocks)

    def split_held_out(self, task: str, batches: list[Batch]) -> list[Batch]:
        """Move held-out samples into batches of their own. By default no sample is held out."""
        return batches

    def training_batches(
        self, student: nn.Module, task: str, samples: Iterable[Any], inputs: MethodInputs
    ) -> list[DistillationBatch]:
        """Run a task's expert once over its samples, and return its features as targets.

        The expert is freed afterwards, so that one of them is in memory at a time.
        """
        drawn = [*take_samples(task, samples, self.samples_per_task, student)]
        drawn = self.split_held_out(task, drawn)
        expert = self.load_expert(student, task, inputs)
        family = resolve_family(self.family, student)
        recorded = list[tuple[Any, Positions | None, Tensor]]()
        for batch in drawn:
            batch_inputs = to_device(batch.inputs, inputs.fabric.device)
            features = final_features(expert, batch_inputs, inputs.pooling)
            counted = final_rows(student, family, batch_inputs)
            if counted is not None and features.shape[:-1] != counted.shape:
                counted = None  # the features are pooled
            recorded.append((batch_inputs, counted, rows_of(features, counted)))
        norm = torch.cat([target for *_, target in recorded]).square().mean()
        if not bool(torch.isfinite(norm)) or not bool(norm > 0):
            raise CalibrationError(
                f"the expert's final features have a mean square of {float(norm):g}. Look for "
                "zeros, NaN or infinite values in its weights"
            )
        return [
            DistillationBatch(*parts, norm, inputs.pooling, b.samples, b.held_out is not None)
            for parts, b in zip(recorded, drawn, strict=True)
        ]
