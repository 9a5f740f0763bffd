"""What every calibrated module of a block receives, noted by hooks while the block runs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.families.base import stop_forward, stoppable

InputKey = tuple[int, int]
"""Identity of an input: the tensor and its version (in-place writes raise the version)."""


@dataclass
class Recording:
    """Inputs of one pass through a block.

    Attributes:
        copies: Whether inputs are copied, for a block that overwrites them later.
        stop_after: Number of calls after which the pass ends; None: it runs to its end.
        inputs: Each distinct input once, by identity.
        calls: For each module, the identities of its inputs, one a call.
        outputs: Of modules for which that is asked, the outputs, one a call.
        count: Number of calls.
    """

    copies: bool = False
    stop_after: int | None = None
    inputs: dict[InputKey, Tensor] = field(default_factory=dict)
    calls: dict[str, list[InputKey]] = field(default_factory=dict)
    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    count: int = 0
    _originals: dict[InputKey, Tensor] = field(default_factory=dict)

    def add(self, module: str, value: Tensor) -> None:
        """Note one call of a module; ends the pass if it was the last that is asked for."""
        key = (id(value), _version(value))
        if key not in self.inputs:
            self.inputs[key] = self._kept(key, value)
        self.calls.setdefault(module, []).append(key)
        self.count += 1
        if self.count == self.stop_after:
            raise stop_forward()

    def add_output(self, module: str, value: Tensor) -> None:
        """Note what a call gave."""
        kept = self._kept((id(value), _version(value)), value)
        self.outputs.setdefault(module, []).append(kept)

    def _kept(self, key: InputKey, value: Tensor) -> Tensor:
        # The tensor is kept beside its copy, because a freed one's identity can return.
        self._originals[key] = value
        copied = self.copies or value.is_inference()  # which has no version to tell by
        return value.detach().clone() if copied else value.detach()

    def of(self, module: str) -> list[Tensor]:
        """A module's inputs, one a call."""
        return [self.inputs[key] for key in self.calls.get(module, [])]

    def is_overwritten(self) -> bool:
        """Whether an input is no longer what the module received (an in-place residual)."""
        if self.copies:
            return False
        return any(_version(value) != version for (_, version), value in self._originals.items())


class Recorder:
    """Runs blocks and notes what their modules receive.

    Inputs are not copied: whether the block overwrote one shows afterwards in the tensors'
    versions. Such a block runs once more, with copies, and with copies only from then on. A block's
    output may not be asked for; the pass then ends with the last module's input, once a first pass
    has told which call is the last.
    """

    def __init__(self) -> None:
        """Start knowing no block."""
        self._overwriting: set[tuple[str, ...]] = set()
        self._calls: dict[tuple[str, ...], int] = {}

    def record(
        self,
        model: nn.Module,
        modules: Sequence[str],
        run: Callable[[], Any],
        *,
        needs_output: bool = True,
        outputs_of: Sequence[str] = (),
    ) -> tuple[Any, Recording]:
        """Run a block and note what the named modules receive.

        Args:
            model: The model.
            modules: Names of its modules.
            run: Runs the block. It may be run twice, and must give the same both times.
            needs_output: Whether the block has to run to its end. False is for blocks that call
                the same modules equally often in every pass.
            outputs_of: Names of modules whose outputs are noted too.

        Returns:
            What `run` returned, None where the pass ended before; the recording.
        """
        names = tuple(modules)

        def once(*, copies: bool) -> tuple[Any, Recording]:
            recording = Recording(copies, None if needs_output else self._calls.get(names))
            output = None
            with _hooks(model, names, outputs_of, recording), stoppable():
                output = run()
            return output, recording

        output, recording = once(copies=names in self._overwriting)
        if recording.is_overwritten():
            self._overwriting.add(names)
            output, recording = once(copies=True)
        self._calls[names] = recording.count
        return output, recording


def _version(value: Tensor) -> int:
    return 0 if value.is_inference() else value._version


@contextmanager
def _hooks(
    model: nn.Module, modules: Sequence[str], outputs_of: Sequence[str], recording: Recording
) -> Iterator[None]:
    """Context in which the named modules' inputs, and some modules' outputs, are recorded."""

    def hook(name: str) -> Any:
        def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            recording.add(name, args[0] if args else next(iter(kwargs.values())))

        return record

    def output_hook(name: str) -> Any:
        return lambda _, args, output: recording.add_output(name, output)

    handles = [
        model.get_submodule(name).register_forward_pre_hook(hook(name), with_kwargs=True)
        for name in modules
    ]
    handles += [
        # before what other hooks make of them
        model.get_submodule(name).register_forward_hook(output_hook(name), prepend=True)
        for name in outputs_of
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
