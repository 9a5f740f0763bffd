"""The parts of a build that all bundled suites share."""

import json
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig

from fusion_bench_featcal.files.suite_paths import suite_path

Log = Callable[[str], None]
Weights = dict[str, Tensor]


class Builder:
    """Trains and measures the models of one suite.

    Attributes:
        TASKS: Names of the suite's tasks.
        RECIPES: Name of a suite -> its training recipe.
        SETS: Sets of tasks that are merged and measured separately, if there are any.
        SPELLED_OUT: Defaults that a configuration has to name, as versions differ.
        CHANGES: Changes of the shipped configuration.
        STORED_IN: Type of the stored numbers.
    """

    TASKS: Sequence[str]
    RECIPES: ClassVar[dict[str, Any]]
    SETS: ClassVar[dict[str, Sequence[str]]] = {}
    SPELLED_OUT: ClassVar[Sequence[str]] = ()
    CHANGES: ClassVar[dict[str, Any]] = {}
    STORED_IN: ClassVar[torch.dtype] = torch.float16

    def __init__(
        self, suite: str, folder: Path, tasks: Sequence[str], recipe: Any, seed: int, log: Log
    ) -> None:
        """Prepare a build. `folder` has the tokenizer or processor."""
        self.suite, self.folder, self.tasks = suite, folder, tasks
        self.recipe, self.seed, self.log = recipe, seed, log

    def new_model(self) -> Any:
        """Return an untrained model in the shape of the shipped one."""
        shipped = suite_path(f"{self.suite}/pretrained")
        config: Any = AutoConfig.from_pretrained(shipped, **self.CHANGES)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = getattr(transformers, config.architectures[0])(config)
            self.initialise(model)
        return model

    def initialise(self, model: Any) -> None:
        """Change the random weights of a new model."""

    def pretrain(self, model: Any) -> None:
        """Train the base on all tasks, in place."""
        raise NotImplementedError

    def finetune(self, model: Any, task: str) -> None:
        """Train an expert that starts as the base, in place."""
        raise NotImplementedError

    def expert_part(self, model: Any) -> tuple[Weights, Any, str]:
        """Return the tensors, configuration and class name that an expert is stored as."""
        return self.stored(model), model.config, type(model).__name__

    def stored(self, model: Any) -> Weights:
        """Return a whole model's tensors under the names of its file."""
        return tensors_of(model)

    def load(self, model: Any, weights: Weights) -> None:
        """Load tensors of a file, of the whole model or of the part that is an expert."""
        model.load_state_dict(weights, strict=False)

    def accuracy(self, model: Any, task: str) -> float:
        """Return the share (0..1) of the task's test items that a model gets right."""
        raise NotImplementedError


def stage_generator(seed: int, stage: str) -> torch.Generator:
    """Return a separate generator for each stage, so that stages are independent."""
    return torch.Generator().manual_seed(zlib.crc32(f"{seed}/{stage}".encode()))


def tensors_of(model: nn.Module) -> Weights:
    """Return the tensors that a model stores, tied tensors under their first name only."""
    stored = set(model.state_dict())
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in stored}
    return {name: p.detach() for name, p in model.named_parameters()} | buffers


def loss_and_accuracy(logits: Tensor, labels: Tensor) -> tuple[Tensor, float]:
    """Return the mean cross-entropy, and the share of rows whose label is the most likely."""
    right = (logits.argmax(dim=-1) == labels).float().mean().item()
    return F.cross_entropy(logits, labels), right


def train(
    optimiser: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    steps: int,
    gradient_clip: float,
    next_scores: Callable[[], tuple[Tensor, float]],
    log: Log,
) -> None:
    """Take optimiser steps, and report every 100 of them.

    Args:
        optimiser: Holds the trained parameters, in one group.
        schedule: Its learning rate.
        steps: Number of steps.
        gradient_clip: Largest norm of the gradient.
        next_scores: Returns loss and accuracy on a new batch.
        log: Called with each line of progress.
    """
    parameters: list[nn.Parameter] = optimiser.param_groups[0]["params"]
    recent: deque[float] = deque(maxlen=100)
    for step in range(1, steps + 1):
        loss, accuracy = next_scores()
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, gradient_clip)
        optimiser.step()
        schedule.step()
        recent.append(accuracy)
        if step % 100 == 0 or step == steps:
            log(f"  step {step}/{steps}: accuracy {fmean(recent):.3f} over the last steps")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
