"""Visits of a task's samples to a block: how long they took, and how far features drift."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusion_bench_featcal.core.cholesky import solve_dtype
from fusion_bench_featcal.core.drift import sum_agreement, sum_drift
from fusion_bench_featcal.core.finite import read_back
from fusion_bench_featcal.engine.modules import Site
from fusion_bench_featcal.engine.rows import CountedRows, rows_of
from fusion_bench_featcal.engine.samples import Batch

IMAGE_DIMS = 4


class Stopwatch:
    """Runs from its making to `stop`.

    Work is only queued on a GPU: marks in its queue tell when it was done.
    """

    def __init__(self, device: torch.device) -> None:
        """Start.

        Args:
            device: Device of the work.
        """
        self._device = device
        self._marks: list[Any] = []
        self._mark()
        self._start = time.perf_counter()
        self._taken = 0.0

    def stop(self) -> None:
        """Stop; on a GPU, when its queue has come so far."""
        self._taken = time.perf_counter() - self._start
        self._mark()

    def _mark(self) -> None:
        if self._device.type == "cuda":
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record(torch.cuda.current_stream(self._device))

    @property
    def seconds(self) -> float:
        """Seconds between start and stop. On a GPU the host waits for the stop."""
        if not self._marks:
            return self._taken
        start, stop = self._marks
        stop.synchronize()
        return start.elapsed_time(stop) / 1000


@dataclass
class Visit:
    """One process's work on its batches of a task at one block.

    Attributes:
        device: Device of the work.
        channels_first: Whether the block's features are images, `[batch, d, height, width]`.
        is_last: Whether it is at the last block, of whose output not all positions may be read.
        is_first: Whether it is at the first turn in which experts may run.
        watches: One for each turn, which runs while inputs are summed.
        samples: Number of samples.
        rows: Number of positions that count.
        expert_bytes: Bytes of the expert that were read, by place.
        drift: Sums of `sum_drift` and the number of rows, `[4]`, on the device, `before` and
            `after` the update; empty where the drift is not logged.
        held_out: Number of samples that are held out, which `samples` counts too.
        agreement: Sums of `sum_agreement` over these, `[4]`, of the `merged` model and `after` the
            update; empty where none are held out.
        weights: Norm of the expert's weight, by module.
    """

    device: torch.device
    channels_first: bool = False
    is_last: bool = False
    is_first: bool = False
    watches: list[Stopwatch] = field(default_factory=list)
    samples: int = 0
    rows: int = 0
    expert_bytes: dict[str, int] = field(default_factory=dict)
    drift: dict[str, Tensor] = field(default_factory=dict)
    held_out: int = 0
    agreement: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    _have_run: bool = False

    @contextmanager
    def watched(self, *, runs_experts: bool) -> Iterator[None]:
        """Context of a turn."""
        self.is_first = runs_experts and not self._have_run
        self._have_run |= runs_experts
        self.watches.append(Stopwatch(self.device))
        yield
        self.watches[-1].stop()

    def count(self, batch: Batch, hidden: Tensor) -> None:
        """Count a batch in the first turn, given features of its positions."""
        if not self.is_first:
            return
        self.samples += batch.samples - batch.copies
        self.rows += len(self._rows(hidden, None)) if batch.valid is None else batch.valid.count

    def _rows(self, hidden: Tensor, counted: CountedRows | None) -> Tensor:
        """Rows of features, `[n, d]`."""
        is_image = self.channels_first and hidden.ndim == IMAGE_DIMS
        return rows_of(hidden.movedim(1, -1) if is_image else hidden, counted)

    def add_drift(self, when: str, hidden: Tensor, batch: Batch) -> None:
        """Add the distance of the model's features from the expert's, where these are kept.

        It is measured at the positions that count, behind the last block at those that are read.
        """
        if batch.exp_hidden is not None:
            counted = batch.compared if self.is_last else batch.valid
            pair = [self._rows(features, counted) for features in (hidden, batch.exp_hidden)]
            sums = sum_drift(*pair)
            _add(self.drift, when, torch.cat([sums, sums.new_full((1,), len(pair[0]))]))

    def measure_weights(self, sites: Sequence[Site], expert: nn.Module) -> None:
        """Measure the norms of the expert's weights, where they are loaded."""
        for site in sites:
            weight = expert.get_parameter(site.weight_name).detach()
            if site.kind == "linear" and not weight.is_meta:
                dtype = solve_dtype(weight.device)
                self.weights[site.name] = torch.linalg.vector_norm(weight, dtype=dtype)

    def compare(self, whose: str, hidden: Tensor, batch: Batch) -> None:
        """Compare a model's features with the expert's in a batch that is held out."""
        pair = [self._rows(features, batch.compared) for features in (hidden, batch.exp_hidden)]
        _add(self.agreement, whose, sum_agreement(*pair))


def _add(sums: dict[str, Tensor], name: str, new: Tensor) -> None:
    new = new.to(solve_dtype(new.device))
    sums[name] = sums[name] + new if name in sums else new


class Account(NamedTuple):
    """Numbers of a visit, as in `Visit`."""

    samples: int
    rows: int
    seconds: float
    expert_bytes: int
    drift: dict[str, list[float]]
    held_out: int
    agreement: dict[str, list[float]]
    weights: dict[str, float]


def accounts_of(
    visits: Mapping[str, Visit], changes: Mapping[str, Tensor]
) -> tuple[dict[str, Account], dict[str, float]]:
    """Read the numbers of a block's visits, at all of which the host looks at once.

    Args:
        visits: The visits, by task.
        changes: Norms of the block's updates, by module.

    Returns:
        The account of each visit, and the norms.
    """
    parts = [p for visit in visits.values() for p in (visit.drift, visit.agreement, visit.weights)]
    parts.append(dict(changes))
    numbers = iter(read_back([sums for part in parts for sums in part.values()]))

    def read(part: dict[str, Tensor]) -> dict[str, list[float]]:
        return {name: [next(numbers) for _ in range(sums.numel())] for name, sums in part.items()}

    accounts = {
        task: Account(
            visit.samples,
            visit.rows,
            sum(watch.seconds for watch in visit.watches),
            sum(visit.expert_bytes.values()),
            read(visit.drift),
            visit.held_out,
            read(visit.agreement),
            {name: norm for name, (norm,) in read(visit.weights).items()},
        )
        for task, visit in visits.items()
    }
    return accounts, {module: next(numbers) for module in changes}


def task_record(block: str, task: str, accounts: Sequence[Account]) -> dict[str, Any]:
    """The log record of a task at a block.

    Args:
        block: The block.
        task: The task.
        accounts: The account of each of its processes; the first is the leader's, whose time and
            bytes stand for all.
    """
    rows = sum(account.rows for account in accounts)
    return {
        "block": block,
        "task": task,
        "samples": sum(account.samples for account in accounts),
        "rows": rows,
        **_drift_record("before", accounts),
        "seconds": accounts[0].seconds,
        "expert_bytes": accounts[0].expert_bytes,
        **_drift_record("after", accounts),
        **_held_out_record(accounts),
    }


def relative_updates(changes: Mapping[str, float], accounts: Sequence[Account]) -> dict[str, float]:
    """Norms of updates relative to the largest of the experts' weights.

    Args:
        changes: Norm of the update, by module.
        accounts: An account of each task.

    Returns:
        By module, but for those whose weights are 0 in all experts.
    """
    largest = {m: max((a.weights.get(m, 0.0) for a in accounts), default=0.0) for m in changes}
    return {module: changes[module] / largest[module] for module in changes if largest[module]}


def _drift_record(when: str, accounts: Sequence[Account]) -> dict[str, float | None]:
    """Mean L2 drift over rows, and root mean square drift relative to the expert's features."""
    sums = [account.drift[when] for account in accounts if when in account.drift]
    if not sums:
        return {f"drift_{when}": None, f"relative_drift_{when}": None}
    norms, squares, expert_squares, rows = map(sum, zip(*sums, strict=True))
    relative = (squares / expert_squares) ** 0.5 if expert_squares > 0 else None
    return {f"drift_{when}": norms / rows, f"relative_drift_{when}": relative}


def _held_out_record(accounts: Sequence[Account]) -> dict[str, Any]:
    """Number of samples, and the merged and the calibrated model's agreement with the expert.

    Empty where none are held out.
    """
    if not (samples := sum(account.held_out for account in accounts)):
        return {}
    record: dict[str, Any] = {"held_out": samples}
    for whose, end in (("merged", "_merged"), ("after", "")):
        sums = [account.agreement[whose] for account in accounts if whose in account.agreement]
        squares, expert_squares, cosines, rows = map(sum, zip(*sums, strict=True))
        record[f"held_out_drift{end}"] = (squares / (expert_squares or 1)) ** 0.5
        record[f"held_out_cosine{end}"] = cosines / rows
    return record
