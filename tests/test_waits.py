"""The operations of a GPU for which its host waits. Between them it reads the next expert."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from calibrations import PLUS, run_fast
from posing import Posing
from tiny_models import clip_suite
from torch.utils._python_dispatch import TorchDispatchMode

from fusion_bench_featcal import Plus
from fusion_bench_featcal.experts import LazyModel

# Of smaller ridges the errors decide how many are tried.
SETTINGS: dict[str, Any] = PLUS | {"rule": Plus(ridges=(1e-2, 1.0))}
WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique")


class Waits(TorchDispatchMode):
    """Counts operations whose result the host needs, but those on tensors just read from files."""

    number, reading = 0, False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.number += not self.reading and any(name in str(func) for name in WAITING)
        return func(*args, **(kwargs or {}))


def test_the_host_waits_for_blocks_and_not_for_their_tasks_or_batches(monkeypatch) -> None:
    """A block's weights of the next expert are read and sent while the GPU runs this one."""
    stored = LazyModel.stored

    def waits(layers: int, tasks: int, sizes: tuple[int, ...]) -> int:
        counted = Waits()

        def read(model: LazyModel, name: str) -> Any:
            counted.reading = True
            try:
                return stored(model, name)
            finally:
                counted.reading = False

        monkeypatch.setattr(LazyModel, "stored", read)
        suite = clip_suite(tasks=tasks, sizes=sizes, depth=layers)
        with Posing(), counted:
            run_fast(suite, device=torch.device("cuda"), **SETTINGS)
        return counted.number

    few, more = (2, (4, 4)), (3, (4, 2, 2))
    assert waits(2, *few) - waits(1, *few) == waits(2, *more) - waits(1, *more)
    assert waits(1, *more) > waits(1, *few)  # before the first block each batch is checked
