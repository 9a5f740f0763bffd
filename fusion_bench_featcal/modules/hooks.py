"""Recording of module inputs while a block runs."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.families.base import stop_forward, stoppable
from fusion_bench_featcal.modules.sites import exclusion


@dataclass
class Recorded:
    """Inputs of modules in one pass.

    Attributes:
        inputs: The input of each module, in the order of their calls.
        result: Return value of the pass, or None if it ended early.
    """

    inputs: dict[str, Tensor] = field(default_factory=dict)
    result: Any = None


def record(
    model: nn.Module, names: Collection[str], run: Callable[[], Any], *, to_end: bool = True
) -> Recorded:
    """Run a block and record the inputs of modules.

    Args:
        model: The model.
        names: Names of the modules.
        run: Runs the block.
        to_end: Whether the pass goes on after all modules were called.

    Raises:
        CalibrationError: If the block calls a module twice, or overwrites its input.
    """
    recorded, versions, twice = Recorded(), list[tuple[str, Tensor, int]](), dict[str, None]()

    def note(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else next(iter(kwargs.values()))
        if name in recorded.inputs:
            twice[name] = None
            return
        recorded.inputs[name] = x
        versions.append((name, x, x._version))
        if len(versions) == len(names) and not to_end:
            raise stop_forward()

    hooks = [
        model.get_submodule(name).register_forward_pre_hook(partial(note, name), with_kwargs=True)
        for name in names
    ]
    with stoppable(*hooks):
        recorded.result = run()
    if twice:
        ends = [name.rpartition(".")[2] for name in twice]
        raise CalibrationError(
            f"modules {', '.join(twice)} run twice in their block, and such inputs are not "
            f"summed. Exclude them: {exclusion(ends)}"
        )
    for name, x, version in versions:
        if x._version != version:
            raise CalibrationError(
                f"module {name}: the block overwrites its input afterwards (an in-place "
                "operation), so that it cannot be summed. Write the block's forward without "
                f"it, or exclude the module: {exclusion([name])}"
            )
    return recorded
