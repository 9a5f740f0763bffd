"""The base of all families, and the family whose blocks form a plain chain."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.settings import CalibrationError


class ModelView:
    """An arrangement of a model's weights. This one is the model's own."""

    def shown(self, model: nn.Module) -> nn.Module:
        """Return the model as calibration sees it; it may share tensors with the model."""
        return model

    def source(self, source: Any) -> Any:
        """Return an `ExpertSource` of an expert's weights as calibration sees them."""
        return source

    def restored(self, model: nn.Module) -> nn.Module:
        """Return the model in its own arrangement again; the shown model is used up."""
        return model


AS_IT_IS = ModelView()


class Family(ABC):
    """Base of all families: how models of one architecture are cut into blocks and run.

    Attributes:
        name: The family's name in settings and logs.
        whole_model: Whether `step` runs the whole model and not the block alone, so that all of an
            expert's weights must be in memory for it.
        same_calls: Whether every pass through a block calls the same modules equally often, and
            what a block receives holds its features as `hidden`: a pass of which only the modules'
            inputs are wanted then ends with the last of them.
        hands_on: Whether stages after the first begin from what the one before ended with: then
            `begin` takes what `ending` gives as a fourth argument.
        compared: Whether calibration compares its steps with the model's own forward pass on the
            first samples, before it begins.
        has_tables: Whether modules that receive other rows than their stage's positions can only
            receive tables (of relative positions), which have no padding.
        view: The arrangement of the weights that calibration sees.
    """

    name: str
    whole_model: bool = False
    same_calls: bool = False
    hands_on: bool = False
    compared: bool = False
    has_tables: bool = False
    view: ModelView = AS_IT_IS

    @abstractmethod
    def stages(self, model: nn.Module) -> list[list[str]]:
        """Names of the blocks in forward order, one list a stage.

        A stage's first inputs are captured when all earlier stages are calibrated.
        """

    @abstractmethod
    def begin(self, model: nn.Module, inputs: Any, first_block: str, *ending: Any) -> Any:
        """Run the model on its inputs up to a stage's first block; the inputs of that block."""

    @abstractmethod
    def step(self, model: nn.Module, block: str, call: Any) -> tuple[Tensor, Any]:
        """Run one block; its hidden output and the inputs of the next block."""

    def ending(self, model: nn.Module, call: Any) -> Any:
        """Output of a stage, from the inputs of a block behind its last; asked if `hands_on`."""
        raise NotImplementedError

    def row_weights(self, inputs: Any, stage_index: int, decoder_rows: str) -> Tensor | None:
        """Mask of the positions of a stage's hidden features that count.

        Args:
            inputs: The model's inputs.
            stage_index: The stage, as an index into `stages`.
            decoder_rows: The setting: `all` or `targets`. Only decoders make a difference.

        Returns:
            1 for positions that count, 0 for others, `[batch, positions]`; None: all count.
        """
        return None

    def other_rows(self, inputs: Any, stage_index: int) -> Mapping[str, Tensor | None]:
        """Masks of the rows that count in modules of a stage that are fed by other features.

        Returns:
            By the end of a module's name (`EncDecAttention.k`): as `row_weights`. Empty where
            every module is fed by the stage's own hidden features.
        """
        return {}

    def closing_rows(self, model: nn.Module, hidden: Tensor) -> Tensor | None:
        """Mask of the rows of the last block's output that the model goes on to read.

        Args:
            model: The model.
            hidden: That output, `[batch, positions, d]`.

        Returns:
            1 for rows that are read, 0 for others, `[batch, positions]`; None: all are.
        """
        return None


def stages_of(family: Family, model: nn.Module) -> list[list[str]]:
    """Return a family's stages of a model, checked.

    Raises:
        CalibrationError: If they are no lists of names of the model's modules.
    """
    stages = family.stages(model)
    if not stages or not all(isinstance(stage, list | tuple) and stage for stage in stages):
        raise CalibrationError(
            f"method.family={family.name}: stages gives {stages!r}, but must give one list of "
            "names for each stage, [[block, ...], ...]"
        )
    modules = dict(model.named_modules())
    for block in (block for stage in stages for block in stage):
        if block not in modules:
            raise CalibrationError(
                f"method.family={family.name}: {type(model).__name__} has no block {block!r}"
            )
    return stages


def two_stages(
    model: nn.Module, block: re.Pattern[str], lists: tuple[str, str], example: str
) -> list[list[str]]:
    """Names of the blocks of a model with two lists of them, in forward order.

    Args:
        model: The model.
        block: Pattern of the blocks' whole names.
        lists: The part of a name that tells each list, in forward order.
        example: A class with both, for the message.

    Raises:
        CalibrationError: If the model lacks one of the two.
    """
    names = [name for name, _ in model.named_modules() if block.fullmatch(name)]
    stages = [[name for name in names if f"{part}." in name] for part in lists]
    if not all(stages):
        raise CalibrationError(
            f"{type(model).__name__} has no {lists[0]}.* and {lists[1]}.* both, as {example} has: "
            "name the blocks with method.family={name: replay, blocks: ...}"
        )
    return stages


class _Stopped(Exception):
    """Ends a forward pass that was only needed up to a block; never leaves this package."""


@contextmanager
def stoppable(*hooks: Any) -> Iterator[None]:
    """Context in which a hook may end a forward pass by raising `stop_forward()`.

    Args:
        *hooks: Handles of hooks, which are removed behind the pass.
    """
    try:
        with suppress(_Stopped):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def stop_forward() -> Exception:
    """The exception that `stoppable` swallows."""
    return _Stopped()


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Run a model on a batch: keyword arguments, a tuple of arguments or one tensor.

    Tensors are copied: the same batch runs many times, and a model may write into its inputs.
    """
    if isinstance(inputs, Mapping):
        return model(**{key: _fresh(value) for key, value in inputs.items()})
    if isinstance(inputs, tuple):
        return model(*map(_fresh, inputs))
    return model(_fresh(inputs))


def _fresh(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def hidden_output(output: Any) -> Tensor:
    """Hidden features in what a block returned: a tensor, or the first entry of a tuple or mapping.

    Raises:
        TypeError: If there is no tensor in first place.
    """
    if isinstance(output, Mapping):
        output = next(iter(output.values()))
    elif isinstance(output, tuple | list):
        output = output[0]
    if not isinstance(output, Tensor):
        raise TypeError(f"a block returned {type(output).__name__} in place of hidden features")
    return output


@dataclass(frozen=True)
class BlockCall:
    """Arguments of one block: hidden features first, then what all blocks receive alike."""

    hidden: Tensor
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class ChainFamily(Family):
    """Blocks of which each takes the last one's hidden output and otherwise the same arguments.

    Every position counts, in every module.

    Attributes:
        name: The family's name.
        find_stages: Finds the block names in a model.
        same_calls: As `Family`.
        view: As `Family`.
    """

    name: str
    find_stages: Callable[[nn.Module], list[list[str]]]
    same_calls: bool = False
    view: ModelView = AS_IT_IS

    def stages(self, model: nn.Module) -> list[list[str]]:
        """Names of the blocks in forward order, one list a stage."""
        return self.find_stages(model)

    def begin(self, model: nn.Module, inputs: Any, first_block: str, *ending: Any) -> BlockCall:
        """Capture the first block's arguments from the model's own forward pass."""
        return capture_call(model, inputs, first_block)

    def step(self, model: nn.Module, block: str, call: BlockCall) -> tuple[Tensor, BlockCall]:
        """Call the block on its stored arguments, which it may not change: they are used again."""
        hidden = hidden_output(call_block(model, block, call))
        return hidden, replace(call, hidden=hidden)


def capture_call(model: nn.Module, inputs: Any, block: str) -> BlockCall:
    """Run a model's own forward pass up to a block, and stop it there.

    A cache of keys and values, which would remember each of the many times that a block runs, is
    taken out of the arguments.

    Args:
        model: The model.
        inputs: Its inputs.
        block: The block's name.

    Returns:
        What the block would have received.
    """
    captured: list[BlockCall] = []

    def capture(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rest = {key: _NO_CACHE.get(key, value) for key, value in kwargs.items()}
        hidden = args[0] if args else rest.pop("hidden_states")
        captured.append(BlockCall(hidden, args[1:], rest))
        raise stop_forward()

    hook = model.get_submodule(block).register_forward_pre_hook(capture, with_kwargs=True)
    with stoppable(hook):
        call_model(model, inputs)
    return captured[0]


_NO_CACHE: Mapping[str, Any] = {"past_key_values": None, "use_cache": False}


def call_block(model: nn.Module, block: str, call: BlockCall) -> Any:
    """Run one block on its stored arguments; what it returns."""
    return model.get_submodule(block)(call.hidden.clone(), *call.args, **call.kwargs)
