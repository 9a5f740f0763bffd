"""Distance of the model's features from the experts', block by block (Eq. 2)."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from fusion_bench_featcal.core.cholesky import solve_dtype
from fusion_bench_featcal.core.drift import sum_agreement, sum_drift
from fusion_bench_featcal.core.finite import read_back
from fusion_bench_featcal.engine.rows import CountedRows, rows_of
from fusion_bench_featcal.next.streams.batch import Batch

BEFORE, AFTER, MERGED = "before", "after", "merged"


class Watch:
    """Base of what looks on at features. This one looks at nothing.

    Attributes:
        needs_features: Whether blocks run to their ends for it.
    """

    needs_features = False

    def add(
        self,
        when: str,
        task: str,
        batch: Batch,
        hidden: Tensor,
        expert: Tensor,
        *,
        is_last: bool = False,
    ) -> None:
        """Look at a block's output.

        Args:
            when: `before` or `after` the block's update; `merged`: as the merged model has it.
            task: The task.
            batch: The batch.
            hidden: The model's features.
            expert: The expert's.
            is_last: Whether the model reads on from them.
        """

    def records(self) -> dict[str, dict[str, Any]]:
        """Return each task's figures at the block in hand, and start anew."""
        return {}


class DriftLog(Watch):
    """Sums of drifts at the block in hand, by task.

    Attributes:
        sums: `(task, when)` -> sums of `core.drift.sum_drift` and the number of rows, `[4]`, or for
            held-out samples `(task, "held out " + when)` -> sums of `sum_agreement`, `[4]`.
    """

    needs_features = True

    def __init__(self, *, channels_first: bool = False) -> None:
        """Start with nothing.

        Args:
            channels_first: Whether features of four dimensions are images `[batch, d, h, w]`.
        """
        self.sums: dict[tuple[str, str], Tensor] = {}
        self._channels_first = channels_first

    def add(
        self,
        when: str,
        task: str,
        batch: Batch,
        hidden: Tensor,
        expert: Tensor,
        *,
        is_last: bool = False,
    ) -> None:
        """Add a batch's features."""
        if batch.is_held_out:
            pair = [self._rows(features, batch.rows.compared) for features in (hidden, expert)]
            self._add(task, f"held out {when}", sum_agreement(*pair))
        elif when != MERGED:
            counted = batch.rows.compared if is_last else batch.rows.counted
            pair = [self._rows(features, counted) for features in (hidden, expert)]
            count = torch.full((1,), len(pair[0]), device=hidden.device)
            self._add(task, when, torch.cat([sum_drift(*pair), count]))

    def _rows(self, hidden: Tensor, counted: CountedRows | None) -> Tensor:
        is_image = self._channels_first and hidden.ndim == 4
        return rows_of(hidden.movedim(1, -1) if is_image else hidden, counted)

    def _add(self, task: str, when: str, new: Tensor) -> None:
        new = new.to(solve_dtype(new.device))
        self.sums[task, when] = self.sums[task, when] + new if (task, when) in self.sums else new

    def records(self) -> dict[str, dict[str, Any]]:
        """Return each task's figures at the block, and start anew.

        Returns:
            Task -> mean L2 drift over rows and root mean square drift relative to the expert's
            features, `before` and `after`; of held-out samples relative drift and mean cosine.
        """
        numbers = iter(read_back(list(self.sums.values())))
        read = {key: [next(numbers) for _ in range(len(s))] for key, s in self.sums.items()}
        self.sums = {}
        records: dict[str, dict[str, Any]] = defaultdict(dict)
        for (task, when), values in read.items():
            if when.startswith("held out"):
                squares, expert, cosines, rows = values
                end = "_merged" if when.endswith(MERGED) else ""
                records[task][f"held_out_drift{end}"] = (squares / (expert or 1)) ** 0.5
                records[task][f"held_out_cosine{end}"] = cosines / rows
                continue
            norms, squares, expert, rows = values
            records[task][f"drift_{when}"] = norms / rows
            relative = (squares / expert) ** 0.5 if expert > 0 else None
            records[task][f"relative_drift_{when}"] = relative
        return records
