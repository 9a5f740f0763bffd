"""Distillation of final features by gradients: a reference for closed-form corrections."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fusion_bench_featcal.experts import names_under
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.lab.rivals.lessons import Lesson, expert_lessons, mean_square
from fusion_bench_featcal.lab.rivals.registry import (
    ModelSettings,
    SampleSettings,
    TextSettings,
    method,
)
from fusion_bench_featcal.lab.rivals.training import shuffled_batches, task_generator, thinned
from fusion_bench_featcal.method_inputs import MethodInputs
from fusion_bench_featcal.modules.models import copied
from fusion_bench_featcal.progress import progress_bar
from fusion_bench_featcal.setting_fields import setting
from fusion_bench_featcal.settings import CalibrationError
from fusion_bench_featcal.streams.samples import naming_task, take_samples


@method("featcal_baselines/distillation", source="ours")
class Distillation(ModelSettings, TextSettings, SampleSettings):
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
        group="training",
    )
    steps: int = setting(300, "Updates, each on one batch of every task.", ge=1)

    def post_merge(self, merged: nn.Module, inputs: MethodInputs) -> nn.Module:
        """Train the merged model's blocks, with one expert in memory at a time.

        Samples and the experts' features stay in memory. Training is in float32 or wider and
        without dropout. The result has the merged model's dtype, and an attribute `curves`.

        Raises:
            CalibrationError: If samples or features are unusable, or the training diverges.
        """
        wide = torch.promote_types(next(merged.parameters()).dtype, torch.float32)
        student = copied(merged, inputs.fabric.device).to(wide)
        lessons = self._lessons(student, inputs)
        stages = resolve_family(self.family, student).stages(student)
        blocks = [block for stage in stages for block in stage]
        trained = names_under(dict(student.named_parameters()), blocks)
        losses = self._train(student, trained, lessons)
        for name in trained:
            merged.get_parameter(name).data.copy_(student.get_parameter(name))
        merged.curves = {task: thinned(values) for task, values in losses.items()}  # type: ignore[assignment]
        return merged

    def _lessons(self, student: nn.Module, inputs: MethodInputs) -> dict[str, list[Lesson]]:
        """Run every expert once over its samples."""
        settings, lessons = self.calibration_settings, {}
        batches = inputs.batches(settings)
        for task in inputs.modelpool.model_names:
            with naming_task(task):
                taken = list(take_samples(task, batches[task], settings, student))
                batches_of_inputs = [batch.inputs for batch in taken]
                lessons[task] = expert_lessons(task, batches_of_inputs, inputs, settings, student)
            self.sample_counts[task] = sum(batch.samples for batch in taken)
        return lessons

    @torch.inference_mode(False)  # tensors created in inference mode cannot be trained
    @torch.enable_grad()
    def _train(
        self, model: nn.Module, trained: Sequence[str], lessons: Mapping[str, Sequence[Lesson]]
    ) -> dict[str, list[float]]:
        """Train parameters of a model in place. Return the loss before each update, by task.

        Raises:
            CalibrationError: If the training diverges, naming the setting.
        """
        parameters = [model.get_parameter(name).requires_grad_() for name in trained]
        optimizer = torch.optim.Adam(parameters, lr=self.learning_rate)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, self.steps)
        norms = {task: mean_square(of_task) for task, of_task in lessons.items()}
        positions_by_task = {
            task: shuffled_batches(
                len(of_task), 1, self.steps, task_generator(self.seed, task, "batches")
            )
            for task, of_task in lessons.items()
        }
        losses: dict[str, list[Tensor]] = {task: [] for task in lessons}
        for _ in progress_bar(range(self.steps), what="distilling: ", unit="step"):
            optimizer.zero_grad()
            for (
                task,
                positions,
            ) in positions_by_task.items():  # task by task, to need memory for one batch
                loss = _distance(model, lessons[task][int(next(positions))]) / norms[task]
                (loss / len(positions_by_task)).backward()
                losses[task].append(loss.detach())
            optimizer.step()
            schedule.step()
        for parameter in parameters:
            parameter.requires_grad_(False)
        if not all(bool(torch.isfinite(parameter).all()) for parameter in parameters):
            raise CalibrationError(
                f"{self.name} diverged, its weights are not finite. Lower method.learning_rate "
                f"(now {self.learning_rate})"
            )
        return {task: torch.stack(values).tolist() for task, values in losses.items()}


def _distance(model: nn.Module, lesson: Lesson) -> Tensor:
    """Return the mean squared distance between final features of model and expert, 0-dim."""
    return (lesson.features(model) - lesson.target).square().mean()
