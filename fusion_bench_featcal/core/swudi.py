"""SWUDI and ASWUDI (arXiv 2606.07289): one matrix that stands in for those of all experts."""

import math
from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor


def merge_task_vectors(
    task_vectors: Iterable[Float[Tensor, "m n"]],
    *,
    time: float = math.inf,
    rank: float | None = None,
) -> Float[Tensor, "m n"]:
    """Merge the task vectors of one matrix, without samples.

    Gradient flow from the sum of all task vectors descends

        sum_i |(T - t_i) t_i'|_F^2 / |t_i|_F^2

    With `G_i = t_i' t_i / |t_i|^2`, `S = sum_i G_i = Q l Q'` and `T_0 = sum_i t_i`, it ends at

        T = T_0 + (sum_i t_i G_i - T_0 S) Q f(l) Q'    f(l) = (1 - exp(-time l)) / l

    where `f` is 0 but for the `K` largest eigenvalues. ASWUDI has no setting: it takes the end of
    the flow, `f(l) = 1 / l`, and `K = ceil((sum sqrt(l))^2 / sum l)`.

    Args:
        task_vectors: `t_i`, the difference of each expert's matrix from the base's, in the dtype of
            the computation. They are read once, one at a time.
        time: Time at which the flow ends.
        rank: `K` as a share of `n`, or None for ASWUDI's.

    Returns:
        `T`, the merged task vector.
    """
    total, slope, gram = (torch.zeros(()) for _ in range(3))
    for vector in task_vectors:
        unit = vector / vector.norm().clamp_min(torch.finfo(vector.dtype).tiny)
        unit_gram = unit.mT @ unit
        total, slope, gram = total + vector, slope + vector @ unit_gram, gram + unit_gram
    values, directions = torch.linalg.eigh(gram)  # the smallest first
    least = len(values) * torch.finfo(values.dtype).eps * values[-1]
    roots = torch.where(values > least, values, 0).sqrt()
    effective = float(roots.sum() ** 2 / roots.square().sum()) if roots.any() else 0.0
    kept = math.ceil(effective if rank is None else rank * len(values))
    filtered = torch.where(roots > 0, -torch.expm1(-time * values) / values, 0)
    filtered[: len(values) - kept] = 0
    return total + (slope - total @ gram) @ (directions * filtered) @ directions.mT
