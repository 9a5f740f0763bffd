"""Inputs and outputs of a block's modules, noted by hooks while the block runs."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.engine.rows import CountedRows
from fusion_bench_featcal.families.base import stop_forward, stoppable
from fusion_bench_featcal.settings import CalibrationError

InputKey = tuple[int, int]
"""Identity of an input: the tensor and its version (in-place writes raise the version)."""

Outputs = Mapping[str, Callable[[Tensor], Any]]
"""By module: what is to be kept of its outputs, which a block may overwrite."""

NO_OUTPUTS: Outputs = {}


@dataclass
class Recording:
    """Inputs of one pass through a block, which are not copied, and what is kept of outputs.

    Attributes:
        stop_after: Number of notes after which the pass ends; None: it runs to its end.
        inputs: Each distinct input once, by identity.
        calls: For each module, the identities of its inputs, one a call.
        outputs: For each module whose outputs were asked for, what is kept of them, one a call.
        copied: Modules whose inputs are copied, as they may be overwritten.
        count: Number of notes: of inputs and of outputs.
        output: What the block returned: its hidden features, and the inputs of the next block; None
            if the pass ended before.
        routed: For each module that receives only rows which a router sends it: those that count;
            None: all do.
    """

    stop_after: int | None = None
    inputs: dict[InputKey, Tensor] = field(default_factory=dict)
    calls: dict[str, list[InputKey]] = field(default_factory=dict)
    outputs: dict[str, list[Any]] = field(default_factory=dict)
    copied: Collection[str] = ()
    count: int = 0
    output: tuple[Any, Any] | None = None
    routed: dict[str, CountedRows | None] = field(default_factory=dict)
    _originals: dict[InputKey, Tensor] = field(default_factory=dict)

    def add(self, module: str, value: Tensor) -> None:
        """Note an input of a module; ends the pass if it was the last that is asked for."""
        key = (id(value), 0 if value.is_inference() else value._version)
        self._originals[key] = value  # a freed tensor's identity can return
        if key not in self.inputs:
            # An inference tensor has no version to tell by that it was overwritten.
            copies = value.is_inference() or module in self.copied
            self.inputs[key] = value.clone() if copies else value
        self.calls.setdefault(module, []).append(key)
        self._count()

    def add_output(self, module: str, kept: Any) -> None:
        """Note an output of a module; ends the pass if it was the last that is asked for."""
        self.outputs.setdefault(module, []).append(kept)
        self._count()

    def _count(self) -> None:
        self.count += 1
        if self.count == self.stop_after:
            raise stop_forward()

    def adopt(self, other: "Recording") -> None:
        """Take over the inputs of another pass, of modules that did not run in this one."""
        self.inputs |= other.inputs
        self.calls |= other.calls
        self._originals |= other._originals

    def of(self, module: str) -> list[Tensor]:
        """A module's inputs, one a call."""
        return [self.inputs[key].detach() for key in self.calls.get(module, [])]

    @property
    def hidden(self) -> Tensor | None:
        """The block's hidden features, if it ran to its end."""
        return None if self.output is None else self.output[0]

    @property
    def following(self) -> Any:
        """Inputs of the next block, if the block ran to its end."""
        return None if self.output is None else self.output[1]

    def refuse_overwritten(self) -> None:
        """Refuse inputs that are no longer what the module received.

        Raises:
            CalibrationError: Naming the module.
        """
        safe = {key for module in self.copied for key in self.calls.get(module, ())}
        for module, keys in self.calls.items():
            if any(_version(self._originals[key]) != key[1] for key in keys if key not in safe):
                raise CalibrationError(
                    f"module {module}: the block overwrites its input afterwards (an in-place "
                    "operation), so that it cannot be summed. Write the block's forward without "
                    f"it, or exclude the module: method.modules=['!{module}']"
                )


class Recorder:
    """Runs blocks and notes what their modules receive.

    A block's output may not be asked for; the pass then ends with the last module's input, once a
    first pass has told which call is the last.
    """

    def __init__(self) -> None:
        """Start knowing no block."""
        self._calls: dict[tuple[tuple[str, ...], ...], int] = {}

    def record(
        self,
        model: nn.Module,
        modules: Sequence[str],
        run: Callable[[], Any],
        *,
        needs_output: bool = True,
        outputs: Outputs = NO_OUTPUTS,
        stop_after: int | None = None,
        copied: Collection[str] = (),
    ) -> Recording:
        """Run a block and note what the named modules receive.

        Args:
            model: The model.
            modules: Names of its modules.
            run: Runs the block.
            needs_output: Whether the block has to run to its end. False is for blocks that call
                the same modules equally often in every pass.
            outputs: Modules of which outputs are noted, too.
            stop_after: Number of notes after which the pass ends, where it is known beforehand.
            copied: Modules whose inputs may be overwritten: they are copied.

        Returns:
            The recording.

        Raises:
            CalibrationError: If the block overwrites an input of a module.
        """
        key = tuple(modules), tuple(outputs)
        recording = Recording(stop_after, copied=copied)
        if not (needs_output or stop_after):
            recording.stop_after = self._calls.get(key)
        with _hooks(model, modules, outputs, recording), stoppable():
            recording.output = run()
        recording.refuse_overwritten()
        self._calls[key] = recording.count
        return recording


def _version(value: Tensor) -> int:
    return 0 if value.is_inference() else value._version


@contextmanager
def _hooks(
    model: nn.Module, modules: Sequence[str], outputs: Outputs, recording: Recording
) -> Iterator[None]:
    """Context in which the named modules' inputs and outputs are recorded."""

    def leave(name: str) -> Any:
        return lambda _, __, output: recording.add_output(name, outputs[name](output))

    def hook(name: str) -> Any:
        def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            recording.add(name, args[0] if args else next(iter(kwargs.values())))

        return record

    handles = [
        model.get_submodule(name).register_forward_pre_hook(hook(name), with_kwargs=True)
        for name in dict.fromkeys(modules)  # a block may be a module that is calibrated
    ]
    handles += [model.get_submodule(name).register_forward_hook(leave(name)) for name in outputs]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
