"""A trial of a model's blocks on the meta device, before weights and data are read."""

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.families import Family
from fusion_bench_featcal.families.base import Masks, call_model
from fusion_bench_featcal.families.check import compare_with_model
from fusion_bench_featcal.modules.groups import refuse_idle
from fusion_bench_featcal.modules.hooks import Recorded, record
from fusion_bench_featcal.modules.sites import BlockModules
from fusion_bench_featcal.streams.batch import check_positions
from fusion_bench_featcal.streams.samples import naming_module

_META = torch.device("meta")


@torch.no_grad()
def try_blocks(
    family: Family,
    model: nn.Module,
    stages: Sequence[Sequence[str]],
    modules: Mapping[str, BlockModules],
    batches: Iterable[Mapping[str, Tensor]],
) -> None:
    """Run the blocks one by one on shapes alone, and record the inputs of their modules.

    A model or family that reads values is not tried, which many do under transformers 4. The
    calibration compares all models with their family again, on samples.

    Args:
        family: Runs the blocks.
        model: The model. It may have no weights.
        stages: Its blocks.
        modules: The modules of each block that are calibrated.
        batches: Inputs of any values. The first that the model takes is used.

    Raises:
        CalibrationError: If the blocks cannot be run one by one, or one runs a module twice,
            never, or on other positions than its own.
    """
    empty = copy.deepcopy(model).to(_META).eval()
    moved = ({n: tensor.to(_META) for n, tensor in batch.items()} for batch in batches)
    inputs = next((batch for batch in moved if _takes(empty, batch)), None)
    if inputs is None:
        return
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
        if not _reads_values(error):
            raise


def _check_rows(block: str, recorded: Recorded, masks: Masks) -> None:
    """Refuse modules with other positions than a mask that all modules share."""
    if {*masks} != {""} or (mask := masks[""]) is None:
        return
    for name, x in recorded.inputs.items():
        with naming_module(block, name):
            check_positions(x, mask.shape)


def _takes(model: nn.Module, inputs: Mapping[str, Tensor]) -> bool:
    """Return whether a model runs without values."""
    try:
        call_model(model, inputs)
    except Exception:  # any operation of any model may read them
        return False
    return True


def _reads_values(error: Exception) -> bool:
    """Return whether an error is that of an operation on tensors without values."""
    return re.search(r"\bmeta\b", str(error), re.IGNORECASE) is not None
