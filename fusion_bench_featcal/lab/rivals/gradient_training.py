"""Training of a merged model by gradients: the updates that all such methods share."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fusion_bench_featcal.errors.place import error_context
from fusion_bench_featcal.fusionbench.method import MethodResult, SampleSettings
from fusion_bench_featcal.fusionbench.method_inputs import MethodInputs
from fusion_bench_featcal.fusionbench.pool_models import load_pool_model
from fusion_bench_featcal.lab.rivals import training
from fusion_bench_featcal.modules.models import copied
from fusion_bench_featcal.run.devices import isolated_torch_state
from fusion_bench_featcal.run.progress import progress_bar
from fusion_bench_featcal.settings import Texts
from fusion_bench_featcal.settings.fields import setting


class TrainingBatch(Protocol):
    """One batch of a task."""

    @property
    def samples(self) -> int:
        """Number of samples."""
        ...

    def loss(self, model: nn.Module) -> Tensor:
        """Return a model's loss, 0-dim."""
        ...


class GradientTraining(SampleSettings, Texts):
    """A training of a merged model, in which all tasks have the same weight.

    Subclasses implement `training_batches`. By default all parameters are trained.
    """

    learning_rate: float = setting(
        1e-3,
        "Adam's step size in the first update; it falls linearly to 0.",
        gt=0,
    )
    steps: int = setting(300, "Number of updates, each on one batch of every task.", ge=1)

    def post_merge(self, merged: nn.Module, inputs: MethodInputs) -> MethodResult:
        """Train the merged model in float32 or wider, without dropout.

        The new model has the merged model's dtype.

        Raises:
            CalibrationError: If samples or features are unusable, or the training diverges.
        """
        wide = torch.promote_types(next(merged.parameters()).dtype, torch.float32)
        student = copied(merged, inputs.fabric.device).to(wide)
        batches, training_data = self.take_batches(inputs), {}
        for task in inputs.modelpool.model_names:
            with error_context(task=task), torch.no_grad():
                training_data[task] = self.training_batches(student, task, batches[task], inputs)
        counts = {t: sum(batch.samples for batch in training_data[t]) for t in training_data}
        trained = self.trained_names(student)
        curves = self.train(student, trained, training_data)
        for name in trained:
            merged.get_parameter(name).data.copy_(student.get_parameter(name))
        return MethodResult(merged, counts, curves)

    def training_batches(
        self, student: nn.Module, task: str, samples: Any, inputs: MethodInputs
    ) -> Sequence[TrainingBatch]:
        """Return a task's batches, with all that their losses need.

        Args:
            student: The model to train.
            task: The task.
            samples: Its samples, from `take_batches`.
            inputs: The inputs of the method.
        """
        raise NotImplementedError

    def load_expert(self, student: nn.Module, task: str, inputs: MethodInputs) -> nn.Module:
        """Return a task's expert on the device and in the dtype of the student."""
        expert = load_pool_model(inputs.modelpool, task).to(inputs.fabric.device).eval()
        return expert.to(next(student.parameters()).dtype)

    def trained_names(self, student: nn.Module) -> list[str]:
        """Return the names of the parameters to train."""
        return [name for name, _ in student.named_parameters()]

    def rate_at(self, step: int) -> float:
        """Return the step size of an update, counted from 0, relative to `learning_rate`."""
        return 1 - step / self.steps

    @isolated_torch_state()
    @torch.enable_grad()
    def train(
        self,
        model: nn.Module,
        trained: Sequence[str],
        training_data: Mapping[str, Sequence[Any]],
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
