"""Comparison of a family's steps with the model's forward pass on the first samples."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.core.finite import all_finite
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.families import Family, StackFamily
from fusion_bench_featcal.families.base import call_model, hidden_output, stop_forward, stoppable
from fusion_bench_featcal.modules.models import Modes, device_of
from fusion_bench_featcal.streams.inputs import part_of, to_device
from fusion_bench_featcal.streams.samples import naming_task

_SAMPLES = 2
_ROUNDING = 1e-5
"""Accepted relative difference. For half-precision dtypes it is a few times their epsilon."""


@torch.no_grad()
def checked_family(
    family: Family,
    model: nn.Module,
    samples: Mapping[str, list[Any]],
    *,
    device: torch.device | None = None,
    needs_closing: bool = False,
) -> Family:
    """Compare a family's steps with the model's forward pass, if the family needs it.

    Args:
        family: The family.
        model: The model, with weights.
        samples: Batches of each task of this process. The first batch of the first task is used.
        device: Device on which the model runs, by default the device of its parameters.
        needs_closing: Whether the positions that the model reads after its last block are needed.

    Raises:
        CalibrationError: If the steps differ, or the model does not run its blocks once each, in
            order.
    """
    if not family.compared:
        return family
    (task, (first, *_)), modes = next(iter(samples.items())), Modes.of(model)
    few = part_of(first.inputs, first.samples, slice(_SAMPLES))
    if isinstance(few, Mapping):  # labels are for the head
        few = {name: value for name, value in few.items() if name != "labels"}
    inputs = to_device(few, device or device_of(model))
    model.eval()
    try:
        if reason := _difference(family, model, task, inputs):
            raise CalibrationError(
                f"method.family={family.name}: the blocks of {type(model).__name__} cannot be run "
                f"one by one: {reason}. Write or correct a family (docs/tutorials/family.md)"
            )
        if needs_closing and isinstance(family, StackFamily):
            last = family.stages(model)[-1][-1]
            family = replace(family, reads_first=reads_first_position(model, last, inputs))
    finally:
        modes.restore(model)
    return family


def reads_first_position(model: nn.Module, block: str, inputs: Any) -> bool:
    """Return whether a model's logits depend on the first position of a block's output alone.

    Args:
        model: The model.
        block: Its last block.
        inputs: Inputs of the model.
    """

    def change(_: nn.Module, __: Any, output: Any) -> Any:
        hidden = hidden_output(output).clone()
        hidden[:, 1:] *= -1
        return hidden if isinstance(output, Tensor) else (hidden, *output[1:])

    logits = getattr(call_model(model, inputs), "logits", None)
    handle = model.get_submodule(block).register_forward_hook(change)
    try:
        changed = getattr(call_model(model, inputs), "logits", None)
    finally:
        handle.remove()
    if not isinstance(logits, Tensor) or not isinstance(changed, Tensor):
        return False
    return torch.equal(logits, changed)


def _difference(family: Family, model: nn.Module, task: str, inputs: Any) -> str | None:
    """Describe how the blocks' outputs differ from the model's forward pass, or return None."""
    model = family.view.arranged(model)
    blocks = [block for stage in family.stages(model) for block in stage]
    with naming_task(task):
        expected = _block_outputs(model, blocks, inputs)
    try:
        outputs = _steps(family, model, inputs)
    except Exception as error:  # the model's forward pass did not fail
        return f"a step of the family {family.name} fails ({error})"
    for block, right, hidden in zip(blocks, expected, outputs, strict=True):
        if not all_finite(right):
            return None  # calibration raises a better message
        if right.shape != hidden.shape:
            return f"{block} gives {tuple(hidden.shape)} alone and {tuple(right.shape)} in place"
        gap = float((hidden - right).double().norm() / right.double().norm().clamp_min(1e-30))
        if not gap <= max(_ROUNDING, 4 * torch.finfo(right.dtype).eps):
            return (
                f"alone, {block} gives features {gap:.1e} (relative) away from those in the "
                "model's own forward pass, so that it depends on more than its input"
            )
    return None


def _block_outputs(model: nn.Module, blocks: list[str], inputs: Any) -> list[Tensor]:
    """Return outputs of the blocks in one forward pass of the model, up to its last block.

    Raises:
        CalibrationError: If they do not run once each, in order, so that no family can fit.
    """
    outputs: list[tuple[str, Tensor]] = []

    def note(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            outputs.append((name, hidden_output(output).clone()))
            if len(outputs) == len(blocks):
                raise stop_forward()

        return hook

    handles = [model.get_submodule(name).register_forward_hook(note(name)) for name in blocks]
    with stoppable(*handles):
        call_model(model, inputs)
    if [name for name, _ in outputs] != blocks:
        raise CalibrationError(
            f"{type(model).__name__} runs the blocks {[name for name, _ in outputs]}, but has "
            f"{blocks}: each must run once, in this order. Write a family "
            "(docs/tutorials/family.md)"
        )
    return [output for _, output in outputs]


def _steps(family: Family, model: nn.Module, inputs: Any) -> list[Tensor]:
    """Return outputs of the blocks, run one by one."""
    outputs: list[Tensor] = []
    for blocks in family.stages(model):
        call = family.begin(model, inputs, blocks[0])
        for block in blocks:
            hidden, call = family.step(model, block, call)
            outputs.append(hidden)
    return outputs
