"""Recording of module inputs while a block runs."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.families.base import stop_forward, stoppable
from fusion_bench_featcal.settings import CalibrationError


@dataclass
class Recorded:
    """Inputs of modules in one pass.

    Attributes:
        inputs: The inputs of each module, one per call, in the order of first calls.
        outputs: The outputs of the requested modules, one per call.
        result: Return value of the pass, or None if it ended early.
    """

    inputs: dict[str, list[Tensor]] = field(default_factory=dict)
    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    result: Any = None


def record(
    model: nn.Module,
    names: Collection[str],
    run: Callable[[], Any],
    *,
    outputs: Collection[str] = (),
    calls: int | None = None,
) -> Recorded:
    """Run a block and record the inputs of modules.

    Args:
        model: The model.
        names: Names of the modules.
        run: Runs the block.
        outputs: Names of modules whose outputs are recorded.
        calls: Number of calls after which the pass ends. None runs it to its end.

    Raises:
        CalibrationError: If the block overwrites an input of a module.
    """
    recorded, versions = Recorded(), list[tuple[str, Tensor, int]]()

    def note(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else next(iter(kwargs.values()))
        recorded.inputs.setdefault(name, []).append(x)
        versions.append((name, x, x._version))
        if len(versions) == calls:
            raise stop_forward()

    def note_output(name: str, _: nn.Module, __: Any, output: Tensor) -> None:
        # A copy, because blocks may add to an output in place.
        recorded.outputs.setdefault(name, []).append(output.clone())

    hooks = [
        model.get_submodule(name).register_forward_pre_hook(partial(note, name), with_kwargs=True)
        for name in names
    ]
    hooks += [
        model.get_submodule(name).register_forward_hook(partial(note_output, name))
        for name in outputs
    ]
    with stoppable(*hooks):
        recorded.result = run()
    for name, x, version in versions:
        if x._version != version:
            raise CalibrationError(
                f"module {name}: the block overwrites its input afterwards (an in-place "
                "operation), so that it cannot be summed. Write the block's forward without "
                f"it, or exclude the module: method.modules=['!{name}']"
            )
    return recorded
