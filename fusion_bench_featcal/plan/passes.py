"""One pass through a block on the meta device: its operations, and what its modules receive."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.families.base import stop_forward, stoppable
from fusion_bench_featcal.plan.counting import Counts, counted


@dataclass
class Seen:
    """Inputs of a block's modules, in one pass.

    Attributes:
        keys: For each module, the identities of its inputs, one a call.
        rows: For each module, the rows of all its inputs.
        alive: All inputs.
        stop_after: Number of calls after which the pass ends; None: it runs to its end.
    """

    keys: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    alive: list[Tensor] = field(default_factory=list)
    stop_after: int | None = None

    def note(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note one call; ends the pass if it was the last that is asked for."""
        value = args[0] if args else next(iter(kwargs.values()))
        self.alive.append(value)  # the engine keeps it too, until it is summed
        self.keys[name] = (*self.keys.get(name, ()), (id(value), value._version))
        self.rows[name] = self.rows.get(name, 0) + value.shape[:-1].numel()
        if len(self.alive) == self.stop_after:
            raise stop_forward()


def recorded(
    model: nn.Module, names: Sequence[str], seen: Seen, step: Callable[[], Any]
) -> tuple[Any, Counts]:
    """Count a pass of which the named modules' inputs are noted.

    Args:
        model: The model.
        names: Names of its modules.
        seen: Where their inputs are noted.
        step: Runs the pass.

    Returns:
        What it returned, None where it ended before; what it computed.
    """
    handles = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, kwargs, name=name: seen.note(name, args, kwargs), with_kwargs=True
        )
        for name in names
    ]

    def run() -> Any:
        with stoppable():
            return step()

    try:
        return counted(run)
    finally:
        for handle in handles:
            handle.remove()
