"""A merged model with corrections for each task, of images or texts, and its folder on disk."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    CLIPVisionModel,
)

from fusion_bench_featcal.data.embeddings import Pooling, token_mean
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.families.base import hidden_output
from fusion_bench_featcal.lab.rivals.features import project
from fusion_bench_featcal.lab.rivals.sites import CorrectedFeature, FinalState, ProjectedFeature
from fusion_bench_featcal.models.saving import correct_configs

CORRECTIONS = "corrections.safetensors"
VARIANT = "uncorrected"
"""Part of the name of the merged model's weight file, so that the folder does not load as a plain
model, which would silently omit the corrections."""
ALL_TASKS = "*"
"""Name in place of a task's of corrections that are the same for all tasks."""
_MODEL_METHODS = (
    "config", "generation_config", "device", "get_input_embeddings", "get_output_embeddings",
)  # fmt: skip


class SurgeryModule(nn.Module):
    """The correction `f - U relu(D f)`: D is `down`, `[rank, d]`, U is `up`, `[d, rank]`."""

    def __init__(self, down: Tensor, up: Tensor) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(down), nn.Parameter(up)

    def forward(self, features: Tensor) -> Tensor:
        """Correct features `[..., d]`."""
        hidden = functional.relu(functional.linear(features, self.down))
        return features - functional.linear(hidden, self.up)


class AffineModule(nn.Module):
    """The correction `f - (A f + b)`: A is `matrix`, `[d, d]`, b is `shift`, `[d]`."""

    def __init__(self, matrix: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.matrix, self.shift = nn.Parameter(matrix), nn.Parameter(shift)

    def forward(self, features: Tensor) -> Tensor:
        """Correct features `[..., d]`."""
        return features - functional.linear(features, self.matrix, self.shift)


class CorrectedModel(nn.Module):
    """A frozen merged model with corrections for each task, which needs the task's name.

    With corrections for `ALL_TASKS` it needs none.

    A language model answers and scores with the correction of the task in `task`: `with
    model.for_task("banking77"): model.generate(...)`. Without a task any use raises. The `forward`
    of other models applies no correction: `features` returns an encoder's corrected embeddings, and
    FusionBench corrects CLIP's features afterwards, by `compute_surgery_features`.

    Attributes:
        model: The merged model, not a copy.
        site: The feature that is corrected.
        projection: CLIP's visual projection, or None for other models.
        final_norm: Name of a language model's last norm, or None for other models.
        tasks: The tasks' names.
        task: The task of a language model's inputs.
        curves: Task -> its training curve, (step, loss).
    """

    is_surgery_model = True  # FusionBench's protocol

    def __init__(
        self,
        model: nn.Module,
        corrections: Mapping[str, Sequence[nn.Module]],
        site: CorrectedFeature,
    ) -> None:
        """Join them.

        Args:
            model: The merged model.
            corrections: Of each task: of the final feature, and before it any of tokens after each
                block.
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
        self.curves: dict[str, Any] = {}
        self._last: tuple[Any, ...] = ((), {}, None)
        self.requires_grad_(False).eval()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name) if name in _MODEL_METHODS else super().__getattr__(name)

    def correction(self, task: str | None) -> Any:
        """Return one task's corrections. Raises a CalibrationError if there are none."""
        if not self.needs_task:
            return self.corrections[0]
        if task not in self.tasks:
            raise CalibrationError(
                f"there is no feature correction for task {task!r}: surgery methods must be told "
                f"the task (model.task), one of {', '.join(self.tasks)}"
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
        self._last = args, kwargs, output
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
            CalibrationError: If there is no correction for the task, or the features are others.
        """
        *block_corrections, final = self.correction(dataset_name)
        args, kwargs, output = self._last
        last = project(output, self.projection)
        if bool(((last * features).sum(dim=-1) < 0.99 * last.norm(dim=-1)).any()):
            raise CalibrationError(
                "the features are not those of the images last passed through this model: use the "
                "visual projection that it was fitted with (method.clip_model)"
            )
        raw = self.features(dataset_name, *args, **kwargs) if block_corrections else final(last)
        corrected = raw / raw.norm(dim=-1, keepdim=True)
        return corrected, features, features - corrected

    def save_pretrained(self, folder: str | Path, **kwargs: object) -> None:
        """Save the merged model by its `save_pretrained`, and the corrections in that folder."""
        self.model.save_pretrained(folder, variant=VARIANT, **kwargs)
        correct_configs(self.model, Path(folder))
        tensors = {n: t for n, t in self.state_dict().items() if not n.startswith("model.")}
        record = {"tasks": json.dumps(self.tasks), "final_norm": self.final_norm or ""}
        record["pooling"] = self.site.mode if isinstance(self.site, Pooling) else ""
        save_file(
            {n: t.contiguous() for n, t in tensors.items()}, Path(folder) / CORRECTIONS, record
        )

    @classmethod
    def from_pretrained(cls, folder: str | Path, **kwargs: object) -> Self:
        """Load a model that `save_pretrained` saved. `kwargs` are of the merged model's class.

        Raises:
            CalibrationError: If the folder has no such model, or the file is damaged.
        """
        try:
            with safe_open(Path(folder) / CORRECTIONS, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                record = file.metadata()
            tasks = json.loads(record["tasks"])
            corrections = dict(zip(tasks, _rebuilt(tensors), strict=True))
        except (OSError, SafetensorError, ValueError, LookupError, TypeError) as error:
            raise CalibrationError(
                f"{folder} holds no corrected model, or {CORRECTIONS} is damaged: {error!r}"
            ) from error
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        weight, pooling = tensors.get("projection.weight"), record.get("pooling")
        if weight is not None:
            projection = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            projection.weight = nn.Parameter(weight)
            site, loader = ProjectedFeature(projection), CLIPVisionModel
        elif pooling:
            site, loader = Pooling(pooling), AutoModel
        else:
            site = FinalState(record["final_norm"])
            loader = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        load: Any = loader.from_pretrained
        model = load(folder, variant=VARIANT, trust_remote_code=False, **kwargs)
        return cls(model, corrections, site)


def all_features(
    model: nn.Module, site: CorrectedFeature, corrections: Sequence[Any], inputs: Mapping[str, Any]
) -> list[Tensor]:
    """Return the corrected features of an encoder's inputs, `[batch, d]` each.

    These are the tokens' means after each block that has a correction, and the final feature.
    """
    *block_corrections, final = corrections
    names = blocks_of(model) if block_corrections else []
    mask = inputs.get("attention_mask")
    with corrected_outputs(model, names, block_corrections, mask) as means:
        features = final(site.features(model, inputs))
    return [*means, features]


@contextmanager
def corrected_outputs(
    model: nn.Module,
    names: Iterable[Any],
    corrections: Iterable[nn.Module],
    mask: Tensor | None = None,
) -> Iterator[list[Tensor]]:
    """Context in which modules of a model return corrected features, computed in float32.

    Args:
        model: The model.
        names: The modules. Those without a correction are not changed.
        corrections: The corrections.
        mask: 0 for padding, `[batch, positions]`, or None if all positions count.

    Yields:
        A list to which each module adds its corrected features' mean over tokens, `[batch, d]`.
    """
    means: list[Tensor] = []

    def hook(correct: nn.Module) -> Any:
        def replace(_: nn.Module, __: Any, output: Any) -> Any:
            states = hidden_output(output)
            corrected = correct(states.float())
            means.append(token_mean(corrected, mask))
            corrected = corrected.to(states.dtype)
            return corrected if isinstance(output, Tensor) else (corrected, *output[1:])

        return replace

    handles = [
        model.get_submodule(name).register_forward_hook(hook(correction))
        for name, correction in zip(names, corrections, strict=False)
    ]
    try:
        yield means
    finally:
        for handle in handles:
            handle.remove()


def blocks_of(model: nn.Module) -> list[str]:
    """Return the names of an encoder's blocks, in forward order."""
    return resolve_family("auto", model).stages(model)[0]


def _rebuilt(tensors: Mapping[str, Tensor]) -> list[list[nn.Module]]:
    """Rebuild all corrections, task by task. Their kind follows from the names of their tensors."""
    leaves: dict[tuple[int, int], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("corrections."):
            _, task, number, leaf = name.split(".")
            leaves.setdefault((int(task), int(number)), {})[leaf] = tensor
    corrections: dict[int, list[nn.Module]] = {}
    for task, number in sorted(leaves):
        module_tensors = leaves[task, number]
        kind = AffineModule if "matrix" in module_tensors else SurgeryModule
        corrections.setdefault(task, []).append(kind(**module_tensors))
    return list(corrections.values())
