"""Rows from the experts' weights: their sums over tasks, and how far they count."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fusion_bench_featcal.core.finite import read_back
from fusion_bench_featcal.core.moments import Moments
from fusion_bench_featcal.core.products import (
    add_lower_gram,
    factor_of,
    gram_of,
    mirror_lower,
    multiply,
    multiply_by_rows,
)
from fusion_bench_featcal.core.solve import UnsolvedError, solve_ridge
from fusion_bench_featcal.rules.rule import Linear

ROW_RIDGE = 1e-2
"""Ridge of the step that the rows alone ask for, relative to the mean of A's diagonal."""

TOLERATED = 8.0
"""Product of both errors of that step at which the rows have at most the energy of the samples.

It was chosen on the bundled MiniLM and DINOv2 and on other experts of them
(docs/reference/formulas.md)."""


class TaskVectorRows:
    """Sums of task-vector rows over tasks, separate from the sums over samples.

    `A_i` and `w_i` are the second moment and the weight of `PlusSums`.

    Attributes:
        gram: `A = sum_i w_i A_i`, `[d, d]`. `weight_and_facts` completes its upper triangle.
        cross: `C_A = sum_i w_i (W_i - W) A_i`, `[m, d]`.
        energy: Weighted energy of the samples, a scalar.
        mismatch: Weighted sum of `|(W_i - W) x + b_i - b|^2` over samples, a scalar.
    """

    def __init__(self, base: Tensor, merged: Tensor) -> None:
        """Start with no task, for the weights `[m, d]` of the base and of the merged modules."""
        self._base, inputs = base, merged.shape[1]
        self.gram, self.cross = merged.new_zeros(inputs, inputs), torch.zeros_like(merged)
        self.energy, self.mismatch = merged.new_zeros(()), merged.new_zeros(())

    def tensors(self) -> list[Tensor]:
        """Return the sums. Sums of other processes may be added to them in place."""
        return [self.gram, self.cross, self.energy, self.mismatch]

    def add(
        self, expert: Tensor, step: Tensor, gamma: float, energy: Tensor, mismatch: Tensor
    ) -> None:
        """Add one task.

        Args:
            expert: `W_i`, `[m, d]`.
            step: `W_i - W`, `[m, d]`.
            gamma: Energy of the rows relative to that of the samples.
            energy: Energy of the task's samples times its weight.
            mismatch: Sum of `|(W_i - W) x + b_i - b|^2` over them times its weight.
        """
        tau = expert - self._base
        # Rows whose Gram matrix is `w_i A_i`. They are 0 for the base itself.
        tau.div_(tau.norm().clamp_min(torch.finfo(tau.dtype).tiny)).mul_((gamma * energy).sqrt())
        outputs, inputs = tau.shape
        if 2 * outputs < inputs:  # `(W_i - W) tau'` is smaller than the Gram matrix
            add_lower_gram(self.gram, factor_of(tau))
            self.cross.add_(multiply(multiply_by_rows(step, tau), tau))
        else:
            gram = gram_of(tau)
            self.gram.add_(gram)
            self.cross.add_(multiply(step, gram, symmetric=True))
        self.energy.add_(energy)
        self.mismatch.add_(mismatch)

    def weight_and_facts(
        self, samples: Moments, merged: Linear, probes: Tensor, lack: float
    ) -> Mapping[str, float]:
        """Return the weight `f` in [0, 1] of the rows, and the values that it is computed from.

        The step that is solved from the rows alone is tried on the samples. Its error, minus the
        error of no step, is `e` times the mismatch of the merged modules and `eo` times the energy
        of their outputs. With `gamma`, the mean energy of the rows relative to the samples,

            E  = C_A (A + 0.01 mean(diag A) I)^-1
            f  = 1 / (1 + gamma L e eo / 8)

        Rows keep a large weight if either factor is small: a step that is large relative to the
        mismatch may still change little of the output, and vice versa. `L` is 1 for many samples.
        Few samples show a part of what the step breaks, and would else give rows that contradict
        them as much weight as many samples do.

        Args:
            samples: Means over all samples, with the targets `u` as `y`.
            merged: The merged modules.
            probes: Combinations of outputs that represent them all, `[r, m]`.
            lack: `L`, the mean of `Plus.lacks`.
        """
        mirror_lower(self.gram)
        facts: dict[str, float] = dict.fromkeys(("gamma", "e", "eo", "f"), 0.0)
        scale, mismatch = self.gram.diagonal().mean(), self.mismatch / samples.count
        if not bool((scale > 0) & (mismatch > 0)):
            return facts
        try:
            step = self.step(probes @ self.cross)
        except UnsolvedError:  # rows of no use
            return facts
        step, gram, weight = step.to(samples.gram), samples.gram, probes @ merged.weight
        error = (((step @ gram) - 2 * (probes @ samples.cross)) * step).sum().clamp_min(0)
        output = ((weight @ gram) * weight).sum().clamp_min(torch.finfo(gram.dtype).tiny)
        gamma = self.gram.diagonal().sum() / self.energy
        gamma, e, eo = read_back([gamma, error / mismatch, error / output])
        return {"gamma": gamma, "e": e, "eo": eo, "f": 1 / (1 + gamma * e * eo / TOLERATED * lack)}

    def step(self, cross: Tensor) -> Tensor:
        """Return `cross (A + 0.01 mean(diag A) I)^-1`, the step that is solved from the rows alone.

        `weight_and_facts` must have completed `A`.

        Args:
            cross: `C_A`, or combinations of its rows.

        Raises:
            UnsolvedError: If the rows contradict each other beyond float64.
        """
        scale = self.gram.diagonal().mean()
        return solve_ridge(self.gram / scale, cross / scale, ROW_RIDGE)[0]
