"""The merged model as a source, computed tensor by tensor from base and experts."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from fusion_bench_featcal.core.finite import all_finite
from fusion_bench_featcal.experts.expert_model import ExpertModel
from fusion_bench_featcal.settings import CalibrationError


class MergedOnRead:
    """A source whose tensors are computed from those of the models when they are read.

    For mergers that work tensor by tensor, such as task arithmetic, base + sum_i lambda_i tau_i. No
    more than one tensor of each model is in memory.
    """

    def __init__(
        self,
        first: ExpertModel,
        experts: Mapping[str, ExpertModel],
        merge: Callable[[Tensor, Sequence[Tensor]], Tensor],
    ) -> None:
        """Refer to the models.

        Args:
            first: The model from which the merged one takes dtypes and counts: the base, or the
                first expert where there is none.
            experts: The experts by task, in the order in which they are added up.
            merge: Takes the first model's tensor and the experts', returns the merged one.
        """
        self._first, self._experts, self._merge = first, experts, merge

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._first.keys)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor."""
        return tuple(self._first.module.state_dict()[name].shape)

    def nbytes(self, name: str) -> int:
        """Return the bytes of one tensor in all models."""
        return sum(model.nbytes(name) for model in {self._first, *self._experts.values()})

    def tensor(self, name: str) -> Tensor:
        """Merge one tensor.

        Raises:
            CalibrationError: If a model's tensor is not finite, naming the model, or the merged one
                overflows.
        """
        first = self._first.tensor(name)
        experts = [model.stored(name).to(first.dtype) for model in self._experts.values()]
        try:
            merged = self._merge(first, experts)
        except (TypeError, ValueError, RuntimeError):
            if first.is_floating_point():
                raise
            return first  # a count, such as of the batches that BatchNorm has seen
        if merged.is_floating_point() and not all_finite(merged):
            raise CalibrationError(
                f"the merged tensor {name!r} is NaN or infinite, while base and experts are "
                "finite: it overflows. Check method.base_method"
            )
        return merged


@torch.no_grad()
def fill(model: nn.Module, source: MergedOnRead) -> nn.Module:
    """Read a model's weights from a source, tensor by tensor, in place."""
    tensors = model.state_dict(keep_vars=True)
    for tensor, name in {id(tensor): (tensor, name) for name, tensor in tensors.items()}.values():
        tensor.copy_(source.tensor(name))
    return model
