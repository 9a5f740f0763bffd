"""Running sums of a LayerNorm over tasks, tested equal to `core.solve`, the definition."""

from torch import Tensor

from fusion_bench_featcal.core.cholesky import solve_dtype
from fusion_bench_featcal.core.moments import NormMoments
from fusion_bench_featcal.core.solve import Affine, solve_affine


class FoldedNorm:
    """Running sums for one LayerNorm's gain and shift (Eqs. 56-59).

    Attributes:
        tasks: Number of tasks that are in the sums.
    """

    def __init__(self) -> None:
        """Start with no task."""
        self._sums: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        self.tasks = 0

    def add(self, moments: NormMoments, expert_affine: Affine) -> None:
        """Fold one task in.

        Args:
            moments: Its sums over all its rows.
            expert_affine: Its expert's gain and shift, `[d]` each.
        """
        wide = solve_dtype(moments.sum_z.device)
        weight = moments.weight.to(wide)
        second, first = moments.sum_z_sq.to(wide) / weight, moments.sum_z.to(wide) / weight
        gain, shift = (part.to(wide) for part in expert_affine)
        new = (second, first, second * gain + first * shift, first * gain + shift)
        if self._sums is not None:
            new = tuple(old + added for old, added in zip(self._sums, new, strict=True))
        self._sums = new  # type: ignore[assignment]
        self.tasks += 1

    def tensors(self) -> list[Tensor]:
        """The sums, to which those of further tasks may be added in place; `tasks` counts them."""
        return list(self._sums or ())

    def solve(self, anchor: Affine | None, *, ridge_lambda: float, eps: float) -> Affine:
        """Calibrated gain and shift (Eqs. 57-59), as `solve_norm` returns them."""
        assert self._sums is not None  # a solve follows at least one task
        second, first, right_gain, right_shift = self._sums
        return solve_affine(
            second,
            first,
            self.tasks,
            right_gain,
            right_shift,
            anchor,
            ridge_lambda=ridge_lambda,
            eps=eps,
        )
