"""A merged model together with its tasks' corrections: its parts, its folder on disk."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor, nn
from torch.nn import functional

from fusion_bench_featcal.files import ReportError
from fusion_bench_featcal.json_files import json_text, plain, read_json
from fusion_bench_featcal.settings import CalibrationError

VARIANT = "uncorrected"
"""Weights of the merged model carry this in their file's name, so that the folder does not load as
a plain model: that would silently leave the corrections out."""

_WEIGHTS = "weights"  # key of the digest of the corrections' file in the description
_SHARED = "shared"  # key: whether all tasks have one correction


class SurgeryModule(nn.Module):
    """One task's correction `f - U relu(D f)`: D is `down`, `[rank, d]`, U is `up`, `[d, rank]`."""

    def __init__(self, down: Tensor, up: Tensor) -> None:
        super().__init__()
        self.down = nn.Parameter(down)
        self.up = nn.Parameter(up)

    def forward(self, features: Tensor) -> Tensor:
        """Correct features `[..., d]`."""
        hidden = torch.relu(functional.linear(features, self.down))
        return features - functional.linear(hidden, self.up)


class AffineModule(nn.Module):
    """One task's correction `f - (A f + b)`: A is `matrix`, `[d, d]`, b is `shift`, `[d]`."""

    def __init__(self, matrix: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.matrix = nn.Parameter(matrix, requires_grad=False)
        self.shift = nn.Parameter(shift, requires_grad=False)

    def forward(self, features: Tensor) -> Tensor:
        """Correct features `[..., d]`."""
        return features - functional.linear(features, self.matrix, self.shift)


class LayerSurgery(nn.Module):
    """One task's corrections: one behind each block, for all tokens, and one of final features.

    Attributes:
        blocks: In forward order.
        final: Of the final features.
    """

    def __init__(self, blocks: Iterable[SurgeryModule], final: SurgeryModule) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.final = final


class Corrected(nn.Module):
    """A frozen merged model with a correction for each task; it must be told the task.

    Attributes:
        model: The merged model, not a copy.
        corrections: Each task's correction, under its task's key.
        tasks: The tasks' names.
        samples: Task -> `{"samples": number, "split": name}` that its correction was fitted on.
        curves: Task -> its training's curve, (step, loss); empty where nothing was trained.
        seen: Task -> positions of the test items that its correction was fitted on, and the number
            of all; empty after loading, and where none were.
    """

    is_surgery_model = True  # FusionBench's protocol
    stem: ClassVar[str]  # name of the files beside the merged model's
    # What is saved beside the tensors: the constructor's arguments of these names.
    described: ClassVar[tuple[str, ...]] = ("samples", "curves")

    def __init__(
        self,
        model: nn.Module,
        corrections: Mapping[str, nn.Module],
        *,
        samples: Mapping[str, Mapping[str, Any]] | None = None,
        curves: Mapping[str, Any] | None = None,
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
        self.seen: dict[str, tuple[list[int], int]] = {}
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

    def save_pretrained(self, folder: str | Path, **kwargs: Any) -> None:
        """Save the merged model, by its own `save_pretrained`, and the corrections beside it."""
        target = Path(folder)
        self.model.save_pretrained(target, variant=VARIANT, **kwargs)
        # The children are each module once, under the first task that has it.
        parts: dict[str, Any] = {
            "corrections": nn.ModuleDict(dict(self.corrections.named_children()))
        }
        if hasattr(self, "projection"):
            parts["projection"] = self.projection
        tensors = {
            f"{name}.{key}": tensor.contiguous()
            for name, part in parts.items()
            for key, tensor in part.state_dict().items()
        }
        weights = target / f"{self.stem}.safetensors"
        save_file(tensors, weights)
        content = {name: getattr(self, name) for name in ("tasks", *self.described)}
        content[_SHARED] = len(parts["corrections"]) < len(self.tasks)
        content[_WEIGHTS] = _digest(weights.read_bytes())
        text = json_text(plain(content, f"{self.stem}.json"))
        (target / f"{self.stem}.json").write_text(text, encoding="utf-8")

    @classmethod
    def _saved(cls, folder: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All tensors that lie beside a merged model, and the constructor's keyword arguments.

        Raises:
            CalibrationError: If the folder holds no such model, or a file is damaged.
        """
        weights, text = (Path(folder) / f"{cls.stem}.{kind}" for kind in ("safetensors", "json"))
        if not (weights.is_file() and text.is_file()):
            raise CalibrationError(
                f"{folder} holds no corrected model: {weights.name} or {text.name} is missing"
            )
        try:
            description, content = read_json(text), weights.read_bytes()
            digest = description.get(_WEIGHTS)  # which earlier versions did not write
            if digest not in (None, _digest(content)):
                raise CalibrationError(
                    f"{weights} is damaged: its digest is another. Save it again"
                )
            tensors = load(content)
        except (OSError, ReportError, SafetensorError) as error:
            raise CalibrationError(
                f"the corrected model in {folder} is damaged: {error}"
            ) from error
        options = {name: description.get(name) for name in cls.described}
        curves = options["curves"] or {}  # not in folders of earlier versions
        options["curves"] = {t: [tuple(point) for point in c] for t, c in curves.items()}
        tasks = description["tasks"]
        if description.get(_SHARED):
            options["corrections"] = dict.fromkeys(tasks, _correction(tensors, tasks[0], weights))
        else:
            options["corrections"] = {task: _correction(tensors, task, weights) for task in tasks}
        return tensors, options


def _correction(tensors: Mapping[str, Tensor], task: str, file: Path) -> nn.Module:
    """A task's correction, of the kind that its tensors' names tell."""
    modules: dict[str, dict[str, Tensor]] = {}
    prefix = f"corrections.{_key(task)}."
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            module, _, leaf = name.removeprefix(prefix).rpartition(".")
            modules.setdefault(module, {})[leaf] = tensor
    try:
        if "" not in modules:  # corrections behind blocks have modules of their own
            final = SurgeryModule(**modules.pop("final"))
            blocks = [SurgeryModule(**modules[f"blocks.{i}"]) for i in range(len(modules))]
            return LayerSurgery(blocks, final)
        kind = SurgeryModule if "down" in modules[""] else AffineModule
        return kind(**modules[""])
    except (KeyError, TypeError) as error:
        raise CalibrationError(f"{file.name} has no whole correction for task {task!r}") from error


def _key(task: str) -> str:
    """A task's name as a module's: FusionBench replaces the same two characters."""
    return "task_" + task.replace("-", "_").replace(".", "_")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
