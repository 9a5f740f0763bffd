"""Distillation of final features by gradients: a reference for closed-form methods."""

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
from fusion_bench_featcal.fusionbench.method import MethodResult, SampleSettings
from fusion_bench_featcal.fusionbench.method_inputs import MethodInputs
from fusion_bench_featcal.fusionbench.pool_models import load_pool_model
from fusion_bench_featcal.lab.rivals import training
from fusion_bench_featcal.lab.rivals.features import final_features, final_rows
from fusion_bench_featcal.modules.models import copied
from fusion_bench_featcal.run.devices import isolated_torch_state
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
        positions: The counted positions of its final features, or None for all.
        target: The expert's final features at these positions, `[n, d]`.
        norm: Mean square of all final features of the expert, 0-dim.
        pooling: How an encoder's embeddings are made, if these are its final features.
        is_held_out: Whether the batch is only measured and not trained on.
    """

    inputs: Any
    positions: Positions | None
    target: Tensor
    norm: Tensor
    pooling: Pooling | None
    is_held_out: bool = False

    def loss(self, model: nn.Module) -> Tensor:
        """Return the relative squared distance between model and expert, 0-dim."""
        features = rows_of(final_features(model, self.inputs, self.pooling), self.positions)
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

    def post_merge(self, merged: nn.Module, inputs: MethodInputs) -> MethodResult:
        """Train the merged model's blocks in float32 or wider, without dropout.

        One expert is in memory at a time. The new model has the merged model's dtype.

        Raises:
            CalibrationError: If samples or features are unusable, or the training diverges.
        """
        wide = torch.promote_types(next(merged.parameters()).dtype, torch.float32)
        student = copied(merged, inputs.fabric.device).to(wide)
        batches, counts, training_data = self.take_batches(inputs), {}, {}
        for task in inputs.modelpool.model_names:
            with error_context(task=task), torch.no_grad():
                drawn = [*take_samples(task, batches[task], self.samples_per_task, student)]
                counts[task] = sum(batch.samples for batch in drawn)
                drawn = self.split_held_out(task, drawn)
                training_data[task] = self._record_targets(student, task, drawn, inputs)
        stages = resolve_family(self.family, student).stages(student)
        blocks = [block for stage in stages for block in stage]
        trained = names_under(dict(student.named_parameters()), blocks)
        curves = self.train(student, trained, training_data)
        for name in trained:
            merged.get_parameter(name).data.copy_(student.get_parameter(name))
        return MethodResult(merged, counts, curves)

    def rate_at(self, step: int) -> float:
        """Return the step size of an update, counted from 0, relative to `learning_rate`."""
        return 1 - step / self.steps

    def split_held_out(self, task: str, batches: list[Batch]) -> list[Batch]:
        """Move held-out samples into batches of their own. By default no sample is held out."""
        return batches

    def _record_targets(
        self, student: nn.Module, task: str, batches: Sequence[Batch], inputs: MethodInputs
    ) -> list[DistillationBatch]:
        """Run a task's expert once over its samples, and return its features as targets."""
        expert = load_pool_model(inputs.modelpool, task).to(inputs.fabric.device).eval()
        expert = expert.to(next(student.parameters()).dtype)
        family = resolve_family(self.family, student)
        recorded = list[tuple[Any, Positions | None, Tensor]]()
        for batch in batches:
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
            DistillationBatch(*parts, norm, inputs.pooling, batch.held_out is not None)
            for parts, batch in zip(recorded, batches, strict=True)
        ]

    def train(
        self,
        model: nn.Module,
        trained: Sequence[str],
        training_data: Mapping[str, Sequence[DistillationBatch]],
    ) -> dict[str, list[tuple[int, float]]]:
        """Train parameters of a model in place, and return curves. Arguments as for `optimize`."""
        return self.optimize(model, trained, training_data)

    @isolated_torch_state()
    @torch.enable_grad()
    def optimize(
        self,
        model: nn.Module,
        trained: Sequence[str],
        training_data: Mapping[str, Sequence[DistillationBatch]],
        on_update: Callable[[int], None] = lambda _: None,
    ) -> dict[str, list[tuple[int, float]]]:
        """Run all updates of some parameters of a model, in place.

        Args:
            model: The model.
            trained: Names of the parameters.
            training_data: The batches of each task.
            on_update: Called after each update with the number of updates so far.

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
            for task, indices in batches.items():  # one after the other, to save memory
                loss = training_data[task][int(next(indices))].loss(model)
                (loss / len(batches)).backward()
                losses[task].append(loss.detach())
            optimizer.step()
            schedule.step()
            on_update(step + 1)
        for parameter in parameters:
            parameter.requires_grad_(False)
        training.check_trained(parameters, self.name, self.learning_rate)
        return {task: training.curve_of(values) for task, values in losses.items()}
