"""Mergers without data, which merge one linear weight after the other."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fusion_bench_featcal.experts import ExpertSource, LazyModel
from fusion_bench_featcal.experts.copies import copied_module
from fusion_bench_featcal.fusionbench.method import Method
from fusion_bench_featcal.fusionbench.method_inputs import MethodInputs
from fusion_bench_featcal.lab.rivals.mergers import load_base, load_expert_means
from fusion_bench_featcal.settings.fields import setting

ReadSteps = Callable[[str], tuple[Tensor, Tensor]]
"""Returns by name a parameter of the base, and the experts' steps from it, as `steps_of` does."""


class MatrixMerger(Method):
    """A merger of task matrices. Subclasses implement `merged_step`.

    Embeddings, position tables, convolutions, biases and norms are the experts' mean.
    """

    scale: float = setting(
        1.0, "Factor by which the merged steps of matrices are multiplied.", gt=0
    )

    def check(self, inputs: MethodInputs) -> None:
        """Refuse a pool without a base. Raises a CalibrationError that names the setting."""
        inputs.require_base("task vectors need")

    def merge(self, inputs: MethodInputs) -> nn.Module:
        """Merge a pool's experts. Raises a CalibrationError if a model cannot be loaded."""
        device = inputs.fabric.device
        return self.merge_models(load_base(inputs), inputs.experts(), device=device)

    @torch.no_grad()
    def merge_models(
        self,
        base: nn.Module,
        experts: Mapping[str, nn.Module | ExpertSource],
        *,
        device: torch.device | str | None = None,
    ) -> nn.Module:
        """Merge experts, with one matrix of each in memory at a time.

        Args:
            base: The base model, with the structure and dtype of the result. It is not changed.
            experts: Each task's expert: a module, or a source of its weights.
            device: Device of the computation, by default the base's.

        Returns:
            The merged model, on the base's device.

        Raises:
            CalibrationError: If an expert's tensor is missing, of another shape or not finite.
        """
        model = copied_module(base)
        weights = load_expert_means(model, experts, 1.0)
        self.merge_into(model, partial(steps_of, base=base, experts=weights, device=device))
        return model

    def merge_into(self, model: nn.Module, read: ReadSteps) -> None:
        """Merge the matrices of a model that starts as the experts' mean, in place."""
        for name in matrix_names(model):
            start, steps = read(name)
            model.get_parameter(name).copy_(start + self.scale * self.merged_step(steps))

    def merged_step(self, steps: Float[Tensor, "t m n"]) -> Float[Tensor, "m n"]:
        """Merge the task matrices of one weight."""
        raise NotImplementedError


def steps_of(
    name: str, base: nn.Module, experts: Sequence[LazyModel], device: torch.device | str | None
) -> tuple[Tensor, Tensor]:
    """Return a parameter of the base, and the experts' steps from it, at least in float32."""
    start = base.get_parameter(name).detach().to(device)
    start = start.to(torch.promote_types(start.dtype, torch.float32))
    return start, torch.stack([expert.tensor(name).to(start) for expert in experts]) - start


def matrix_names(model: nn.Module) -> list[str]:
    """Return the names of linear weights: the matrices that are no table of an embedding."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    excluded = {id(parameter) for table in tables for parameter in table.parameters()}
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2 and name.endswith("weight") and id(parameter) not in excluded
    ]


def nearest_orthogonal(x: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
    """Return the nearest matrix with orthonormal columns, or rows if it is wide."""
    u, _, vt = torch.linalg.svd(x, full_matrices=False)
    return u @ vt
