"""The host looks at nothing that a device computes while a task visits a block.

On a GPU each look would let the host wait for all work that is queued, and the GPU then for the
host. Looks show on a CPU too: as the few operations that take a value out of a tensor.
"""

from collections import Counter
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from calibrations import PAPER, run_fast
from tiny_decoders import decoder_suite
from tiny_models import Suite, clip_suite
from tiny_t5 import t5_suite
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.core.drift import drift_norm_sum
from fusion_bench_featcal.engine import block, loop, team, visits
from fusion_bench_featcal.engine.rows import CountedRows, rows_of
from fusion_bench_featcal.experts import ExpertModel

LOOKS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "lift_fresh",
    "lift_fresh_copy",
)
WHERE = {
    "collect": (loop.BlockLoop, "_collect"),
    "advance": (loop.BlockLoop, "_advance"),
    "solve": (team.Alone, "solve"),
    "load": (loop, "load_updates"),
    "log": (loop, "accounts_of"),
}


class Watching(TorchDispatchMode):
    """Counts the operations by which a value, or a size that depends on values, gets out."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, str]] = Counter()
        self.phase = "elsewhere"
        self.groups = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.split("::")[1]
        by_mask = name in ("index", "index_put", "index_put_") and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        if name in LOOKS or by_mask:
            self.found[self.phase, name] += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def during(self, phase: str):
        before, self.phase = self.phase, phase
        yield
        self.phase = before


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> Watching:
    """Says in which function of the loop a value got out; what lies on the host does not count."""
    watch = Watching()

    def watched(owner: Any, name: str, phase: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            with watch.during(phase):
                return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for phase, (owner, name) in WHERE.items():
        watched(owner, name, phase)
    watched(ExpertModel, "tensor", "host")  # checked where it was read
    solve = block.BlockSums._solve_group

    def solving(self: Any, *args: Any) -> Any:
        watch.groups += 1
        return solve(self, *args)

    monkeypatch.setattr(block.BlockSums, "_solve_group", solving)
    for name in ("tolist", "numpy"):  # which no dispatch sees
        original = getattr(Tensor, name)

        def look(self: Tensor, *args: Any, _name: str = name, _original: Any = original) -> Any:
            watch.found[watch.phase, _name] += 1
            return _original(self, *args)

        monkeypatch.setattr(Tensor, name, look)
    return watch


SUITES: dict[str, tuple[Suite, dict[str, Any]]] = {
    "clip": (clip_suite(), {}),
    "clip, first tokens": (clip_suite(), {"token_weights": "demo_last_block"}),
    "clip, no drift": (clip_suite(), {"log_drift": False}),
    "llama, padded": (decoder_suite("llama"), {}),
    "t5, padded on both sides": (t5_suite(), {}),
}


@pytest.mark.parametrize("case", SUITES)
def test_a_visit_looks_at_nothing_and_a_block_a_few_times(case: str, watching: Watching):
    suite, more = SUITES[case]
    with watching:
        result = run_fast(suite, PAPER, **more)
    found = {place: count for place, count in watching.found.items() if place[0] in WHERE}
    blocks = len(result.log.of_kind("block"))
    assert set(found) <= {(name, "tolist") for name in ("solve", "load", "log")}, found
    # once for the sums of all tasks, and once for what was solved of every group of modules
    assert found["solve", "tolist"] == blocks + watching.groups
    assert watching.groups < len(result.log.of_kind("module"))
    assert found["load", "tolist"] == blocks
    assert found.get(("log", "tolist"), 0) <= blocks


def test_the_watch_sees_every_way_to_look(watching: Watching):
    x = torch.arange(4.0)
    ways = [
        lambda: float(x.sum()),
        lambda: bool((x > 0).all()),
        lambda: x[x > 1],
        lambda: x.__setitem__(x > 1, x[0]),
        lambda: x.nonzero(),
        lambda: x.tolist(),
        lambda: x.numpy(),
        lambda: x.new_tensor(3.0),
        lambda: torch.equal(x, x + 1),
    ]
    for way in ways:
        before = watching.found.total()
        with watching:
            way()
        assert watching.found.total() > before


@pytest.mark.parametrize(
    "mask", [[[1, 0, 1], [1, 1, 1]], [[1, 1, 1], [1, 1, 1]], [[0, 2, 0], [1, 0, 3]]]
)
def test_counted_rows_are_those_of_the_mask(mask: list[list[int]]):
    given = torch.tensor(mask)
    features = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    counted = CountedRows.of_mask(given)
    assert torch.equal(counted.of(features), features[given > 0])
    assert torch.equal(rows_of(features, counted), rows_of(features[given > 0], None))
    assert counted.count == int((given > 0).sum())
    weights = given[given > 0]
    assert torch.equal(weights if counted.weights is None else counted.weights, weights)
    assert (counted.weights is None) == bool((weights == 1).all())
    assert (counted.index is None) == bool((given > 0).all())
    other = features + 1
    found = drift_norm_sum(rows_of(features, counted), rows_of(other, counted))
    assert found == drift_norm_sum(features, other, given)


def test_features_of_other_positions_than_the_mask_are_refused():
    counted = CountedRows.of_mask(torch.tensor([[1, 0, 1]]))
    with pytest.raises(ValueError, match=r"\(1, 5, 2\) do not fit a mask \(1, 3\)"):
        counted.of(torch.zeros(1, 5, 2))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1.0, -1.0]], "negative or not finite"),
        ([[1.0, float("nan")]], "negative or not finite"),
        ([[1.0, 1.0], [0.0, 0.0]], r"no position of 1 of 2 samples .*rows \[1\]"),
    ],
)
def test_unusable_masks_are_refused(mask: list[list[float]], message: str):
    with pytest.raises(CalibrationError, match=message):
        CountedRows.of_mask(torch.tensor(mask))


class Queue:
    """A GPU's queue of work, and its marks, which pass when the work before them is done."""

    def __init__(self) -> None:
        self.done = 0.0

    def Event(self, *, enable_timing: bool) -> "Mark":
        assert enable_timing
        return Mark(self)

    def current_stream(self, device: torch.device) -> "Queue":
        assert device.type == "cuda"
        return self


class Mark:
    def __init__(self, queue: Queue) -> None:
        self.queue, self.at, self.waited = queue, -1.0, False

    def record(self, stream: Queue) -> None:
        self.at = stream.done

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, other: "Mark") -> float:
        assert other.waited
        return 1000 * (other.at - self.at)


def test_the_watch_of_a_gpu_tells_the_queues_time(monkeypatch: pytest.MonkeyPatch):
    queue = Queue()
    monkeypatch.setattr(visits.torch, "cuda", queue)
    queue.done = 3.0
    watch = visits.Stopwatch(torch.device("cuda"))
    queue.done = 5.5
    watch.stop()
    queue.done = 9.0
    assert watch.seconds == 2.5
