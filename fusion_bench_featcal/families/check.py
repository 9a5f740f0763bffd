"""Comparison of a family's steps with the model's forward pass on some samples."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.place import error_context, message_of
from fusion_bench_featcal.errors.words import option
from fusion_bench_featcal.families.base import (
    Family,
    ForwardStopped,
    call_model,
    evaluating,
    hidden_output,
    stoppable,
)

_ROUNDING = 1e-5
"""Accepted relative difference. For half-precision dtypes it is a few times their epsilon."""


@torch.no_grad()
def compare_with_model(
    family: Family,
    model: nn.Module,
    stages: Sequence[Sequence[str]],
    inputs: Any,
    *,
    needs_first: bool = False,
) -> bool:
    """Compare the blocks, run one by one, with the model's forward pass, unless tests have.

    Args:
        family: Runs the blocks.
        model: The model, with weights.
        stages: Its blocks.
        inputs: Some of its inputs.
        needs_first: Whether the return value is needed.

    Returns:
        Whether the head reads only the first position of the last block's output.

    Raises:
        CalibrationError: If they differ, with the reason.
    """
    with evaluating(model):
        if family.compared and (reason := _difference(family, model, stages, inputs)):
            raise CalibrationError(
                f"{option('family', family.name)}: the blocks of {type(model).__name__} cannot "
                f"be run one by one: {reason}. Write or correct a family (docs/howto/own-family.md)"
            )
        return needs_first and family.reads_first(model, inputs)


def _difference(
    family: Family, model: nn.Module, stages: Sequence[Sequence[str]], inputs: Any
) -> str | None:
    """Describe how the blocks' outputs differ from the model's forward pass, or return None."""
    blocks = [block for stage in stages for block in stage]
    try:
        alone = _outputs_alone(family, model, stages, inputs)
    except CalibrationError:
        raise
    except Exception as error:
        if "out of range in self" in str(error):  # tokens that do not fit have a message
            raise
        _block_outputs(model, blocks, inputs)  # raises if the model itself cannot take them
        return f"it does not run without its blocks, or a block fails on its own ({error})"
    expected = _block_outputs(model, blocks, inputs)
    if (run := [name for name, _ in expected]) != [*alone]:
        return f"it runs {run}, not each of {[*alone]} once, in this order"
    for block, right in expected:
        hidden = alone[block]
        if right.shape != hidden.shape:
            return (
                f"{block} returns {tuple(hidden.shape)} on its own but {tuple(right.shape)} in the "
                "model"
            )
        if not right.isfinite().all():
            return None  # calibration raises a better message
        gap = float((hidden - right).double().norm() / right.double().norm().clamp_min(1e-30))
        if not gap <= max(_ROUNDING, 4 * torch.finfo(right.dtype).eps):
            return (
                f"on its own, {block} returns features that differ by {gap:.1e} (relative) from "
                "those in the model's forward pass. It depends on more than the output of the "
                "block before it, or another module, such as an activation, runs between them"
            )
    return None


def _outputs_alone(
    family: Family, model: nn.Module, stages: Sequence[Sequence[str]], inputs: Any
) -> dict[str, Tensor]:
    """Return the outputs of blocks that a family runs one by one, without those of idle stages."""
    outputs, call = dict[str, Tensor](), None
    for stage in stages:
        begun = family.begin(model, inputs, stage[0], *([] if call is None else [call]))
        for block in stage if begun is not None else ():
            call = begun = family.step(model, block, begun)
            outputs[block] = call.hidden
    return outputs


def _block_outputs(model: nn.Module, blocks: list[str], inputs: Any) -> list[tuple[str, Tensor]]:
    """Return the blocks that a pass of the model runs, in order, and their outputs.

    The pass ends where a block runs again, or a matrix after the last block.

    Raises:
        CalibrationError: If the model cannot take the inputs.
    """
    outputs: list[tuple[str, Tensor]] = []

    def note(name: str, _: nn.Module, __: Any, output: Any) -> None:
        remedy = "Write a family for such blocks (docs/howto/own-family.md)"
        with error_context(type(model).__name__, name, cause=message_of(TypeError), remedy=remedy):
            outputs.append((name, hidden_output(output).clone()))
        if len(outputs) > len(blocks):  # a block runs again
            raise ForwardStopped

    def stop_behind(_: nn.Module, __: Any) -> None:
        if len(outputs) >= len(blocks):
            raise ForwardStopped

    hooks = [
        model.get_submodule(name).register_forward_hook(partial(note, name)) for name in blocks
    ]
    inside = tuple(f"{name}." for name in blocks)
    # A head of language models is by far larger than all that the comparison needs.
    hooks += [
        module.register_forward_pre_hook(stop_behind)
        for name, module in model.named_modules()
        if not f"{name}.".startswith(inside)
        and any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))
    ]
    with stoppable(*hooks):
        try:
            call_model(model, inputs)
        except CalibrationError:
            raise
        except Exception as error:
            if len(outputs) < len(blocks):  # else it fails after them, where nothing is calibrated
                raise CalibrationError(
                    f"{type(model).__name__}.forward fails on a batch ({type(error).__name__}: "
                    f"{error}). A mapping is passed as keyword arguments, a tuple as positional "
                    "arguments, both in batches: leave labels out"
                ) from error
    return outputs
