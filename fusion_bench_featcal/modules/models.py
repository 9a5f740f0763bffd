"""Whole models: copies, modes, and the tensors that running a model needs."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.core.finite import all_finite, finiteness, read_back
from fusion_bench_featcal.core.linear import at_least_float32
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.experts import names_under, set_module_tensor
from fusion_bench_featcal.experts.copies import copied_module
from fusion_bench_featcal.families.lists import head_of, text_tower
from fusion_bench_featcal.modules.block_modules import BlockModules


def tensors_before_stage(
    model: nn.Module, stages: Sequence[Sequence[str]], stage: int
) -> list[str]:
    """Return names of the tensors that are needed to run a model up to a stage's first block.

    Blocks of earlier stages are not needed, because their outputs are stored.
    """
    head = head_of(model)
    unused = [block for blocks in stages for block in blocks]
    unused += [name for name, module in model.named_modules() if module is head]
    names = list(model.state_dict())
    outside = tensors_outside_blocks(model, stages)
    return sorted(set(names) - set(names_under(names, unused)) - set(outside))


def expert_tensor_names(
    model: nn.Module,
    stages: Sequence[Sequence[str]],
    modules: Mapping[str, BlockModules],
    *,
    runs_experts: bool,
) -> list[str]:
    """Return names of the tensors to read from every expert, in forward order.

    Args:
        model: The model.
        stages: Its blocks.
        modules: The modules of each block.
        runs_experts: Whether experts run. Otherwise only their calibrated parameters are read.
    """
    names: list[str] = []
    for index, stage in enumerate(stages):
        if runs_experts:
            names += tensors_before_stage(model, stages, index)
        for block in stage:
            calibrated = [name for site in modules[block].all_sites for name in site.names]
            names += tensors_under(model, block) if runs_experts else calibrated
    return list(dict.fromkeys(names))


def tensors_outside_blocks(model: nn.Module, stages: Sequence[Sequence[str]]) -> list[str]:
    """Return names of the tensors that blocks do not need: poolers, classifiers, unused towers.

    Experts may have different tensors there, because each task has its own head. Tensors inside
    the module that contains the list of blocks are left out of the result, because embeddings may
    be registered there in any order.

    Args:
        model: The model. Only models of transformers have a tail.
        stages: Its blocks. Beside a text tower, all other towers are unused.
    """
    holder, names = ".".join(stages[-1][-1].split(".")[:-2]), list(model.state_dict())
    if not holder or not hasattr(model, "base_model_prefix"):
        return []
    if len(stages) > 1:  # other modules may lie between the lists
        heads = [name for name, module in model.named_modules() if module is head_of(model)]
        return names_under(names, heads)
    if holder == text_tower(model):
        return [name for name in names if not name.startswith(f"{holder}.")]
    last = max(index for index, name in enumerate(names) if name.startswith(f"{holder}."))
    return names[last + 1 :]


def dtype_of_features(model: nn.Module, block: str, device: torch.device) -> torch.dtype:
    """Return the dtype of a block's features: that of autocast if it is on, or of the weights."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    weights = (t for t in tensors_under(model, block).values() if t.is_floating_point())
    return next(weights, torch.empty(0, dtype=torch.float32)).dtype


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's parameters, or the one it loads them to while it runs."""
    device: Any = next(model.parameters()).device
    return model.device if device.type == "meta" else device  # type: ignore[return-value]


def gives_images(model: nn.Module) -> bool:
    """Return whether features of four dimensions have their channels first."""
    return any(isinstance(module, nn.Conv2d | nn.BatchNorm2d) for module in model.modules())


def copied(model: nn.Module, device: torch.device, *, in_place: bool = False) -> nn.Module:
    """Return a copy of the merged model on a device, or the model itself, moved there."""
    model = model if in_place else copied_module(model)
    # Without gradients autocast keeps no copies of weights, which an update would make stale.
    return model.to(device).eval().requires_grad_(False)


@dataclass(frozen=True)
class Modes:
    """Training mode of every sub-module and gradient flag of every parameter of a model."""

    training: list[bool]
    gradients: dict[str, bool]

    @classmethod
    def of(cls, model: nn.Module) -> "Modes":
        """Record a model's modes."""
        gradients = {name: tensor.requires_grad for name, tensor in model.named_parameters()}
        return cls([module.training for module in model.modules()], gradients)

    def restore(self, model: nn.Module) -> None:
        """Set these modes in a model of the same structure."""
        for module, training in zip(model.modules(), self.training, strict=True):
            module.training = training
        # By name, because a model that loads tensors while it runs loses its ties.
        for name, needed in self.gradients.items():
            model.get_parameter(name).requires_grad_(needed)


def load_updates(model: nn.Module, block: str, updates: Mapping[str, Tensor], advice: str) -> None:
    """Replace parameters and statistics of a block, all or none, in the model's dtype.

    Raises:
        CalibrationError: If a value does not fit the dtype.
    """
    tensors = tensors_under(model, block)
    new = {name: value.to(tensors[name]) for name, value in updates.items()}
    refuse_overflow(block, new, advice)
    for name, value in new.items():
        set_module_tensor(model, name, value)


def refuse_overflow(block: str, new: Mapping[str, Tensor], advice: str) -> None:
    """Refuse new tensors of a block with values that do not fit their dtype.

    Raises:
        CalibrationError: Naming the tensor.
    """
    signs = read_back(finiteness([*new.values()]))
    for (name, value), sign in zip(new.items(), signs, strict=True):
        if not math.isfinite(sign) and not all_finite(value):
            raise CalibrationError(
                f"block {block}: the new {name} is not finite in {value.dtype}. {advice}, or "
                "merge in a wider dtype"
            )


def tensors_under(model: nn.Module, block: str) -> dict[str, Tensor]:
    """Return the parameters and buffers of a block by name, without copies."""
    return model.get_submodule(block).state_dict(prefix=f"{block}.", keep_vars=True)


@contextmanager
def in_float32(module: nn.Module) -> Iterator[Callable[[Tensor], Tensor]]:
    """Context in which a module computes in float32 or better. Yields the conversion of its inputs.

    The module's own tensors are restored at the end. Flash attention only takes 16-bit tensors, so
    its dtype is kept.
    """
    configs = (getattr(part, "config", None) for part in module.modules())
    is_flash = any("flash" in str(getattr(c, "_attn_implementation", None)) for c in configs)
    widened = nn.Identity() if is_flash else at_least_float32
    every = module.named_parameters, module.named_buffers
    tensors = {name: t for named in every for name, t in named(remove_duplicate=False)}
    with ExitStack() as stack:
        for name, tensor in tensors.items():
            set_module_tensor(module, name, widened(tensor))
            stack.callback(set_module_tensor, module, name, tensor)
        yield widened


def without_ties(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's tensors by name, tied tensors once."""
    stored = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(stored.items())}
    return {name: stored[name].detach() for name in reversed(first.values())}


def relative_change(before: Tensor, after: Tensor) -> dict[str, float]:
    """Return the norm of a weight's update divided by the norm of the weight, unless it is 0."""
    update, norm = read_back([torch.linalg.vector_norm(x) for x in (after - before, before)])
    return {"relative_update": update / norm} if norm else {}
