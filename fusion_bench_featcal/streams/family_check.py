"""Comparison of a family's steps with the model's forward pass on the first samples."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.core.finite import all_finite
from fusion_bench_featcal.families import Family, ReplayFamily, StackFamily
from fusion_bench_featcal.families.base import call_model, hidden_output, stop_forward, stoppable
from fusion_bench_featcal.modules.models import Modes, device_of
from fusion_bench_featcal.settings import CalibrationError
from fusion_bench_featcal.streams.inputs import part_of, to_device
from fusion_bench_featcal.streams.samples import naming_task

log = logging.getLogger(__name__)

_SAMPLES = 2
_ROUNDING = 1e-5
"""Accepted relative difference. For half-precision dtypes it is a few times their epsilon."""


@torch.no_grad()
def checked_family(
    family: Family,
    setting: Any,
    model: nn.Module,
    samples: Mapping[str, list[Any]],
    *,
    device: torch.device | None = None,
    needs_closing: bool = False,
    of_first: Callable[[Callable[[], Any]], Any] = lambda find: find(),
) -> Family:
    """Compare a family's steps with the model's forward pass, if the family needs it.

    Args:
        family: The family.
        setting: `method.family`. With `auto`, steps that differ are replaced by `replay`.
        model: The model, with weights.
        samples: Batches of each task of this process. Only the first process runs one: the first
            batch of the first task.
        device: Device on which the model runs, by default the device of its parameters.
        needs_closing: Whether the positions that the model reads after its last block are needed.
        of_first: Calls a function in the first process and returns its result in all.

    Raises:
        CalibrationError: If the steps differ and the family was named, or the model does not run
            its blocks once each, in order.
    """
    if not family.compared:
        return family
    task, modes = next(iter(samples)), Modes.of(model)
    blocks = [block for stage in family.stages(model) for block in stage]

    def inputs() -> Any:
        first = samples[task][0]
        few = part_of(first.inputs, first.samples, slice(_SAMPLES))
        if isinstance(few, Mapping):  # labels are for the head
            few = {name: value for name, value in few.items() if name != "labels"}
        return to_device(few, device or device_of(model))

    model.eval()
    try:
        reason = of_first(lambda: _difference(family, model, task, inputs()))
        if reason is None:
            if needs_closing and isinstance(family, StackFamily):
                reads = of_first(lambda: reads_first_position(model, blocks[-1], inputs()))
                family = replace(family, reads_first=reads)
            return family
    finally:
        modes.restore(model)
    instead = f"{{name: replay, blocks: [{blocks[0].rpartition('.')[0]}.*]}}"
    text = f"the blocks of {type(model).__name__} cannot be run one by one: {reason}"
    if setting != "auto":
        raise CalibrationError(f"method.family={family.name}: {text}. Set method.family={instead}")
    log.warning(
        "method.family=auto: %s. Each block is replayed inside the model's own forward pass "
        "instead (method.family=%s): about %.0f times as many block passes, and whole experts "
        "in memory",
        text,
        instead,
        max(1, len(blocks) / 2),
    )
    return ReplayFamily(blocks=blocks, has_tables=family.has_tables)


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
            f"{blocks}: each must run once, in this order. Name others by "
            "method.family={name: replay, blocks: [...]}"
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
