"""Distillation of final features by gradients: a reference for corrections in closed form."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fusion_bench_featcal.experts import names_under
from fusion_bench_featcal.families import check_family, resolve_family
from fusion_bench_featcal.fusionbench.options import checked_settings
from fusion_bench_featcal.fusionbench.pool_configs import check_pool_settings
from fusion_bench_featcal.fusionbench.pool_models import load_pool_model
from fusion_bench_featcal.methods.feature_correction import thinned
from fusion_bench_featcal.methods.interface import SAMPLE_SETTINGS, MethodInputs, WeightsOnly
from fusion_bench_featcal.methods.lessons import (
    Lesson,
    expert_lessons,
    mean_square,
)
from fusion_bench_featcal.methods.training import shuffled_batches, task_generator
from fusion_bench_featcal.modules.models import copied
from fusion_bench_featcal.progress import progress_bar
from fusion_bench_featcal.setting_checks import POSITIVE, Check, integer
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings
from fusion_bench_featcal.streams.inputs import to_device
from fusion_bench_featcal.streams.samples import naming_task, take_samples

DISTILLATION_SETTINGS = (*SAMPLE_SETTINGS, "family", "ignore_config")
"""Fields of `FeatCalSettings` that distillation has too, with the same meaning."""


class Distillation(WeightsOnly):
    """Trains all weights of a merged model's blocks towards the experts' final features, by Adam.

    The loss is the squared distance to the expert's final features relative to their squared norm,
    averaged over tasks. No labels are compared with answers: in language models they only say which
    positions count. Embeddings, the norm behind the last block and the head stay as merged.

    Attributes:
        learning_rate: Adam's largest step size, > 0; it falls linearly to zero.
        steps: Updates, each on one batch of every task, >= 1.
    """

    name: ClassVar = "distillation"
    checks: ClassVar[dict[str, Check]] = {
        "learning_rate": POSITIVE,
        "steps": integer(1),
    }
    _config_mapping: ClassVar = {name: name for name in (*checks, *DISTILLATION_SETTINGS)}

    def __init__(self, *, learning_rate: float = 1e-3, steps: int = 300, **settings: Any) -> None:
        """Check the settings.

        Args:
            learning_rate: As the attribute.
            steps: As the attribute.
            **settings: Fields of `FeatCalSettings`: `DISTILLATION_SETTINGS`.

        Raises:
            ValueError: If one is unknown or out of range.
        """
        self.learning_rate, self.steps = learning_rate, steps
        for name, (wanted, fits) in self.checks.items():
            if not fits(getattr(self, name)):
                raise ValueError(f"method.{name} must be {wanted}, got {getattr(self, name)!r}")
        self._settings: FeatCalSettings = checked_settings(
            settings, names=DISTILLATION_SETTINGS, others=tuple(self.checks), owner=self.name
        )
        check_family(self._settings.family)
        self._drawn: dict[str, int] = {}

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, defaults included."""
        values = self._settings.as_dict()
        own = {name: getattr(self, name) for name in self.checks}
        return own | {name: values[name] for name in DISTILLATION_SETTINGS}

    def check(self, inputs: MethodInputs) -> None:
        """Open the data; see that models fit.

        Raises:
            CalibrationError: If a task lacks data, or a model is of another kind than the others.
        """
        check_pool_settings(inputs.models, self._settings)
        inputs.batches(self._settings)

    def post_merge(self, merged: nn.Module, inputs: MethodInputs) -> nn.Module:
        """Train the merged model's blocks, with one expert in memory at a time.

        Samples and the experts' features stay in memory. Training is in float32 or better and
        without dropout; the result has the merged model's dtype, and carries `curves`.

        Raises:
            CalibrationError: If samples or features are unusable, or the training diverges.
        """
        device = inputs.fabric.device
        wide = torch.promote_types(next(merged.parameters()).dtype, torch.float32)
        student = copied(merged, device).to(wide)
        batches = inputs.batches(self._settings)
        lessons: dict[str, list[Lesson]] = {}
        for task in inputs.modelpool.model_names:
            with naming_task(task):
                taken = list(take_samples(task, batches[task], self._settings, student))
                expert = load_pool_model(inputs.modelpool, task).to(device, wide).eval()
                given = [to_device(batch.inputs, device) for batch in taken]
                lessons[task] = expert_lessons(student, expert, given, self._settings)
                self._drawn[task] = sum(batch.samples for batch in taken)
            del expert
        stages = resolve_family(self._settings.family, student).stages(student)
        blocks = [block for stage in stages for block in stage]
        trained = names_under(dict(student.named_parameters()), blocks)
        losses = self.train(student, trained, lessons)
        for name in trained:
            merged.get_parameter(name).data.copy_(student.get_parameter(name))
        merged.curves = {task: thinned(values) for task, values in losses.items()}  # type: ignore[assignment]
        return merged

    @torch.inference_mode(False)  # tensors made in inference mode cannot be trained
    @torch.enable_grad()
    def train(
        self, model: nn.Module, trained: Sequence[str], lessons: Mapping[str, Sequence[Lesson]]
    ) -> dict[str, list[float]]:
        """Train parameters of a model in place.

        Args:
            model: The model.
            trained: Names of the parameters that are trained.
            lessons: By task; their tensors are on the model's device.

        Returns:
            By task the loss of every update, from before it.

        Raises:
            CalibrationError: If the training diverges, naming the setting.
        """
        parameters = [model.get_parameter(name).requires_grad_() for name in trained]
        optimizer = torch.optim.Adam(parameters, lr=self.learning_rate)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, self.steps)
        norms = {task: mean_square(found) for task, found in lessons.items()}
        drawn = {task: self._drawn_lessons(task, found) for task, found in lessons.items()}
        losses: dict[str, list[Tensor]] = {task: [] for task in lessons}
        for _ in progress_bar(range(self.steps), what="distilling: ", unit="step"):
            optimizer.zero_grad()
            for task, remaining in drawn.items():  # one at a time: memory is one batch's
                loss = _distance(model, next(remaining)) / norms[task]
                (loss / len(drawn)).backward()
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

    def _drawn_lessons(self, task: str, lessons: Sequence[Lesson]) -> Iterator[Lesson]:
        """Batches of one task in random order, anew in every pass."""
        generator = task_generator(self._settings.seed, task, "batches")
        for number in shuffled_batches(len(lessons), 1, self.steps, generator):
            yield lessons[int(number)]


def _distance(model: nn.Module, lesson: Lesson) -> Tensor:
    """Mean squared distance of a model's final features to the expert's, 0-dim."""
    features = lesson.features(model)
    return (features - lesson.target).square().mean()
