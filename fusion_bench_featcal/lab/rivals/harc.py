"""HARC (arXiv 2606.03391): routers of a merged mixture, fitted to the experts' routing."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from fusion_bench_featcal.core.float32_products import exact_products
from fusion_bench_featcal.core.linear import at_least_float32
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.place import error_context
from fusion_bench_featcal.experts import ExpertSource, LazyModel, source_of
from fusion_bench_featcal.families import Family, resolve_family, stages_of
from fusion_bench_featcal.fusionbench.method import MethodResult, SampleSettings
from fusion_bench_featcal.fusionbench.method_inputs import MethodInputs
from fusion_bench_featcal.modules.groups import record
from fusion_bench_featcal.modules.mixtures import is_router, router_site
from fusion_bench_featcal.modules.models import device_of, load_updates
from fusion_bench_featcal.run.devices import isolated_torch_state
from fusion_bench_featcal.run.progress import progress_bar
from fusion_bench_featcal.settings import Blocks, Texts
from fusion_bench_featcal.settings.fields import setting
from fusion_bench_featcal.streams.batch import Batch, CountedPositions, rows_of
from fusion_bench_featcal.streams.inputs import to_device
from fusion_bench_featcal.streams.samples import take_samples

log = logging.getLogger(__name__)

Routers = Mapping[str, Sequence[str]]
"""Name of a router -> names of its parameters: the weight `[slots, d]` and any bias `[slots]`."""


@dataclass(frozen=True)
class Routing:
    """An expert's routing of one task's samples.

    Attributes:
        inputs: Inputs of the merged model's router, `[n, d]`.
        probabilities: The expert's probabilities of the slots on them, `[n, slots]`.
    """

    inputs: Tensor
    probabilities: Tensor

    def product(self, step: Tensor) -> Tensor:
        """Return `E[H V x x']` for a step V of the router, both `[slots, d]`.

        H is the Hessian of the softmax, `diag(p) - p p'`, which is never formed.
        """
        x, p = self.inputs, self.probabilities
        logits = x @ step.T
        return (p * (logits - (p * logits).sum(1, keepdim=True))).T @ x / len(x)


class HARC(
    SampleSettings,
    Texts,
    Blocks,
    option="featcal_baselines/harc",
    source="Huang et al., ICML 2026, arXiv 2606.03391",
    without=("modules",),
):
    """HARC: routers of a mixture, fitted to the experts' routing by conjugate gradients.

    Only routers change. Their inputs are the merged model's, from one pass over all positions of
    the samples except padding. The fit has the least divergence from the experts' routing, as a
    softmax over all slots, to second order and averaged over tasks.
    """

    tolerance: float = setting(
        1e-6,
        "Residual, relative to the first one, at which conjugate gradients stop. The authors' "
        "value.",
        gt=0,
    )
    steps: int = setting(
        1000,
        "Maximum number of conjugate-gradient steps per router. The authors' value.",
        ge=1,
    )

    def open(self, inputs: MethodInputs) -> None:
        """Refuse models without routers, as far as their files show it, and open the data.

        Raises:
            CalibrationError: If the models have no routers, or a task lacks data.
        """
        first = inputs.models.first
        empty = next((files.empty for files in first.folders), None)
        if (model := first.module or empty) is not None:
            self.routers(model)
        super().open(inputs)

    @torch.no_grad()
    def routers(self, model: nn.Module) -> Routers:
        """Return the routers: linear maps beside routed experts, with a logit for each of them.

        Raises:
            CalibrationError: If the model has none.
        """
        routers = dict[str, Sequence[str]]()
        for name, module in model.named_modules():
            owner, _, leaf = name.rpartition(".")
            if is_router(model.get_submodule(owner), leaf) and (site := router_site(name, module)):
                routers[name] = site.names
        if not routers:
            raise CalibrationError(
                f"{self.name} fits routers of mixtures, but {type(model).__name__} has none (a "
                "linear map named `gate` or `router` beside `experts`): leave it out"
            )
        return routers

    @isolated_torch_state()
    @torch.no_grad()
    def post_merge(self, merged: nn.Module, inputs: MethodInputs) -> MethodResult:
        """Fit the merged model's routers, with one block's features in memory.

        Raises:
            CalibrationError: If the model has no routers, or samples, an expert's routers or the
                fitted ones are unusable.
        """
        model = merged.to(inputs.fabric.device).eval()
        routers, data = self.routers(model), self.take_batches(inputs)
        experts, batches = dict[str, dict[str, Tensor]](), dict[str, list[Batch]]()
        for task, expert in inputs.models.experts.items():
            experts[task] = load_router_matrices(task, expert.source(), model, routers)
            batches[task] = [*take_samples(task, data[task], self.samples_per_task, model)]
        family = resolve_family(self.family, model)
        for index, stage in enumerate(stages_of(family, model)):
            for task, task_batches in batches.items():
                with error_context(task=task):
                    enter_stage(model, family, index, stage[0], task_batches)
            for block in progress_bar(stage, what="fitting routers: ", unit="block"):
                names = [name for name in routers if name.startswith(f"{block}.")]
                # All samples pass the block before its routers change: see the class's docstring.
                inputs_by_task = {
                    task: run_block(model, family, block, names, batches[task]) for task in batches
                }
                for name in names:
                    features = {task: x[name] for task, x in inputs_by_task.items()}
                    matrices = {task: experts[task][name] for task in experts}
                    updates = self.fit_router(model, routers[name], features, matrices)
                    load_updates(model, block, updates, "Look for infinite values in the weights")
        counts = {t: sum(batch.samples for batch in batches[t]) for t in batches}
        return MethodResult(model, counts)

    def fit_router(
        self,
        model: nn.Module,
        names: Sequence[str],
        features: Mapping[str, Tensor],
        experts: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Solve `sum_i E_i[H_i W x x'] = sum_i E_i[H_i W_i x x']`, starting at the merged router.

        Args:
            model: The merged model.
            names: Names of the router's parameters.
            features: Inputs of the router by task, `[n, d]`.
            experts: Matrices of the experts' routers by task, as `router_matrix` returns them.

        Returns:
            The router's parameters by name.
        """
        merged = at_least_float32(router_matrix(model.get_parameter, names))
        routings, right = list[Routing](), torch.zeros_like(merged)
        with exact_products():
            for task, x in features.items():
                ones = [x.new_ones(len(x)) for _ in names[1:]]
                x, matrix = torch.column_stack((x, *ones)), experts[task].to(merged)
                routings.append(Routing(x, (x @ matrix.T).softmax(1)))
                right += routings[-1].product(matrix - merged)

            def product(step: Tensor) -> Tensor:
                return torch.stack([routing.product(step) for routing in routings]).sum(0)

            step, count, residual = conjugate_gradients(product, right, self.tolerance, self.steps)
        log.info("%s: %d steps, relative residual %.1e", names[0], count, residual)
        weight, *bias = (merged + step).split(model.get_parameter(names[0]).shape[1], 1)
        return dict(zip(names, [weight, *(column[:, 0] for column in bias)], strict=True))


def conjugate_gradients(
    product: Callable[[Tensor], Tensor], right: Tensor, tolerance: float, max_steps: int
) -> tuple[Tensor, int, float]:
    """Solve a symmetric positive semi-definite system whose right-hand side is in its range.

    Args:
        product: The product of the matrix and a vector, of any shape.
        right: The right-hand side.
        tolerance: Norm of the residual at which the iteration ends, relative to the norm of the
            right-hand side.
        max_steps: Largest number of steps.

    Returns:
        The shortest solution, the number of steps, and the relative residual.
    """
    solution, residual = 0 * right, right  # NaN stays NaN
    start = size = float(right.square().sum())
    direction, steps = residual, 0
    while size > start * tolerance**2 and steps < max_steps:
        image = product(direction)
        length = size / (direction * image).sum()
        solution, residual = solution + length * direction, residual - length * image
        before, size = size, float(residual.square().sum())
        direction, steps = residual + size / before * direction, steps + 1
    return solution, steps, (size / start) ** 0.5 if start else 0.0


def router_matrix(get: Callable[[str], Tensor], names: Sequence[str]) -> Tensor:
    """Return a router's weight and any bias as one matrix, `[slots, d]` or `[slots, d + 1]`."""
    return torch.column_stack([get(name) for name in names])


def load_router_matrices(
    task: str, expert: nn.Module | ExpertSource, model: nn.Module, routers: Routers
) -> dict[str, Tensor]:
    """Read the matrices of a task's expert by router. No other tensor is read."""
    unread = {*model.state_dict()}.difference(*routers.values())
    weights = LazyModel(f"expert {task!r}", source_of(expert), model, optional=unread)
    return {name: router_matrix(weights.stored, names) for name, names in routers.items()}


def enter_stage(
    model: nn.Module, family: Family, index: int, block: str, batches: Sequence[Batch]
) -> None:
    """Run a task's batches up to the first block of the stage with an index."""
    for batch in batches:
        inputs = to_device(batch.inputs, device_of(model))
        batch.positions = CountedPositions.from_masks(family.masks(model, inputs, index, "all"))
        ended = (batch.calibrated_call,) if index else ()
        batch.calibrated_call = family.begin(model, inputs, block, *ended)


def run_block(
    model: nn.Module, family: Family, block: str, names: Sequence[str], batches: Sequence[Batch]
) -> dict[str, Tensor]:
    """Run a task's batches through a block, and return the inputs of its routers, `[n, d]`."""
    features: dict[str, list[Tensor]] = {name: [] for name in names}
    for batch in batches:
        recorded = record(model, names, partial(family.step, model, block, batch.calibrated_call))
        batch.calibrated_call = recorded.result
        for name, x in recorded.inputs.items():
            features[name].append(at_least_float32(rows_of(x, batch.positions.of(name))))
    return {name: torch.cat(batch_features) for name, batch_features in features.items()}
