"""Distillation of final features by gradients: a reference for closed-form corrections."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.data.embeddings import Pooling
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.place import error_context
from fusion_bench_featcal.experts import names_under
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.fusionbench.method_inputs import MethodInputs
from fusion_bench_featcal.fusionbench.pool_models import load_pool_model
from fusion_bench_featcal.fusionbench.rows import SampleSettings
from fusion_bench_featcal.lab.rivals import training
from fusion_bench_featcal.lab.rivals.features import final_features, final_rows
from fusion_bench_featcal.modules.models import copied
from fusion_bench_featcal.run.devices import usual_torch
from fusion_bench_featcal.run.progress import progress_bar
from fusion_bench_featcal.settings import Blocks, Texts
from fusion_bench_featcal.settings.fields import setting
from fusion_bench_featcal.streams.batch import Batch, Positions, rows_of
from fusion_bench_featcal.streams.inputs import to_device
from fusion_bench_featcal.streams.samples import take_samples


@dataclass(frozen=True)
class DistillationBatch:
    """One batch of a task.

    Attributes:
        inputs: The model's inputs.
        rows: The counted positions of its final features, or None for all.
        target: The expert's final features at these positions, `[n, d]`.
        norm: Mean square of all final features of the expert, 0-dim.
        pooling: How an encoder's embeddings are made, if these are its final features.
        is_held_out: Whether it is measured only.
    """

    inputs: Any
    rows: Positions | None
    target: Tensor
    norm: Tensor
    pooling: Pooling | None
    is_held_out: bool = False

    def loss(self, model: nn.Module) -> Tensor:
        """Return the relative squared distance between model and expert, 0-dim."""
        features = rows_of(final_features(model, self.inputs, self.pooling), self.rows)
        return (features - self.target).square().mean() / self.norm


class Distillation(
    SampleSettings,
    Texts,
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

    learning_rate: float = setting(
        1e-3,
        "Adam's step size in the first update; it falls linearly to 0.",
        gt=0,
    )
    steps: int = setting(300, "Updates, each on one batch of every task.", ge=1)

    def post_merge(self, merged: nn.Module, inputs: MethodInputs) -> nn.Module:
        """Train the merged model's blocks in float32 or wider, without dropout.

        One expert is in memory at a time. The result has the merged model's dtype, and an attribute
        `curves`.

        Raises:
            CalibrationError: If samples or features are unusable, or the training diverges.
        """
        wide = torch.promote_types(next(merged.parameters()).dtype, torch.float32)
        student = copied(merged, inputs.fabric.device).to(wide)
        batches, training_data = self.take_batches(inputs), {}
        for task in inputs.modelpool.model_names:
            with error_context(task=task):
                training_data[task] = self._lessons(student, task, batches[task], inputs)
        stages = resolve_family(self.family, student).stages(student)
        blocks = [block for stage in stages for block in stage]
        trained = names_under(dict(student.named_parameters()), blocks)
        curves = self.train(student, trained, training_data)
        for name in trained:
            merged.get_parameter(name).data.copy_(student.get_parameter(name))
        merged.curves = curves  # type: ignore[assignment]
        return merged

    def rate_at(self, step: int) -> float:
        """Return the step size of an update, counted from 0, relative to `learning_rate`."""
        return 1 - step / self.steps

    def divided(self, task: str, batches: list[Batch]) -> list[Batch]:
        """Return a task's batches, held-out samples in batches of their own: by default none."""
        return batches

    @torch.no_grad()
    def _lessons(
        self, student: nn.Module, task: str, batches: Any, inputs: MethodInputs
    ) -> list[DistillationBatch]:
        """Run a task's expert once over its samples."""
        taken = list(take_samples(task, batches, self.samples_per_task, student))
        self.sample_counts[task] = sum(batch.samples for batch in taken)
        taken = self.divided(task, taken)
        expert = load_pool_model(inputs.modelpool, task).to(inputs.fabric.device).eval()
        expert = expert.to(next(student.parameters()).dtype)
        family, rows, targets = resolve_family(self.family, student), [], []
        pooling = inputs.pooling
        moved = [to_device(batch.inputs, inputs.fabric.device) for batch in taken]
        for part in moved:
            features = final_features(expert, part, pooling)
            counted = final_rows(student, family, part)
            if counted is not None and features.shape[:-1] != counted.shape:
                counted = None  # the features are pooled
            rows.append(counted)
            targets.append(rows_of(features, counted))
        norm = torch.cat(targets).square().mean()
        if not bool(torch.isfinite(norm)) or not bool(norm > 0):
            raise CalibrationError(
                f"the expert's final features have a mean square of {float(norm):g}. Look for "
                "zeros, NaN or infinite values in its weights"
            )
        held_out = [batch.held_out is not None for batch in taken]
        parts = zip(moved, rows, targets, held_out, strict=True)
        return [
            DistillationBatch(inputs, counted, target, norm, pooling, is_held)
            for inputs, counted, target, is_held in parts
        ]

    def train(
        self,
        model: nn.Module,
        trained: Sequence[str],
        training_data: Mapping[str, Sequence[DistillationBatch]],
    ) -> dict[str, list[tuple[int, float]]]:
        """Train parameters of a model in place, and return curves. Arguments as for `descend`."""
        return self.descend(model, trained, training_data)

    @usual_torch()
    @torch.enable_grad()
    def descend(
        self,
        model: nn.Module,
        trained: Sequence[str],
        training_data: Mapping[str, Sequence[DistillationBatch]],
        after: Callable[[int], None] = lambda _: None,
    ) -> dict[str, list[tuple[int, float]]]:
        """Take all updates of some parameters of a model, in place.

        Args:
            model: The model.
            trained: Names of the parameters.
            training_data: The batches of each task.
            after: Called with the number of updates after each of them.

        Returns:
            The training curves.

        Raises:
            CalibrationError: If the training diverges.
        """
        parameters = [model.get_parameter(name).requires_grad_() for name in trained]
        optimizer = torch.optim.Adam(parameters, lr=self.learning_rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.rate_at)
        batches = {
            task: training.shuffled_batches(len(task_batches), 1, self.seed, task)
            for task, task_batches in training_data.items()
        }
        losses: dict[str, list[Tensor]] = {task: [] for task in training_data}
        for step in progress_bar(range(self.steps), what=f"{self.name}: ", unit="step"):
            optimizer.zero_grad()
            for task, positions in batches.items():  # one after the other, to save memory
                loss = training_data[task][int(next(positions))].loss(model)
                (loss / len(batches)).backward()
                losses[task].append(loss.detach())
            optimizer.step()
            schedule.step()
            after(step + 1)
        for parameter in parameters:
            parameter.requires_grad_(False)
        training.check_trained(parameters, self.name, self.learning_rate)
        return {task: training.curve_of(values) for task, values in losses.items()}
