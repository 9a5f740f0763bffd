"""A merged language model with a correction for each task, which must be set before use."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from fusion_bench_featcal.lab.rivals.corrected_model import VARIANT, Corrected, corrected_outputs
from fusion_bench_featcal.lab.rivals.final_features import norm_of
from fusion_bench_featcal.saved_model import keep_untied
from fusion_bench_featcal.settings import CalibrationError

_OF_THE_MODEL = (
    "config", "generation_config", "device", "get_input_embeddings", "get_output_embeddings",
)  # fmt: skip


class CorrectedLanguageModel(Corrected):
    """Answers and scores like the merged model, with the task's correction before the head.

    `with model.for_task("banking77"): model.generate(...)`, or `model.task = "banking77"`. The
    correction acts at every decoded position. Without a task any use raises. The uncorrected model
    is `model.model`.

    Attributes:
        final_norm: Name of the module whose output is corrected.
    """

    stem = "state_corrections"
    described = (*Corrected.described, "final_norm")

    def __init__(
        self, model: nn.Module, final_norm: str, corrections: Mapping[str, nn.Module], **record: Any
    ) -> None:
        norm_of(model, final_norm)
        super().__init__(model, corrections, **record)
        self.final_norm = final_norm
        self._task: str | None = None

    @property
    def task(self) -> str | None:
        """The inputs' task, which must have a correction, or None if it is not set."""
        return self._task

    @task.setter
    def task(self, task: str | None) -> None:
        if task is not None:
            self.correction(task)
        self._task = task

    @contextmanager
    def for_task(self, task: str) -> Iterator[Self]:
        """Context in which inputs belong to a task."""
        before, self.task = self.task, task
        try:
            yield self
        finally:
            self.task = before

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name) if name in _OF_THE_MODEL else super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the merged model, corrected for the set task."""
        with self.correcting():
            return self.model(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate with the merged model, corrected for the set task at every decoded position."""
        with self.correcting():
            return self.model.generate(*args, **kwargs)

    def correct(self, states: Tensor, task: str) -> Tensor:
        """Correct final states `[..., d]` for a task, in float32, and return their dtype."""
        return self.correction(task)(states.float()).to(states.dtype)

    @contextmanager
    def correcting(self) -> Iterator[None]:
        """Context in which the merged model's last norm returns corrected states.

        Raises:
            CalibrationError: If no task is set.
        """
        task = self._task
        if task is None:
            raise CalibrationError(
                "no task is told, and surgery methods correct each task in its own way: use the "
                f"model within `model.for_task(name)`; there are {', '.join(self.tasks)}"
            )
        correction = [lambda states: self.correct(states, task)]
        with corrected_outputs(self.model, [self.final_norm], correction):
            yield

    def save_pretrained(self, folder: str | Path, **kwargs: Any) -> None:
        """Save the merged model and the corrections, which `from_pretrained` reads."""
        super().save_pretrained(folder, **kwargs)
        keep_untied(self.model, Path(folder))

    @classmethod
    def _loaded(cls, folder: Any, tensors: Any, **kwargs: Any) -> dict[str, Any]:
        two_sided = AutoConfig.from_pretrained(folder, trust_remote_code=False).is_encoder_decoder
        loader: Any = AutoModelForSeq2SeqLM if two_sided else AutoModelForCausalLM
        options = {"variant": VARIANT, **kwargs}
        return {"model": loader.from_pretrained(folder, trust_remote_code=False, **options)}
