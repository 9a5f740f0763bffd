"""A merged language model together with its tasks' corrections, told the task when it is used."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from fusion_bench_featcal.baselines.checkpoint import (
    VARIANT,
    load_corrections,
    save_checkpoint,
    task_modules,
)
from fusion_bench_featcal.baselines.corrections import Correction, correction_from, correction_of
from fusion_bench_featcal.baselines.final_states import hooked, no_final_norm
from fusion_bench_featcal.baselines.training import Curve
from fusion_bench_featcal.fusionbench.saving import keep_untied
from fusion_bench_featcal.settings import CalibrationError

_STEM = "state_corrections"


class CorrectedLanguageModel(nn.Module):
    """Answers and scores like the merged model, with a task's correction before the head.

    `with model.for_task("banking77"): model.generate(...)`, or `model.task = "banking77"`. The
    correction acts at every decoded position. Without a task nothing is computed: the uncorrected
    model is `model.model`.

    Attributes:
        model: The merged model.
        final_norm: Name of the module whose output is corrected.
        corrections: A correction for each task.
        tasks: The tasks' names.
        samples: Task -> `{"samples": number, "split": name}` that its correction was fitted on.
        curves: Task -> its training's curve; empty where nothing was trained.
    """

    is_surgery_model = True

    def __init__(
        self,
        model: nn.Module,
        final_norm: str,
        corrections: Mapping[str, Correction],
        *,
        samples: Mapping[str, Mapping[str, Any]] | None = None,
        curves: Mapping[str, Curve] | None = None,
    ) -> None:
        """Put the parts together and freeze them; the merged model is not copied.

        Raises:
            CalibrationError: If the model has no module of that name.
            ValueError: If two tasks differ only in dots and dashes.
        """
        super().__init__()
        if final_norm not in dict(model.named_modules()):
            raise no_final_norm(type(model).__name__, final_norm)
        self.model: Any = model
        self.final_norm = final_norm
        self.tasks = tuple(corrections)
        self.samples = {task: dict(used) for task, used in (samples or {}).items()}
        self.curves = dict(curves or {})
        self.corrections = task_modules(corrections)
        self.requires_grad_(False).eval()
        self._task: str | None = None

    @property
    def task(self) -> str | None:
        """The task that inputs belong to; None: not told."""
        return self._task

    @task.setter
    def task(self, task: str | None) -> None:
        if task is not None:
            correction_of(self.corrections, self.tasks, task)
        self._task = task

    @contextmanager
    def for_task(self, task: str) -> Iterator["CorrectedLanguageModel"]:
        """Context in which inputs belong to a task.

        Raises:
            CalibrationError: If there is no correction for it.
        """
        before, self.task = self.task, task
        try:
            yield self
        finally:
            self.task = before

    @property
    def config(self) -> Any:
        """The merged model's."""
        return self.model.config

    @property
    def generation_config(self) -> Any:
        """The merged model's."""
        return self.model.generation_config

    @property
    def device(self) -> Any:
        """The merged model's."""
        return self.model.device

    def get_input_embeddings(self) -> nn.Module:
        """The merged model's."""
        return self.model.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        """The merged model's head."""
        return self.model.get_output_embeddings()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the merged model and correct its output.

        Raises:
            CalibrationError: If no task is told.
        """
        with self._correcting():
            return self.model(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate with the merged model, corrected at every decoded position.

        Raises:
            CalibrationError: If no task is told.
        """
        with self._correcting():
            return self.model.generate(*args, **kwargs)

    def correct(self, states: Tensor, task: str) -> Tensor:
        """Correct final states `[..., d]` of a task, in float32, in their own dtype again.

        Raises:
            CalibrationError: If there is no correction for the task.
        """
        return correction_of(self.corrections, self.tasks, task)(states.float()).to(states.dtype)

    def added_parameters(self) -> int:
        """Numbers that deployment needs beyond the merged model's, over all tasks."""
        return sum(parameter.numel() for parameter in self.corrections.parameters())

    def save_pretrained(self, folder: str | Path, **kwargs: Any) -> None:
        """Save the merged model and the corrections.

        Args:
            folder: Where to; `from_pretrained` reads it.
            **kwargs: For the merged model's own `save_pretrained`.
        """
        save_checkpoint(self, folder, _STEM, {"final_norm": self.final_norm}, **kwargs)
        keep_untied(self.model, Path(folder))

    @classmethod
    def from_pretrained(cls, folder: str | Path, **kwargs: Any) -> "CorrectedLanguageModel":
        """Load what `save_pretrained` saved.

        Args:
            folder: The folder.
            **kwargs: For the merged model's `from_pretrained`.

        Returns:
            The model.

        Raises:
            CalibrationError: If the folder holds no corrected language model.
        """
        saved = load_corrections(folder, _STEM)
        two_sided = AutoConfig.from_pretrained(folder).is_encoder_decoder
        loader: Any = AutoModelForSeq2SeqLM if two_sided else AutoModelForCausalLM
        model = loader.from_pretrained(folder, variant=VARIANT, **kwargs)
        return cls(
            model,
            saved.told["final_norm"],
            {task: correction_from(part, task, _STEM) for task, part in saved.parts.items()},
            **{key: saved.told[key] for key in ("samples", "curves")},
        )

    @contextmanager
    def _correcting(self) -> Iterator[None]:
        """Context in which the merged model's last norm gives corrected states."""
        task = self._task
        if task is None:
            raise CalibrationError(
                "no task is told, and surgery methods correct each task in its own way: use the "
                f"model within `model.for_task(name)`; there are {', '.join(self.tasks)}"
            )
        with hooked(self.model, self.final_norm, lambda _, args, out: self.correct(out, task)):
            yield
