"""A merged model together with its tasks' corrections: its parts, its folder on disk."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor, nn
from torch.nn import functional

from fusion_bench_featcal.files import ReportError
from fusion_bench_featcal.json_files import plain, read_json, sealed_json
from fusion_bench_featcal.settings import CalibrationError

VARIANT = "uncorrected"
"""Weights of the merged model carry this in their file's name, so that the folder does not load as
a plain model: that would silently leave the corrections out."""

_WEIGHTS = "weights"  # key of the digest of the corrections' file in the description


class SurgeryModule(nn.Module):
    """One task's correction: `f - U relu(D f)`, without biases.

    Attributes:
        down: D, `[rank, d]`.
        up: U, `[d, rank]`.
    """

    def __init__(self, down: Tensor, up: Tensor) -> None:
        super().__init__()
        self.down = nn.Parameter(down)
        self.up = nn.Parameter(up)

    def drift(self, features: Tensor) -> Tensor:
        """Correction to subtract from features `[..., d]`."""
        return functional.linear(torch.relu(functional.linear(features, self.down)), self.up)

    def forward(self, features: Tensor) -> Tensor:
        """Correct features `[..., d]`."""
        return features - self.drift(features)


class AffineModule(nn.Module):
    """One task's correction: `f - (A f + b)`.

    Attributes:
        matrix: A, `[d, d]`.
        shift: b, `[d]`.
    """

    def __init__(self, matrix: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.matrix = nn.Parameter(matrix, requires_grad=False)
        self.shift = nn.Parameter(shift, requires_grad=False)

    def drift(self, features: Tensor) -> Tensor:
        """Correction to subtract from features `[..., d]`."""
        return functional.linear(features, self.matrix, self.shift)

    def forward(self, features: Tensor) -> Tensor:
        """Correct features `[..., d]`."""
        return features - self.drift(features)


Correction = SurgeryModule | AffineModule


class Corrected(nn.Module):
    """A frozen merged model with a correction for each task; it must be told the task.

    Attributes:
        model: The merged model, not a copy.
        corrections: Each task's correction, under its task's key.
        tasks: The tasks' names.
        samples: Task -> `{"samples": number, "split": name}` that its correction was fitted on.
        curves: Task -> its training's curve, (step, loss); empty where nothing was trained.
    """

    is_surgery_model = True  # FusionBench's protocol
    stem: str  # name of the files beside the merged model's

    def __init__(
        self,
        model: nn.Module,
        corrections: Mapping[str, nn.Module],
        samples: Mapping[str, Mapping[str, Any]] | None,
        curves: Mapping[str, Any] | None,
    ) -> None:
        """Put the parts together and freeze them.

        Raises:
            ValueError: If two tasks differ only in dots and dashes.
        """
        super().__init__()
        self.model: Any = model
        self.tasks = tuple(corrections)
        self.samples = {task: dict(used) for task, used in (samples or {}).items()}
        self.curves = dict(curves or {})
        modules = {_key(task): correction for task, correction in corrections.items()}
        if len(modules) < len(corrections):
            raise ValueError(f"tasks must differ in more than '-', '.' and '_': {[*corrections]}")
        self.corrections = nn.ModuleDict(modules)
        self.requires_grad_(False).eval()

    def correction(self, task: str | None) -> Any:
        """One task's correction.

        Raises:
            CalibrationError: If there is none.
        """
        if task not in self.tasks:
            raise CalibrationError(
                f"there is no feature correction for task {task!r}: surgery methods must be told "
                f"the task, and correct those they were fitted on: {', '.join(self.tasks)}"
            )
        return self.corrections[_key(task)]

    def added(self) -> dict[str, int]:
        """Module -> parameters that deployment needs beyond the merged model's."""
        counts = {
            name: sum(parameter.numel() for parameter in module.parameters(recurse=False))
            for name, module in self.corrections.named_modules()
        }
        return {name: count for name, count in counts.items() if count}

    def added_parameters(self) -> int:
        """Numbers that deployment needs beyond the merged model's, over all tasks."""
        return sum(self.added().values())

    def description(self) -> dict[str, Any]:
        """Values beside the tensors that `from_pretrained` needs."""
        return {}

    def save_pretrained(self, folder: str | Path, **kwargs: Any) -> None:
        """Save the merged model, by its own `save_pretrained`, and the corrections beside it."""
        target = Path(folder)
        self.model.save_pretrained(target, variant=VARIANT, **kwargs)
        tensors = {
            f"{name}.{key}": tensor.contiguous()
            for name in ("projection", "corrections")
            if hasattr(self, name)
            for key, tensor in getattr(self, name).state_dict().items()
        }
        weights = target / f"{self.stem}.safetensors"
        save_file(tensors, weights)
        content = {name: getattr(self, name) for name in ("tasks", "samples", "curves")}
        content |= self.description() | {_WEIGHTS: _digest(weights.read_bytes())}
        text = sealed_json(plain(content, f"{self.stem}.json"))
        (target / f"{self.stem}.json").write_text(text, encoding="utf-8")


class SavedCorrections(NamedTuple):
    """Corrections that lie beside a merged model: tensors by name, those of each task, the rest."""

    tensors: dict[str, Tensor]
    by_task: dict[str, dict[str, Tensor]]
    description: dict[str, Any]

    def modules(self, stem: str) -> dict[str, Correction]:
        """Task -> its correction of final features; an error if one is of no known kind."""
        return {task: _module(tensors, task, stem) for task, tensors in self.by_task.items()}


def load_corrections(folder: str | Path, stem: str) -> SavedCorrections:
    """Load the corrections that lie in a folder, in files named by a stem, beside a merged model.

    Raises:
        CalibrationError: If the folder holds no such model, or a file is damaged.
    """
    weights, text = (Path(folder) / f"{stem}.{kind}" for kind in ("safetensors", "json"))
    if not (weights.is_file() and text.is_file()):
        raise CalibrationError(
            f"{folder} holds no corrected model: {weights.name} or {text.name} is missing"
        )
    try:
        description, content = read_json(text), weights.read_bytes()
        digest = description.pop(_WEIGHTS, None)  # which earlier versions did not write
        if digest not in (None, _digest(content)):
            raise CalibrationError(f"{weights} is damaged: its digest is another. Save it again")
        tensors = load(content)
    except (OSError, ReportError, SafetensorError) as error:
        raise CalibrationError(f"the corrected model in {folder} is damaged: {error}") from error
    by_task = {
        task: {
            name.removeprefix(prefix): tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        for task in description["tasks"]
        for prefix in [f"corrections.{_key(task)}."]
    }
    # Folders of earlier versions do not tell how the training went.
    curves = description.get("curves", {})
    description["curves"] = {t: [tuple(point) for point in c] for t, c in curves.items()}
    return SavedCorrections(tensors, by_task, description)


def _module(tensors: Mapping[str, Tensor], task: str, stem: str) -> Correction:
    if set(tensors) == {"down", "up"}:
        return SurgeryModule(tensors["down"], tensors["up"])
    if set(tensors) == {"matrix", "shift"}:
        return AffineModule(tensors["matrix"], tensors["shift"])
    raise CalibrationError(f"{stem}.safetensors has no correction for task {task!r}")


def _key(task: str) -> str:
    """A task's name as a module's: FusionBench replaces the same two characters."""
    return "task_" + task.replace("-", "_").replace(".", "_")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
