"""Folders of merged models with corrections: written and read in one way."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor, nn
from transformers import CLIPVisionModel

from fusion_bench_featcal.files import ReportError
from fusion_bench_featcal.json_files import plain, read_json, sealed_json
from fusion_bench_featcal.settings import CalibrationError

VARIANT = "uncorrected"
"""Weights of the merged model carry this in their file's name, so that the folder does not load as
a plain model: that would silently leave the corrections out."""


_WEIGHTS = "weights"
"""Key of the corrections' file's digest in the description."""


def task_key(task: str) -> str:
    """A task's name as a module's: FusionBench replaces the same two characters."""
    return "task_" + task.replace("-", "_").replace(".", "_")


def task_modules(corrections: Mapping[str, nn.Module]) -> nn.ModuleDict:
    """Each task's correction under its key.

    Raises:
        ValueError: If two tasks differ only in dots and dashes.
    """
    modules = nn.ModuleDict({task_key(task): part for task, part in corrections.items()})
    if len(modules) < len(corrections):
        raise ValueError(f"tasks must differ in more than '-', '.' and '_': {list(corrections)}")
    return modules


def save_checkpoint(
    corrected: Any, folder: str | Path, stem: str, description: Mapping[str, Any], **kwargs: Any
) -> None:
    """Save a merged model and its corrections, with its projection where there is one.

    Args:
        corrected: Has `model` and `corrections`, perhaps `projection`, and `tasks`, `samples`,
            `curves`.
        folder: Where to.
        stem: Name of the files beside the merged model's.
        description: What else is needed to put the parts together.
        **kwargs: For the merged model's own `save_pretrained`.
    """
    target = Path(folder)
    corrected.model.save_pretrained(target, variant=VARIANT, **kwargs)
    tensors = {
        f"{name}.{key}": tensor.contiguous()
        for name in ("projection", "corrections")
        if hasattr(corrected, name)
        for key, tensor in getattr(corrected, name).state_dict().items()
    }
    save_file(tensors, target / f"{stem}.safetensors")
    told = {name: getattr(corrected, name) for name in ("tasks", "samples", "curves")}
    weights = hashlib.sha256((target / f"{stem}.safetensors").read_bytes()).hexdigest()
    content = plain(told | dict(description) | {_WEIGHTS: weights}, f"{stem}.json")
    (target / f"{stem}.json").write_text(sealed_json(content), encoding="utf-8")


@dataclass(frozen=True)
class SavedCorrections:
    """Corrections that lie beside a merged model.

    Attributes:
        tensors: All tensors, by name.
        parts: Task -> name -> tensor of its correction.
        told: The description.
    """

    tensors: dict[str, Tensor]
    parts: dict[str, dict[str, Tensor]]
    told: dict[str, Any]


def load_corrections(folder: str | Path, stem: str) -> SavedCorrections:
    """Load what `save_checkpoint` saved beside the merged model.

    Args:
        folder: The folder.
        stem: Name of the files.

    Returns:
        The corrections.

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
        if digest is not None and digest != hashlib.sha256(content).hexdigest():
            raise CalibrationError(f"{weights} is damaged: its digest is another. Save it again")
        tensors = load(content)
    except (OSError, ReportError, SafetensorError) as error:
        raise CalibrationError(f"the corrected model in {folder} is damaged: {error}") from error
    parts = {
        task: {
            name.removeprefix(prefix): tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        for task in description["tasks"]
        for prefix in [f"corrections.{task_key(task)}."]
    }
    # Folders of earlier versions do not tell how the training went.
    curves = description.get("curves", {})
    description["curves"] = {t: [tuple(point) for point in c] for t, c in curves.items()}
    return SavedCorrections(tensors, parts, description)


def load_checkpoint(
    folder: str | Path, stem: str, **kwargs: Any
) -> tuple[nn.Module, nn.Linear, dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Load a CLIP vision model with its projection and its corrections.

    Args:
        folder: The folder.
        stem: Name of the files beside the merged model's.
        **kwargs: For `CLIPVisionModel.from_pretrained`.

    Returns:
        The merged model; the projection; task -> name -> tensor of its correction; the
        description.

    Raises:
        CalibrationError: If the folder holds no such model.
    """
    saved = load_corrections(folder, stem)
    weight = saved.tensors["projection.weight"]
    projection = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    projection.weight = nn.Parameter(weight)
    model = CLIPVisionModel.from_pretrained(folder, variant=VARIANT, **kwargs)
    return model, projection, saved.parts, saved.told
