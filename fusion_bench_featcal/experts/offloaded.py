"""Models that run without being in memory: each module loads its tensors when it is called."""

import torch
from torch import nn

from fusion_bench_featcal.experts.expert import ExpertModel
from fusion_bench_featcal.experts.source import ExpertSource, Tensors


def offloaded(model: ExpertModel, device: torch.device) -> nn.Module:
    """Return a model that reads its weights while it runs, using accelerate's hooks.

    Args:
        model: The model's weights and structure.
        device: Device on which it runs.
    """
    from accelerate.hooks import attach_align_device_hook

    tensors = Tensors(model.tensor, {name: name for name in model.keys})
    attach_align_device_hook(
        model.module, device, offload=True, weights_map=tensors, offload_buffers=True
    )
    # transformers moves inputs to the model's device, which empty tensors do not show.
    kind = type(model.module)
    model.module.__class__ = type(kind.__name__, (kind,), {"device": device})
    return model.module


@torch.no_grad()
def fill(model: nn.Module, source: ExpertSource) -> None:
    """Copy a source's values into a model in memory, in its dtypes.

    Raises:
        CalibrationError: If the source lacks a tensor or has one of another shape.
    """
    weights, filled = ExpertModel("filled", source, model, role="model"), set[int]()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in filled:  # a tied matrix is read once
            filled.add(id(tensor))
            tensor.copy_(weights.tensor(name))
