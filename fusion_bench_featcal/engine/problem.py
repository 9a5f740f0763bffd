"""The problem that a block loop solves: models, the blocks they are cut into, settings."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.engine.memory import naming_memory
from fusion_bench_featcal.engine.modules import BlockModules
from fusion_bench_featcal.engine.precision import fold_dtype, row_dtype
from fusion_bench_featcal.experts import ExpertModel, names_under
from fusion_bench_featcal.families import Family
from fusion_bench_featcal.module_copies import copied_module
from fusion_bench_featcal.settings import FeatCalSettings

_IMAGES = (nn.Conv2d, nn.BatchNorm2d)

Autocast = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Problem:
    """Models, blocks and settings. Only the parameters of `model` change, block by block.

    Attributes:
        model: The model; blocks that the loop has passed have their new parameters.
        base: The base model; None where every anchor is the merged parameter.
        experts: The expert of each task that this process works on.
        tasks: All tasks, those of other processes too.
        family: How models are cut into blocks and run.
        settings: Settings.
        stages: Names of the blocks in forward order, one list a stage.
        modules: The modules of each block.
        autocast: Makes the context of forward passes.
    """

    model: nn.Module
    base: ExpertModel | None
    experts: Mapping[str, ExpertModel]
    tasks: tuple[str, ...]
    family: Family
    settings: FeatCalSettings
    stages: Sequence[Sequence[str]]
    modules: Mapping[str, BlockModules]
    autocast: Autocast

    @property
    def device(self) -> torch.device:
        """Device of the computation."""
        return device_of(self.model)

    @property
    def row_dtype(self) -> torch.dtype:
        """Least precise dtype of sums over rows."""
        return row_dtype(self.settings, len(self.tasks), self.device)

    @property
    def fold_dtype(self) -> torch.dtype:
        """Least precise dtype of sums over tasks."""
        return fold_dtype(self.settings, len(self.tasks), self.device)

    def begin(self, model: nn.Module, stage: int, inputs: Any, last_call: Any = None) -> Any:
        """Run a model up to a stage's first block; the inputs of that block.

        Args:
            model: The model: the calibrated one or an expert.
            stage: The stage's index.
            inputs: The model's inputs.
            last_call: What a block behind the last stage's would receive; None: earlier stages run.
        """
        end = () if last_call is None else (self.family.ending(model, last_call),)
        with self.autocast():
            return self.family.begin(model, inputs, self.stages[stage][0], *end)

    def step(self, model: nn.Module, block: str, call: Any) -> tuple[Tensor, Any]:
        """Run one block; its hidden output and the inputs of the next."""
        with self.autocast():
            return self.family.step(model, block, call)

    def calibrated_in(self, block: str) -> list[str]:
        """Names of a block's parameters that get new values."""
        return self.modules[block].calibrated(biased=self.settings.calibrate_bias)

    def tensors_of(self, block: str) -> list[str]:
        """Names of the tensors that running a block needs."""
        return tensors_of_block(self.model, self.family, block)

    def gives_images(self, block: str) -> bool:
        """Return whether what a block gives, if it has four dimensions, has its channels first."""
        return any(isinstance(m, _IMAGES) for m in self.model.get_submodule(block).modules())

    def room_of_a_visit(self) -> int:
        """Bytes that the largest block may need beside the samples' features, generously.

        The expert's block, anchors, sums, systems and new parameters: twelve times the block.
        """
        blocks = [self.model.get_submodule(block) for block in self.modules]
        return 12 * max((sum(p.nbytes for p in b.parameters()) for b in blocks), default=0)

    def tensors_before(self, stage: int) -> list[str]:
        """Names of the tensors that running up to a stage needs, once earlier stages have run."""
        return tensors_before_stage(self.model, self.family, self.stages, stage)


def tensors_of_block(model: nn.Module, family: Family, block: str) -> list[str]:
    """Names of the tensors that running one block needs."""
    names = list(model.state_dict())
    if not family.whole_model:
        return names_under(names, [block])
    behind = set(tensors_of_head(model, block))
    return [name for name in names if name not in behind]


def tensors_before_stage(
    model: nn.Module, family: Family, stages: Sequence[Sequence[str]], stage: int
) -> list[str]:
    """Names of the tensors that running up to a stage's first block needs: no block from there on.

    Where stages hand on what they ended with, earlier blocks are not needed again; a family that
    replays whole models needs nothing to begin.
    """
    if family.whole_model:
        return []
    head = head_of(model)
    unused = [block for later in stages[0 if family.hands_on else stage :] for block in later]
    unused += [name for name, module in model.named_modules() if module is head]
    names = list(model.state_dict())
    behind = tensors_of_head(model, stages[stage][0])
    return sorted(set(names) - set(names_under(names, unused)) - set(behind))


def tensors_of_head(model: nn.Module, block: str) -> list[str]:
    """Names of the tensors behind the part that transformers calls a model's base model.

    Heads read that part's output; running its blocks does not need them.

    Args:
        model: The model; any but one of transformers has no head.
        block: Name of a block: there is no head where it is outside the base model.
    """
    body = getattr(model, "base_model", model)
    inside = next((name for name, module in model.named_modules() if module is body), "")
    if not inside or not block.startswith(f"{inside}."):
        return []
    names = list(model.state_dict())
    last = max(index for index, name in enumerate(names) if name.startswith(f"{inside}."))
    return names[last + 1 :]  # what comes before it may be embeddings


def is_language_model(model: nn.Module) -> bool:
    """Return whether a model gives logits over a vocabulary."""
    return head_of(model) is not None


def head_of(model: nn.Module) -> nn.Module | None:
    """Output embeddings of a language model; None for any other model."""
    find: Any = getattr(model, "get_output_embeddings", lambda: None)
    return find()


def device_of(model: nn.Module) -> torch.device:
    """Device of a model's parameters."""
    return next(model.parameters()).device


def copied(model: nn.Module, device: torch.device, *, in_place: bool = False) -> nn.Module:
    """A copy of the merged model on the device of the computation; or itself, moved there.

    Raises:
        CalibrationError: If there is no memory for it.
    """
    advice = (
        "The merged model and a copy of it must fit: merge in a narrower dtype (bfloat16), set "
        "method.stream_experts=true, or choose another device (fabric.accelerator)"
    )
    with naming_memory(device, lambda: "the copy of the merged model", lambda: advice):
        model = model if in_place else copied_module(model)
        # Without gradients autocast keeps no copies of weights, which an update would make stale.
        return model.to(device).eval().requires_grad_(False)


@dataclass(frozen=True)
class Modes:
    """Training mode of every sub-module and gradient flag of every parameter of a model."""

    training: list[bool]
    gradients: list[bool]

    @classmethod
    def of(cls, model: nn.Module) -> "Modes":
        """Record a model's modes."""
        gradients = [parameter.requires_grad for parameter in model.parameters()]
        return cls([module.training for module in model.modules()], gradients)

    def restore(self, model: nn.Module) -> None:
        """Give them to a model of the same structure."""
        for module, training in zip(model.modules(), self.training, strict=True):
            module.training = training
        for parameter, needed in zip(model.parameters(), self.gradients, strict=True):
            parameter.requires_grad_(needed)
