"""A comparison small enough to run in milliseconds: one-layer models, a task pool, methods."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fusion_bench import BaseModelPool, BaseTaskPool
from hydra.utils import instantiate
from safetensors.torch import load_file
from tiny_pools import ARITHMETIC, AVERAGE
from torch import nn

from fusion_bench_featcal.lab import compare, rivals
from fusion_bench_featcal.settings.fields import setting

TASKS = ("left", "right")
MERGERS = {"simple_average": AVERAGE, "task_arithmetic": ARITHMETIC}


def linear(seed: int, folder: str | None = None) -> nn.Module:
    """A random model with one hidden layer, or one that was saved in a folder."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    if folder is not None:
        model.load_state_dict(load_file(f"{folder}/model.safetensors"))
    return model


def model_pool() -> BaseModelPool:
    models: Any = {"_pretrained_": linear(0), "left": linear(1), "right": linear(2)}
    return BaseModelPool(models)


class SignTaskPool(BaseTaskPool):
    """An item of a task is right if the model agrees with that task's expert on it."""

    def __init__(self) -> None:
        super().__init__()
        self.evaluated = 0
        self.item_correct: dict[str, torch.Tensor] = {}
        self._inputs = torch.randn(20, 3, generator=torch.Generator().manual_seed(7))
        self.test_dataloaders: dict[str, Any] = dict.fromkeys(TASKS)

    @torch.no_grad()
    def evaluate(self, model: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.evaluated += 1
        right = {}
        for seed, task in enumerate(TASKS, start=1):
            if task in self.test_dataloaders:
                answers = linear(seed)(self._inputs).argmax(-1)
                right[task] = answers == model(self._inputs).argmax(-1)
        self.item_correct = right
        return {task: {"accuracy": flags.double().mean().item()} for task, flags in right.items()}


def program_of(taskpool: Any) -> Any:
    """The part of FusionBench's program that methods use, without a path for a model."""
    return SimpleNamespace(
        taskpool=taskpool,
        _modelpool={},
        method=None,
        config=None,
        merged_model_save_path=None,
        report_save_path=None,
        save_merged_model=lambda model: None,
        _instantiate_and_setup=lambda config, **_: instantiate(config, _recursive_=False),
    )


class Scale(rivals.Method):
    """Multiplies every weight, and reports samples."""

    name = "scale"
    factor: float = setting(2.0, "The factor.")
    seed: int = setting(42, "The seed.")

    def post_merge(self, merged: nn.Module, inputs: Any) -> Any:
        with torch.no_grad():
            for parameter in merged.parameters():
                parameter.mul_(self.factor)
        return rivals.MethodResult(merged, dict.fromkeys(inputs.modelpool.model_names, 5))


class ScaleAlgorithm(rivals.MethodAlgorithm):
    """The same as a FusionBench method, and so as an upstream merger."""

    method_class = Scale


class Failing(Scale):
    """Fails until there is a file."""

    until: str = setting("", "The file.", accepts="a path")

    def post_merge(self, merged: nn.Module, inputs: Any) -> nn.Module:
        if not Path(self.until).exists():
            raise RuntimeError("the flux ran dry")
        return merged


class Head(Scale):
    """Adds six parameters, and needs to know the task."""

    def post_merge(self, merged: nn.Module, inputs: Any) -> nn.Module:
        head = nn.Linear(2, 2)
        nn.init.eye_(head.weight)
        nn.init.zeros_(head.bias)
        model: Any = nn.Sequential(merged, head)
        model.is_surgery_model, model.curves = True, {"left": [(0, 2.0), (20, 1.0)]}
        return model

    def added(self, model: nn.Module) -> dict[str, int]:
        return {"head": 6}


def method(kind: type, **settings: Any) -> dict[str, Any]:
    return {"_target_": f"comparison_parts.{kind.__name__}", **settings}


def comparison(folder: Path, **choices: Any) -> Any:
    """The algorithm with its program, as FusionBench would set it up."""
    choices = {"upstream_mergers": MERGERS, "results_dir": str(folder / "results")} | choices
    algorithm: Any = compare.ComparisonAlgorithm(**choices)
    algorithm._program = program_of(SignTaskPool())
    return algorithm
