"""A merged model with corrections for each task, of images or texts."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.lab.rivals.corrected_features import all_features, corrected_outputs
from fusion_bench_featcal.lab.rivals.corrected_files import (
    load_corrected_model,
    save_corrected_model,
)
from fusion_bench_featcal.lab.rivals.features import project
from fusion_bench_featcal.lab.rivals.sites import CorrectedFeature

ALL_TASKS = "*"
"""Name in place of a task's name, of corrections that are the same for all tasks."""
_MODEL_METHODS = (
    "config", "generation_config", "device", "get_input_embeddings", "get_output_embeddings",
)  # fmt: skip


class CorrectedModel(nn.Module):
    """A frozen merged model with corrections for each task.

    The model needs the task's name, unless the corrections are for `ALL_TASKS`. A language model
    answers and scores with the correction of the task in `task`: `with
    model.for_task("banking77"): model.generate(...)`. Without a task any use raises. The `forward`
    of other models applies no correction: `features` returns an encoder's corrected embeddings, and
    FusionBench corrects CLIP's features afterwards, with `compute_surgery_features`.

    Attributes:
        model: The merged model, not a copy.
        site: The feature that is corrected.
        projection: CLIP's visual projection, or None for other models.
        final_norm: Name of a language model's last norm, or None for other models.
        tasks: The tasks' names.
        task: The task of a language model's inputs.
    """

    is_surgery_model = True  # FusionBench's protocol

    def __init__(
        self,
        model: nn.Module,
        corrections: Mapping[str, Sequence[nn.Module]],
        site: CorrectedFeature,
    ) -> None:
        """Add corrections to a model.

        Args:
            model: The merged model.
            corrections: Corrections of each task. The last one corrects the final feature, and any
                before it the tokens after each block.
            site: The final feature: a language model's state, or an encoder's feature.
        """
        super().__init__()
        self.model: Any = model
        self.site = site
        self.projection: Any = getattr(site, "projection", None)
        self.final_norm: str | None = getattr(site, "norm", None)
        self.tasks = tuple(corrections)
        self.corrections = nn.ModuleList(map(nn.ModuleList, corrections.values()))
        self.task: str | None = None
        self._last_pass: tuple[Any, ...] = ((), {}, None)  # arguments and output
        self.requires_grad_(False).eval()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name) if name in _MODEL_METHODS else super().__getattr__(name)

    def correction(self, task: str | None) -> Any:
        """Return one task's corrections. Raises a CalibrationError if there are none."""
        if not self.needs_task:
            return self.corrections[0]
        if task not in self.tasks:
            raise CalibrationError(
                f"there is no feature correction for task {task!r}: surgery methods need the "
                f"task of each input (model.task), one of {', '.join(self.tasks)}"
            )
        return self.corrections[self.tasks.index(task)]

    @property
    def needs_task(self) -> bool:
        """Return whether the corrections differ between tasks."""
        return self.tasks != (ALL_TASKS,)

    @contextmanager
    def for_task(self, task: str) -> Iterator[Self]:
        """Context in which inputs belong to a task."""
        before, self.task = self.task, task
        try:
            yield self
        finally:
            self.task = before

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Run the merged model, corrected for the set task if it is a language model."""
        if self.final_norm is not None:
            with self._correcting():
                return self.model(*args, **kwargs)
        output = self.model(*args, **kwargs)
        self._last_pass = args, kwargs, output
        return output

    def generate(self, *args: object, **kwargs: object) -> Any:
        """Generate with a language model, corrected for the set task at every position."""
        with self._correcting():
            return self.model.generate(*args, **kwargs)

    def _correcting(self) -> Any:
        return corrected_outputs(self.model, [self.final_norm], self.correction(self.task))

    def features(self, task: str, pixel_values: Tensor | None = None, **inputs: object) -> Tensor:
        """Return corrected features `[batch, d]` of images or texts, not normalised."""
        if pixel_values is not None:
            inputs["pixel_values"] = pixel_values
        return all_features(self.model, self.site, self.correction(task), inputs)[-1]

    def compute_surgery_features(
        self, features: Tensor, dataset_name: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Correct features by FusionBench's protocol.

        Args:
            features: Projected features `[batch, d]`, of norm 1, of the images last passed through
                this model. Corrections after blocks take a second pass.
            dataset_name: The task's name.

        Returns:
            Corrected features of norm 1, features, and their difference, `[batch, d]` each.

        Raises:
            CalibrationError: If there is no correction for the task, or the features are not those
                of these images.
        """
        *block_corrections, final = self.correction(dataset_name)
        args, kwargs, output = self._last_pass
        last = project(output, self.projection)
        if bool(((last * features).sum(dim=-1) < 0.99 * last.norm(dim=-1)).any()):
            raise CalibrationError(
                "the features are not those of the images last passed through this model: use the "
                "visual projection that the corrections were fitted with (method.clip_model)"
            )
        raw = self.features(dataset_name, *args, **kwargs) if block_corrections else final(last)
        corrected = raw / raw.norm(dim=-1, keepdim=True)
        return corrected, features, features - corrected

    def save_pretrained(self, folder: str | Path, **kwargs: object) -> None:
        """Save the merged model by its `save_pretrained`, and the corrections in that folder."""
        save_corrected_model(self, folder, **kwargs)

    @classmethod
    def from_pretrained(cls, folder: str | Path, **kwargs: object) -> Self:
        """Load a model that `save_pretrained` saved. `kwargs` are of the merged model's class.

        Raises:
            CalibrationError: If the folder has no such model, or the file is damaged.
        """
        return cls(*load_corrected_model(folder, **kwargs))
