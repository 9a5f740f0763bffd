"""Essential Subspace Merging (arXiv 2602.20208): task matrices of low rank, merged."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from fusion_bench_featcal.core.moments import Moments
from fusion_bench_featcal.core.solve import solve_dtype
from fusion_bench_featcal.lab.rivals.matrices import nearest_orthogonal
from fusion_bench_featcal.lab.rivals.mergers import Merger
from fusion_bench_featcal.rules.rule import Linear, Solved
from fusion_bench_featcal.run.state import CalibrationState
from fusion_bench_featcal.settings.fields import setting

SPECTRUM_POWER = 0.15
"""Power of an output direction's energy in its weight, as in the authors' code."""


class ESM(
    Merger,
    option="featcal_mergers/esm",
    source="Li et al., CVPR 2026, arXiv 2602.20208, and its code",
):
    """ESM: task matrices cut to the main directions of their shift of the outputs, and merged.

    Weights that read the same input are one matrix. All parameters except the linear weights of
    the blocks are the experts' mean.
    """

    scale: float = setting(
        2.0,
        "Factor by which the merged steps of matrices are multiplied. The authors' code has 2, "
        "times a factor between 0 and 2 that they choose on validation data.",
        gt=0,
    )
    polarization: float = setting(
        2.0,
        "Power by which large task matrices, input channels and layers outweigh small ones. With "
        "0, all weigh the same.",
        ge=0,
    )
    samples_per_task: int = setting(
        32,
        "Number of unlabeled samples per task. A task with fewer samples uses all of them.",
        ge=1,
    )

    def dtype(self, tasks: int, device: torch.device) -> torch.dtype:
        """Return float64 if the device supports it, for exact directions of small shifts."""
        return solve_dtype(device)

    def turns(self, groups: Sequence[Any]) -> list[Sequence[Any]]:
        """Merge all linear modules in one turn. Convolutions are averaged."""
        return [[group for group in groups if group.kind == "linear" and not group.convolves]]

    def sums(self, group: Any, merged: Linear, base: Linear | None) -> Any:
        """Return steps of no task from the base. Biases stay as merged."""
        assert base is not None  # a merger has one
        names = [site.weight_name for site in group.sites]
        return EssentialSteps(base, merged.bias, names, self.scale, self.polarization)

    def complete(self, state: CalibrationState) -> None:
        """Scale the step of each matrix by a power of its relative size.

        The relative size is the norm of the step over the mean norm of this matrix in all layers.
        """
        assert state.base is not None  # a merger has one
        matrices = {tuple(record["weights"]): None for record in state.log.select("module")}
        layers_by_name: dict[str, list[tuple[str, ...]]] = {}
        for names in matrices:
            name = ".".join(word for word in names[0].split(".") if not word.isdigit())
            layers_by_name.setdefault(name, []).append(names)
        for layers in layers_by_name.values():
            merged = {name: state.working.tensor(name) for names in layers for name in names}
            steps = {name: x - state.base.tensor(name).to(x) for name, x in merged.items()}
            norms = [torch.stack([steps[n].double().norm() for n in names]) for names in layers]
            sizes = torch.stack([layer_norms.norm() for layer_norms in norms])
            factors = (relative(sizes) ** self.polarization).tolist()
            for names, factor in zip(layers, factors, strict=True):
                scaled = {n: merged[n].add(steps[n], alpha=factor - 1) for n in names}
                state.working.set_finished_block(scaled)


class EssentialSteps:
    """Steps of all tasks for one matrix, of which only the main output directions are kept."""

    def __init__(
        self, base: Linear, bias: Tensor, names: Sequence[str], scale: float, polarization: float
    ) -> None:
        """Start with no task. `bias` is the result's, `names` are those of the stacked weights."""
        self._base, self._bias = base.weight.to(solve_dtype(base.weight.device)), bias
        self._names = names
        self._scale, self._polarization = scale, polarization
        self._steps: list[tuple[Tensor, Tensor, Tensor]] = []
        self._norms: list[Tensor] = []

    def tensors(self) -> list[Tensor]:
        """Return no sums, as tasks are kept apart."""
        return []

    def add(self, task: str, expert: Linear, rows: Moments) -> None:
        """Add a task's step. With each further task all keep fewer directions, `m / t`."""
        step = expert.weight.to(self._base.dtype) - self._base
        gram = (rows.gram / rows.count).to(step.dtype)
        # Principal components of the output shift `X step'`, without centring, from its second
        # moment `step G step'`: no row of X is needed. The largest comes first.
        energies, directions = torch.linalg.eigh(step @ gram @ step.mT)
        least = len(step) * torch.finfo(step.dtype).eps * energies[-1]
        energies = torch.where(energies > least, energies, 0).flip(0)
        directions = directions.flip(1)
        self._steps.append((energies, directions, directions.mT @ step))
        self._norms.append(step.norm())
        rank = max(1, len(step) // len(self._steps))
        self._steps = [
            (e[:rank].clone(), u[:, :rank].clone(), v[:rank].clone()) for e, u, v in self._steps
        ]

    def solve(self) -> Solved:
        """Return the base plus the merged step. The log gets the names of the stacked weights."""
        step = merged_step(self._steps, torch.stack(self._norms), self._polarization)
        linear = Linear(self._base + self._scale * step, self._bias)
        return Solved(linear, facts={"weights": self._names})


def merged_step(
    steps: Sequence[tuple[Tensor, Tensor, Tensor]],
    norms: Float[Tensor, " t"],
    polarization: float,
) -> Float[Tensor, "m n"]:
    """Merge the tasks' steps `U_i V_i`.

    Directions without energy are left out, because an orthogonal factor would give them as much
    weight as any other.

    Args:
        steps: Each task's energies `[k]`, directions `U_i`, `[m, k]`, and `V_i = U_i' step_i`,
            `[k, n]`.
        norms: Frobenius norms of the whole steps.
        polarization: Power of a task's norm, and of an input channel's norm in all `V_i`, relative
            to their means.
    """
    task_weights = relative(norms) ** polarization
    us, vs = [], []
    for (energies, directions, coordinates), weight in zip(steps, task_weights, strict=True):
        spectrum, has_energy = relative(energies**SPECTRUM_POWER), energies > 0
        us.append((directions * spectrum)[:, has_energy])
        vs.append((coordinates * spectrum[:, None] * weight)[has_energy])
    u, v = torch.cat(us, 1), torch.cat(vs, 0)
    v = v * relative(v.norm(dim=0)) ** polarization
    most = sum(len(energies) for energies, _, _ in steps)
    u_mean = torch.linalg.svdvals(u).sum() / min(len(u), most)
    v_mean = torch.linalg.svdvals(v).sum() / min(v.shape[1], most)
    return nearest_orthogonal(u) @ nearest_orthogonal(v) * u_mean * v_mean


def relative(values: Tensor) -> Tensor:
    """Return non-negative values divided by their mean. Zeros stay zeros."""
    return values / values.mean().clamp_min(torch.finfo(values.dtype).tiny)
