"""Models with only some of their weights in memory: during calibration, and when they run."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from fusion_bench_featcal.core.finite import finiteness, is_sound, read_back
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.experts.expert import LazyModel, meta_copy, set_module_tensor
from fusion_bench_featcal.experts.source import ExpertSource, InMemoryExpert, LazyTensorDict


class WorkingModel(LazyModel):
    """The model during calibration: a structure with one block's tensors loaded at a time.

    Finished blocks have calibrated tensors, all others have merged ones. A loaded tensor may be the
    merged model's tensor itself, so it is replaced and never written to.

    Attributes:
        merged: The merged model's tensors.
        device: Device of loaded tensors.
        merged_device: Device of the merged model.
        is_in_memory: Whether the merged model is in memory.
    """

    def __init__(
        self,
        structure: nn.Module,
        source: ExpertSource | None = None,
        *,
        device: torch.device,
    ) -> None:
        """Start without finished blocks.

        Args:
            structure: The merged model. With `source` it may be on the meta device.
            source: The merged model's weights, by default the tensors of `structure`.
            device: Device of loaded tensors.

        Raises:
            CalibrationError: If the source lacks a tensor or has another shape.
        """
        self.is_in_memory, self.device = source is None, device
        self.merged_device = next(structure.parameters()).device
        source = InMemoryExpert(structure) if source is None else source
        super().__init__("the merged model", source, structure, device=device)
        self.advice = "Check how it was merged"
        self._finished: dict[str, tuple[Mapping[str, Tensor], str]] = {}
        self.merged = LazyTensorDict(self.source.tensor, self.keys)

    def stored(self, name: str) -> Tensor:
        """Return one tensor in its stored dtype. Raises as `LazyModel.stored`."""
        key = self.keys[name]
        if key in self._finished:
            tensors, finished_name = self._finished[key]
            return tensors[finished_name]
        # A model in memory was checked as a whole.
        return self.source.tensor(key) if self.is_in_memory else super().stored(name)

    def refuse_not_finite(self, models: Iterable[LazyModel]) -> None:
        """Refuse NaN or infinity in a parameter of a model in memory, or NaN in a buffer.

        Args:
            models: The base and the experts, one of which may already have such a value.

        Raises:
            CalibrationError: Naming the tensor and the model it came from.
        """
        stored = self.structure.state_dict().items()
        tensors = {name: tensor for name, tensor in stored if tensor.is_floating_point()}
        signs = read_back(finiteness([*tensors.values()]))
        for (name, tensor), sign in zip(tensors.items(), signs, strict=True):
            is_parameter = name in self._parameters
            if not math.isfinite(sign) and not is_sound(tensor, is_parameter=is_parameter):
                for model in (model for model in models if name in model.keys):
                    model.stored(name)
                raise CalibrationError(
                    f"the merged model: tensor {name!r} has NaN or infinite values. {self.advice}"
                )

    def set_finished_block(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the merged model's tensors by the tensors of a finished block."""
        self._finished |= {self.keys[name]: (tensors, name) for name in tensors}

    def materialize(self, device: torch.device) -> nn.Module:
        """Return the calibrated model in memory. It shares no tensor with another model.

        Args:
            device: Device of the tensors.
        """
        model, copies = meta_copy(self.module, device), dict[str, Tensor]()
        parameters = dict[str, nn.Parameter]()  # keeps tied parameters tied
        for name, key in self.keys.items():
            if key not in copies:
                # Tensors of finished blocks in memory belong to this model: no copy is needed.
                shared = isinstance(self._finished.get(key, (self.merged,))[0], LazyTensorDict)
                copies[key] = self.stored(name).to(device, self.dtype(name), copy=shared)
            tensor = copies[key]
            if name in self._parameters:
                tensor = parameters.setdefault(key, nn.Parameter(tensor, requires_grad=False))
            set_module_tensor(model, name, tensor)
        return model

    @property
    def tensors(self) -> LazyTensorDict:
        """Return all tensors by their names in the merged model's files, tied tensors once."""
        return LazyTensorDict(self.stored, {key: name for name, key in reversed(self.keys.items())})


_SMALL_TABLE = 2**24  # bytes


def offloaded(model: LazyModel, device: torch.device) -> nn.Module:
    """Return a model that reads its weights while it runs, using accelerate's hooks.

    Args:
        model: The model's weights and structure.
        device: Device on which it runs.
    """
    from accelerate.hooks import attach_align_device_hook, remove_hook_from_module

    tensors = LazyTensorDict(model.tensor, {name: name for name in model.keys})
    module = meta_copy(model.structure, device)
    attach_align_device_hook(
        module,
        device,
        offload=True,
        weights_map=tensors,
        offload_buffers=True,
        preload_module_classes=["MultiheadAttention"],  # torch's, which never calls its out_proj
    )
    for name, part in module.named_modules():
        # DeBERTa reads its table of relative positions without calling it.
        table = f"{name}.weight"
        is_small = isinstance(part, nn.Embedding) and part.weight.nbytes <= _SMALL_TABLE
        if is_small and table in model.keys:
            remove_hook_from_module(part)
            set_module_tensor(module, table, model.tensor(table))
    # transformers moves inputs to the model's device, which empty tensors do not show.
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"device": device})
    return module
