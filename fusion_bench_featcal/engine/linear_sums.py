"""One task's running sums for the linear modules that share an input."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fusion_bench_featcal.core.finite import not_finite
from fusion_bench_featcal.core.folded import TaskMeans
from fusion_bench_featcal.core.moments import MOMENT_DTYPE
from fusion_bench_featcal.core.triangle import mirror_lower
from fusion_bench_featcal.engine.products import (
    add_lower_gram,
    add_product,
    columns_of,
    times_transposed,
)
from fusion_bench_featcal.engine.spares import Spares

CHUNK_ROWS = 1024
"""Rows are gathered to so many before they are multiplied: short products are slow."""

DIRECT_ROWS = 512
"""A batch of so many rows is multiplied where it lies."""

MOST_ROWS = 4096
"""So many rows at a time: products may take copies of them."""


_Rows = tuple[tuple[Tensor, ...], Tensor | None]
"""Rows of the calibrated model and, where the expert is used, the difference of its own to them or
the modules' outputs; their weights."""


class LinearSums:
    """What `core.linear_moments` sums, in place and with half the work; tested equal to it.

    Only the lower triangle of the gram is formed. Of the cross moment, either the difference to
    the gram is (all modules of the group use it), or, where their outputs are few, the product
    `W_i C_i` of each module with its expert's weight is formed from the rows without it: from
    `W_i x_tgt`, or, where rows are many, from the expert's own outputs `W_i x_exp`, which its
    forward pass has made anyway, as `alpha W_i mean(x_exp x_cal') + (1 - alpha) W_i G`.
    """

    def __init__(
        self,
        like: Tensor,
        *,
        mix_alpha: float,
        expert_weights: Mapping[str, Tensor] | None,
        from_outputs: bool = False,
        spares: Spares | None = None,
        dtype: torch.dtype = MOMENT_DTYPE,
        mean_dtype: torch.dtype = MOMENT_DTYPE,
    ) -> None:
        """Start with no rows.

        Args:
            like: A module's input, `[..., d]`, for width, dtype and device.
            mix_alpha: alpha (Eq. 10); at 0 expert features need not be given.
            expert_weights: `W_i` of each module by name, `[m, d]`, where it is worth its while
                (`outputs_are_few`); None: the cross moment is formed.
            from_outputs: Whether the expert's outputs are given with the rows.
            spares: Memory for the matrices; None: it is made.
            dtype: Least precise dtype of the sums.
            mean_dtype: Least precise dtype of the means.
        """
        spares = spares or Spares()
        width = like.shape[-1]
        self._alpha = mix_alpha
        self._zeros = like.new_zeros((), dtype=torch.promote_types(like.dtype, dtype))
        self._mean_dtype = torch.promote_types(self._zeros.dtype, mean_dtype)
        self._rounding = gram_rounding(like.dtype, self._zeros.dtype)
        self._weights = {n: w.to(self._zeros.dtype) for n, w in (expert_weights or {}).items()}
        self._gram = spares.zeros(self._zeros, width, width)
        self._cross: Tensor | None = None
        if mix_alpha > 0 and not self._weights:
            self._cross = spares.zeros(self._zeros, width, width)
        self._reached = {n: spares.zeros(self._zeros, *w.shape) for n, w in self._weights.items()}
        self._sum_cal = self._zeros.new_zeros(width)
        self._sum_shift = self._zeros.new_zeros(width)
        self._from_outputs = from_outputs
        self._chunk = _Chunk(shifts=not self._weights)
        self.weight = self._zeros.clone()

    @property
    def takes_outputs_of(self) -> tuple[str, ...]:
        """Modules whose outputs are wanted with the rows, in this order."""
        return tuple(self._weights) if self._from_outputs else ()

    def add(
        self,
        x_cal: Tensor,
        x_exp: Tensor | None,
        row_weights: Tensor | None,
        outputs: Sequence[Tensor] = (),
    ) -> None:
        """Add rows, all of which count.

        Args:
            x_cal: Inputs in the calibrated model, `[n, d]`.
            x_exp: Inputs of the same rows in the expert; None where alpha is 0.
            row_weights: Weight of each row, `[n]`, finite and > 0: the host does not look at them.
                None: all weigh 1.
            outputs: `W_i x_exp` of each module, `[n, m]`, in the order of the weights; only where
                sums are formed from them.

        Raises:
            ValueError: If shapes differ.
        """
        if x_exp is not None and x_cal.shape != x_exp.shape:
            raise ValueError(
                f"inputs must be two [n, d] of one shape, got {tuple(x_cal.shape)} (calibrated) "
                f"and {tuple(x_exp.shape)} (expert)"
            )
        given = (x_cal,) if x_exp is None else (x_cal, x_exp, *outputs)
        parts = tuple(part.to(self._zeros.dtype) for part in given)
        weights = None if row_weights is None else row_weights.to(self._zeros.dtype)
        if self._weights:
            sums = [p.sum(0) if weights is None else weights @ p for p in parts[:2]]
            self._sum_shift += sums[1] - sums[0]
            parts = (parts[0], *(parts[2:] if self._from_outputs else self._targets(*parts)))
        for rows in self._chunk.filled(parts, weights):
            self._absorb(*rows)

    def _absorb(self, parts: tuple[Tensor, ...], weights: Tensor | None) -> None:
        """Multiply some rows."""
        self.weight += len(parts[0]) if weights is None else weights.sum()
        for total, part in zip(self._row_sums, parts, strict=False):
            total += part.sum(0) if weights is None else weights @ part
        if weights is not None:  # roots on both sides: a gram stays one, however it is rounded
            parts = tuple(part * weights.sqrt()[:, None] for part in parts)
        columns, *others = map(columns_of, parts)
        add_lower_gram(self._gram, columns)
        if self._weights:
            for name, output in zip(self._weights, others, strict=True):
                add_product(self._reached[name], output, columns)
        elif self._cross is not None:
            add_product(self._cross, columns, others[0])

    @property
    def _row_sums(self) -> tuple[Tensor, ...]:
        """The sums of rows that go with what is multiplied."""
        return (self._sum_cal,) if self._weights else (self._sum_cal, self._sum_shift)

    def _targets(self, x_cal: Tensor, x_exp: Tensor) -> list[Tensor]:
        """`W_i x_tgt` of each module."""
        target = torch.lerp(x_cal, x_exp, self._alpha)
        return [times_transposed(target, weight) for weight in self._weights.values()]

    def close(self) -> None:
        """Multiply the rows that still wait; `weight` counts all rows from then on."""
        for rows in self._chunk.rest():
            self._absorb(*rows)

    def squares(self) -> list[Tensor]:
        """The matrices: gram, and cross moment or the products that stand for it."""
        cross = [] if self._cross is None else [self._cross]
        return [self._gram, *cross, *self._reached.values()]

    def not_finite(self) -> Tensor:
        """1 where a sum is NaN or infinite, else 0, a scalar."""
        return torch.stack([not_finite(part) for part in self.squares()]).any()

    def tensors(self) -> list[Tensor]:
        """The sums over all rows, to which those of further rows may be added in place."""
        self.close()
        return [self.weight, self._sum_cal, self._sum_shift, *self.squares()]

    def means(self) -> TaskMeans:
        """Means over all rows. The sums are used up: this ends them.

        Of the gram only the lower triangle is there.
        """
        self.close()
        dtype = self._mean_dtype
        total = self.weight.to(dtype)
        gram = self._gram.to(dtype).div_(total)
        if self._from_outputs:
            mirror_lower(gram)
        reached = {name: sums.to(dtype).div_(total) for name, sums in self._reached.items()}
        if self._from_outputs:
            for name, mean in reached.items():
                own = times_transposed(self._weights[name].to(dtype), gram)
                mean.mul_(self._alpha).add_(own, alpha=1 - self._alpha)
        mean_cal = self._sum_cal.to(dtype) / total
        cross = self._cross
        return TaskMeans(
            gram=gram,
            shift=None if cross is None else cross.to(dtype).mul_(self._alpha / total),
            reached=reached,
            mean_cal=mean_cal,
            mean_target=mean_cal + self._alpha * (self._sum_shift.to(dtype) / total),
            rounding=self._rounding,
        )

    def restricted(self, names: Iterable[str]) -> "LinearSums":
        """A copy for some of the modules, whose later rows are not the others'."""
        self.close()  # rows in waiting are of all modules
        part = copy.deepcopy(self)
        part._chunk = _Chunk(shifts=not self._weights)
        part._weights = {n: w for n, w in self._weights.items() if n in set(names)}
        part._reached = {n: part._reached[n] for n in part._weights}
        return part


def gram_rounding(features: torch.dtype, sums: torch.dtype) -> float:
    """Rounding of a Gram matrix, relative to its diagonal.

    The rounding of float32 features fills a direction that they lack with their rounding's square,
    which float64 sums resolve. Half-precision features are taken as the numbers they are.

    Args:
        features: Dtype of the rows.
        sums: Dtype of their sums.
    """
    of_sums = torch.finfo(sums).eps
    return of_sums if features.itemsize < 4 else max(of_sums, torch.finfo(features).eps ** 2)


def outputs_are_few(expert_weights: Iterable[Tensor]) -> bool:
    """Whether `W_i C_i` of these modules costs less from rows than through the cross moment.

    With m outputs in all, n rows cost `4 n m d` there and `2 n d^2 + 2 m d^2` here.
    """
    weights = list(expert_weights)
    return 2 * sum(len(weight) for weight in weights) <= weights[0].shape[1]


def rows_are_many(rows: int, like: Tensor) -> bool:
    """Whether `W_i G`, once a task, costs less than `W_i x` of all the task's rows."""
    return rows > like.shape[-1]


class _Chunk:
    """Rows in waiting, copied; with `shifts`, of the second tensor its difference to the first."""

    def __init__(self, *, shifts: bool) -> None:
        self._shifts = shifts
        self._parts: tuple[Tensor, ...] = ()
        self._weights: Tensor | None = None
        self._count = 0
        self._weighted = False

    def filled(self, parts: tuple[Tensor, ...], weights: Tensor | None) -> Iterator[_Rows]:
        """Put rows in; yields every chunk that they fill."""
        start, total = 0, len(parts[0])
        while start < total:
            if self._count == 0 and total - start >= DIRECT_ROWS:
                stop = min(total, start + MOST_ROWS)
                rows = tuple(p[start:stop] for p in parts)
                if self._shifts and len(rows) > 1:
                    rows = rows[0], rows[1] - rows[0]
                yield rows, _cut(weights, start, stop)
            else:
                stop = min(total, start + CHUNK_ROWS - self._count)
                self._put(tuple(p[start:stop] for p in parts), _cut(weights, start, stop))
                if self._count == CHUNK_ROWS:
                    yield from self.rest()
            start = stop

    def _put(self, parts: tuple[Tensor, ...], weights: Tensor | None) -> None:
        if not self._parts:
            self._parts = tuple(p.new_empty(CHUNK_ROWS, p.shape[1]) for p in parts)
            self._weights = parts[0].new_empty(CHUNK_ROWS)
        assert self._weights is not None
        stop = self._count + len(parts[0])
        for index, (waiting, part) in enumerate(zip(self._parts, parts, strict=True)):
            if self._shifts and index == 1:
                torch.sub(part, parts[0], out=waiting[self._count : stop])
            else:
                waiting[self._count : stop] = part
        room = self._weights[self._count : stop]
        room.fill_(1) if weights is None else room.copy_(weights)
        self._weighted |= weights is not None
        self._count = stop

    def rest(self) -> Iterator[_Rows]:
        """Yield the rows in waiting, if any, and forget them."""
        if self._count:
            weights = _cut(self._weights, 0, self._count) if self._weighted else None
            yield tuple(p[: self._count] for p in self._parts), weights
        self._count, self._weighted = 0, False


def _cut(tensor: Tensor | None, start: int, stop: int) -> Tensor | None:
    return None if tensor is None else tensor[start:stop]
