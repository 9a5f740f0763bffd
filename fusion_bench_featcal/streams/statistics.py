"""Running statistics of BatchNorms, estimated again on the calibration samples."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from fusion_bench_featcal.core.solve import solve_dtype
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.modules.hooks import record
from fusion_bench_featcal.streams.streams import Streams


class StaleNorms:
    """The BatchNorms of a block whose running statistics do not fit its weights."""

    def __init__(self, order: Sequence[str], norms: Collection[str]) -> None:
        """Start with all of them.

        Args:
            order: Names of the block's modules in the order of their calls.
            norms: Names of the BatchNorms among them.
        """
        self._position = {name: number for number, name in enumerate(order)}
        self._norms = [name for name in order if name in norms]
        self._stale = set(self._norms)

    def refresh(self, until: Iterable[str] = ()) -> list[str]:
        """Return the norms to estimate, in order, which then count as estimated.

        Args:
            until: Modules that are about to run: only norms called before the last of them are
                returned. By default all are.
        """
        end = max((self._position[name] for name in until), default=len(self._position))
        names = [n for n in self._norms if n in self._stale and self._position[n] < end]
        self._stale -= {*names}
        return names

    def add_behind(self, modules: Iterable[str]) -> None:
        """Count norms as stale that are called after the first of some modules."""
        start = min((self._position[name] for name in modules), default=len(self._position))
        self._stale |= {name for name in self._norms if self._position[name] > start}


def estimated(
    streams: Streams, block: str, name: str, add_up: Callable[[Iterable[Tensor]], None]
) -> Mapping[str, Tensor]:
    """Return a BatchNorm's running statistics for a mixture in which all tasks count equally.

    With `m_i` and `s_i` task i's mean and mean square, over N tasks, `mean = sum m_i / N` and
    `variance = sum s_i / N - mean^2`.

    Args:
        streams: The samples.
        block: The block.
        name: The BatchNorm's name.
        add_up: Adds up tensors of all processes in place.

    Raises:
        CalibrationError: If only some positions count, because statistics include all.
    """
    like = streams.model.get_buffer(f"{name}.running_mean")
    total = like.new_zeros(3, len(like), dtype=solve_dtype(like.device))
    for task in streams.tasks:
        sums = torch.zeros_like(total)
        for batch in streams.visits(task):
            if batch.rows.of(name) is not None:
                raise CalibrationError(
                    f"task {task}, block {block}: module {name} is BatchNorm, and some positions "
                    f"are padding. Exclude it: modules=['!{name}']"
                )
            step = partial(streams.step, streams.model, block, batch.cal)
            x = record(streams.model, [name], step, to_end=False).inputs[name]
            rows = x.movedim(1, -1).reshape(-1, x.shape[1]).to(total.dtype)
            sums += torch.stack(
                [rows.sum(0), rows.square().sum(0), torch.full_like(rows[0], len(rows))]
            )
        total += torch.cat([sums[:2] / sums[2], torch.ones_like(sums[:1])])
    add_up([total])
    mean, square = total[:2] / total[2]
    variance = (square - mean.square()).clamp_min(0)
    return {f"{name}.running_mean": mean.to(like), f"{name}.running_var": variance.to(like)}
