"""A merged model with a correction for each task: modules, hooks and the folder on disk."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor, nn
from torch.nn import functional

from fusion_bench_featcal.families.base import hidden_output
from fusion_bench_featcal.files import ReportError
from fusion_bench_featcal.json_files import json_text, plain, read_json
from fusion_bench_featcal.settings import CalibrationError

VARIANT = "uncorrected"
"""Part of the name of the merged model's weight file, so that the folder does not load as a plain
model, which would silently omit the corrections."""


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
    """One task's corrections: one after each block, for all tokens, and one of final features."""

    def __init__(self, blocks: Iterable[nn.Module], final: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.final = final


class Corrected(nn.Module):
    """A frozen merged model with a correction for each task, which needs the task's name.

    Names that differ only in dots and dashes raise a ValueError.

    Attributes:
        model: The merged model, not a copy.
        corrections: Each task's correction, under its task's key.
        tasks: The tasks' names.
        samples: Task -> `{"samples": number, "split": name}` of its correction.
        curves: Task -> its training curve, (step, loss).
    """

    is_surgery_model = True  # FusionBench's protocol
    stem: ClassVar[str]  # name of the files next to the merged model
    # Constructor arguments that are saved with the tensors.
    described: ClassVar[tuple[str, ...]] = ("samples", "curves")

    def __init__(
        self,
        model: nn.Module,
        corrections: Mapping[str, nn.Module],
        *,
        samples: Mapping[str, Mapping[str, Any]] | None = None,
        curves: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.model: Any = model
        self.tasks = tuple(corrections)
        self.samples = {task: dict(used) for task, used in (samples or {}).items()}
        self.curves = {t: [(*point,) for point in curve] for t, curve in (curves or {}).items()}
        modules = {_key(task): correction for task, correction in corrections.items()}
        if len(modules) < len(corrections):
            raise ValueError(f"tasks must differ in more than '-', '.' and '_': {[*corrections]}")
        self.corrections = nn.ModuleDict(modules)
        self.requires_grad_(False).eval()

    def correction(self, task: str | None) -> Any:
        """Return one task's correction.

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
        """Return module -> parameters that deployment needs in addition to the merged model."""
        counts = {
            name: sum(parameter.numel() for parameter in module.parameters(recurse=False))
            for name, module in self.corrections.named_modules()
        }
        return {name: count for name, count in counts.items() if count}

    def save_pretrained(self, folder: str | Path, **kwargs: Any) -> None:
        """Save the merged model by its `save_pretrained`, and the corrections in that folder."""
        self.model.save_pretrained(folder, variant=VARIANT, **kwargs)
        weights, description = self._files(folder)
        tensors = {
            f"{part}.{name}": parameter.data.contiguous()
            for part, module in self.named_children()
            if part != "model"
            for name, parameter in module.named_parameters()
        }
        save_file(tensors, weights)
        content = {name: getattr(self, name) for name in ("tasks", *self.described)}
        content["weights"] = hashlib.sha256(weights.read_bytes()).hexdigest()
        description.write_text(json_text(plain(content, description.name)), encoding="utf-8")

    @classmethod
    def from_pretrained(cls, folder: str | Path, **kwargs: Any) -> Self:
        """Load a model that `save_pretrained` saved.

        Args:
            folder: The folder.
            **kwargs: Arguments of `from_pretrained` of the merged model's class.

        Raises:
            CalibrationError: If the folder has no such model, or a file is damaged.
        """
        weights, text = cls._files(folder)
        if not (weights.is_file() and text.is_file()):
            raise CalibrationError(
                f"{folder} holds no corrected model: {weights.name} or {text.name} is missing"
            )
        try:
            description, content = read_json(text), weights.read_bytes()
            if description.get("weights") != hashlib.sha256(content).hexdigest():
                raise CalibrationError(
                    f"{weights} is damaged: its digest is another. Save it again"
                )
            tensors = load(content)
        except (OSError, ReportError, SafetensorError) as error:
            raise CalibrationError(
                f"the corrected model in {folder} is damaged: {error}"
            ) from error
        options = {name: description.get(name) for name in cls.described}
        tasks = description["tasks"]
        options["corrections"] = {task: _correction(tensors, task, weights) for task in tasks}
        return cls(**cls._loaded(folder, tensors, **kwargs), **options)

    @classmethod
    def _files(cls, folder: str | Path) -> tuple[Path, Path]:
        return Path(folder) / f"{cls.stem}.safetensors", Path(folder) / f"{cls.stem}.json"

    @classmethod
    def _loaded(cls, folder: Any, tensors: Any, **kwargs: Any) -> dict[str, Any]:
        """Load the merged model, and further objects that are saved with the corrections."""
        raise NotImplementedError


@contextmanager
def corrected_outputs(
    model: nn.Module, names: Iterable[str], corrections: Iterable[Callable[[Tensor], Tensor]]
) -> Iterator[list[Tensor]]:
    """Context in which modules of a model return corrected features.

    Args:
        model: The model.
        names: Names of the modules.
        corrections: The correction of each module's output, or of the output's first entry.

    Yields:
        A list to which every correction adds its features, averaged over tokens, `[batch, d]`.
    """
    means: list[Tensor] = []

    def hook(correction: Callable[[Tensor], Tensor]) -> Any:
        def correct(_: nn.Module, __: Any, output: Any) -> Any:
            corrected = correction(hidden_output(output))
            means.append(corrected.flatten(1, -2).mean(1) if corrected.ndim > 2 else corrected)
            return corrected if isinstance(output, Tensor) else (corrected, *output[1:])

        return correct

    handles = [
        model.get_submodule(name).register_forward_hook(hook(correction))
        for name, correction in zip(names, corrections, strict=True)
    ]
    try:
        yield means
    finally:
        for handle in handles:
            handle.remove()


def _correction(tensors: Mapping[str, Tensor], task: str, file: Path) -> nn.Module:
    """Rebuild a task's correction, whose kind follows from the names of its tensors."""
    modules: dict[str, dict[str, Tensor]] = {}
    prefix = f"corrections.{_key(task)}."
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            module, _, leaf = name.removeprefix(prefix).rpartition(".")
            modules.setdefault(module, {})[leaf] = tensor
    try:
        if "" in modules:
            kind = SurgeryModule if "down" in modules[""] else AffineModule
            return kind(**modules[""])
        final = SurgeryModule(**modules.pop("final"))
        blocks = [SurgeryModule(**modules[f"blocks.{i}"]) for i in range(len(modules))]
        return LayerSurgery(blocks, final)
    except (KeyError, TypeError) as error:
        raise CalibrationError(f"{file.name} has no whole correction for task {task!r}") from error


def _key(task: str) -> str:
    """Return a task's name as a module's name. FusionBench replaces the same two characters."""
    return "task_" + task.replace("-", "_").replace(".", "_")
