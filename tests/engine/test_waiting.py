"""The host looks at nothing that a device computes while a task visits a block.

On a GPU each look would let the host wait for all work that is queued, and the GPU then for the
host. Looks show on a CPU too: as the few operations that take a value out of a tensor.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from calibrations import PAPER, run_fast
from tiny_models import Suite, clip_suite, decoder_suite, t5_suite
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusion_bench_featcal.engine import visits

LOOKS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "lift_fresh",
    "lift_fresh_copy",
)


class Watching(TorchDispatchMode):
    """Counts the operations by which a value, or a size that depends on values, gets out."""

    looks = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.split("::")[1]
        by_mask = name in ("index", "index_put", "index_put_") and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        self.looks += name in LOOKS or by_mask
        return func(*args, **(kwargs or {}))


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Number of looks of a function's call."""
    watch = Watching()
    for name in ("tolist", "numpy"):  # which no dispatch sees
        original = getattr(Tensor, name)

        def look(self: Tensor, *args: Any, _original: Any = original) -> Any:
            watch.looks += 1
            return _original(self, *args)

        monkeypatch.setattr(Tensor, name, look)

    def count(work: Callable[..., Any], *args: Any, **more: Any) -> int:
        before = watch.looks
        with watch:
            work(*args, **more)
        return watch.looks - before

    return count


CASES: dict[str, tuple[Callable[[int], Suite], dict[str, Any]]] = {
    "clip": (lambda depth: clip_suite(tasks=2, depth=depth), {}),
    "clip, no drift": (lambda depth: clip_suite(tasks=1, depth=depth), {"log_drift": False}),
    "llama, padded": (lambda depth: decoder_suite(tasks=1, depth=depth), {}),
    "t5, padded on both sides": (lambda depth: t5_suite(tasks=1, depths=(1, depth)), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_visit_looks_at_nothing_and_a_block_a_few_times(case: str, looks: Any):
    make, more = CASES[case]
    suites = [make(depth) for depth in (1, 2)]

    def looks_of_a_block(copies: int) -> int:
        """Looks that one block more takes."""
        totals = []
        for suite in suites:
            inputs = {task: batches * copies for task, batches in suite.inputs.items()}
            copied = replace(suite, inputs=inputs)
            totals.append(looks(run_fast, copied, PAPER, **more))
        return totals[1] - totals[0]

    once = looks_of_a_block(1)
    assert looks_of_a_block(2) == once  # whatever the number of batches
    # every tensor that is read is checked where it lies; then once for the sums of all tasks, for
    # each solved system, for the new parameters and for the log
    block, log = suites[1].blocks[-1], run_fast(suites[1], PAPER, **more).log
    tensors = len(list(suites[1].merged.get_submodule(block).parameters()))
    systems = {r["condition"] for r in log.of_kind("module") if r["block"] == block}
    assert once <= (len(suites[1].experts) + 1) * tensors + len(systems) + 3


def test_weights_of_tokens_are_not_looked_at(looks: Any):
    suite = clip_suite(tasks=1)
    weighted, plain = (
        looks(run_fast, suite, PAPER, token_weights=weights)
        for weights in ("demo_last_block", "uniform")
    )
    assert weighted == plain + 1  # the last q has a system of its own


def test_the_watch_sees_every_way_to_look(looks: Any):
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
    assert all(looks(way) for way in ways)


class Mark:
    """A mark in a GPU's queue of work, which is reached when the work before it is done."""

    done = 0.0
    waited = False

    def record(self, stream: Any) -> None:
        self.at = Mark.done

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, other: "Mark") -> float:
        assert other.waited
        return 1000 * (other.at - self.at)


class Gpu:
    """As much of `torch.cuda` as a stopwatch needs."""

    @staticmethod
    def Event(*, enable_timing: bool) -> Mark:
        assert enable_timing
        return Mark()

    @staticmethod
    def current_stream(device: torch.device) -> None: ...


def test_a_stopwatch_on_a_gpu_tells_the_queues_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(visits.torch, "cuda", Gpu)
    monkeypatch.setattr(Mark, "done", 3.0)
    watch = visits.Stopwatch(torch.device("cuda"))
    Mark.done = 5.5
    watch.stop()
    Mark.done = 9.0
    assert watch.seconds == 2.5
