"""A trial of a model's blocks without its weights, before weights and data are read."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.experts.copies import copied_module
from fusion_bench_featcal.experts.expert import lacks_values
from fusion_bench_featcal.families import Family
from fusion_bench_featcal.families.base import Masks, call_model
from fusion_bench_featcal.families.check import compare_with_model
from fusion_bench_featcal.modules.groups import refuse_idle
from fusion_bench_featcal.modules.hooks import Recorded, record
from fusion_bench_featcal.modules.sites import BlockModules
from fusion_bench_featcal.streams.batch import check_positions
from fusion_bench_featcal.streams.samples import naming_module

_META = torch.device("meta")
_SMALL = 2 * 2**30
"""Bytes of the largest model that is tried with weights of 0 if it cannot run on shapes alone."""


@torch.no_grad()
def try_blocks(
    family: Family,
    model: nn.Module,
    stages: Sequence[Sequence[str]],
    modules: Mapping[str, BlockModules],
    batches: Iterable[Mapping[str, Tensor]],
) -> None:
    """Run the blocks one by one on shapes alone, and record the inputs of their modules.

    A model or family that reads values runs with weights of 0, and is not tried if it is large.
    The calibration compares all models with their family again, on samples.

    Args:
        family: Runs the blocks.
        model: The model. It may have no weights.
        stages: Its blocks.
        modules: The modules of each block that are calibrated.
        batches: Inputs of any values. The first that the model takes is used.

    Raises:
        CalibrationError: If the model takes other inputs, the blocks cannot be run one by one, or
            one runs a module twice, never, or on other positions than its own.
    """
    batches = [*batches]
    on_shapes = [{n: tensor.to(_META) for n, tensor in batch.items()} for batch in batches]
    if _has_run(family, copied_module(model).to(_META).eval(), stages, modules, on_shapes):
        return
    if sum(parameter.nbytes for parameter in model.parameters()) <= _SMALL:
        _has_run(family, _with_zeros(model).eval(), stages, modules, batches)


def _has_run(
    family: Family,
    empty: nn.Module,
    stages: Sequence[Sequence[str]],
    modules: Mapping[str, BlockModules],
    batches: Iterable[Mapping[str, Tensor]],
) -> bool:
    """Return whether a model without weights can be tried. Raises as `try_blocks`."""
    inputs = next((batch for batch in batches if _takes(empty, batch)), None)
    if inputs is None:
        return False
    try:
        compare_with_model(family, empty, inputs)
        call: Any = None
        for number, stage in enumerate(stages):
            call = family.begin(empty, inputs, stage[0], call)
            masks = family.masks(empty, inputs, number, "all")
            for block in stage:
                names = [site.name for site in modules[block].sites]
                recorded = record(empty, names, partial(family.step, empty, block, call))
                refuse_idle(block, names, recorded)
                _check_rows(block, recorded, masks)
                call = recorded.result
    except (CalibrationError, RuntimeError) as error:
        if not lacks_values(error):
            raise
        return False
    return True


def _with_zeros(model: nn.Module) -> nn.Module:
    """Return a model on the CPU whose tensors on the meta device are 0."""

    def filled(tensor: Tensor) -> Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor.cpu()

    return copied_module(model, [*model.parameters(), *model.buffers()], filled)


def _check_rows(block: str, recorded: Recorded, masks: Masks) -> None:
    """Refuse modules with other positions than a mask that all modules share."""
    if {*masks} != {""} or (mask := masks[""]) is None:
        return
    for name, x in recorded.inputs.items():
        with naming_module(block, name):
            check_positions(x, mask.shape)


def _takes(model: nn.Module, inputs: Mapping[str, Tensor]) -> bool:
    """Return whether a model runs on inputs without content.

    Raises:
        CalibrationError: If it needs others.
    """
    try:
        call_model(model, inputs)
    except Exception as error:  # any operation of any model may read values
        if isinstance(error, TypeError) and "required positional argument" in str(error):
            raise CalibrationError(
                f"{type(model).__name__} takes other inputs than {', '.join(inputs)}: {error}"
            ) from error
        return False
    return True
