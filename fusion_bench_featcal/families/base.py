"""The base of all families, and the family whose blocks form a plain chain."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.families.transformers_names import HIDDEN, without_cache


class ModelView:
    """An arrangement of a model's weights. The base class leaves them as stored."""

    def arranged(self, model: nn.Module) -> nn.Module:
        """Return the model arranged for calibration. It may share tensors with the argument."""
        return model

    def source(self, source: Any) -> Any:
        """Return an `ExpertSource` of an expert's weights in the arrangement for calibration."""
        return source

    def restored(self, model: nn.Module) -> nn.Module:
        """Return the model in its stored arrangement. The argument must not be used again."""
        return model


AS_IT_IS = ModelView()


class Family(ABC):
    """Base of all families: how models of one architecture are cut into blocks and run.

    Attributes:
        name: The family's name in settings and logs.
        hands_on: Whether stages after the first begin from the output of the previous stage.
            `begin` then takes the return value of `ending` as a fourth argument.
        compared: Whether calibration first compares the family's steps with the model's forward
            pass on the first samples.
        view: The arrangement of the weights for calibration.
    """

    name: str
    hands_on: bool = False
    compared: bool = False
    view: ModelView = AS_IT_IS

    @abstractmethod
    def stages(self, model: nn.Module) -> list[list[str]]:
        """Return names of the blocks in forward order, one list per stage.

        A stage's first inputs are captured after all earlier stages are calibrated.
        """

    @abstractmethod
    def begin(self, model: nn.Module, inputs: Any, first_block: str, *ending: Any) -> Any:
        """Run the model up to a stage's first block and return the inputs of that block."""

    @abstractmethod
    def step(self, model: nn.Module, block: str, call: Any) -> tuple[Tensor, Any]:
        """Run one block and return its hidden output and the inputs of the next block."""

    def ending(self, model: nn.Module, call: Any) -> Any:
        """Return a stage's output, from the inputs of a block after its end. Used if `hands_on`."""
        raise NotImplementedError

    def row_weights(self, inputs: Any, stage_index: int, decoder_rows: str) -> Tensor | None:
        """Return a mask of the counted positions of a stage's hidden features.

        Args:
            inputs: The model's inputs.
            stage_index: The stage, as an index into `stages`.
            decoder_rows: The setting: `all` or `targets`. Only decoders distinguish them.

        Returns:
            1 for positions that count, 0 for others, `[batch, positions]`. None if all count.
        """
        return None

    def other_rows(self, inputs: Any, stage_index: int) -> Mapping[str, Tensor | None]:
        """Return masks of the counted rows in modules whose inputs are not the stage's features.

        Returns:
            A mask, as for `row_weights`, by the end of a module's name (`EncDecAttention.k`). Empty
            if all modules receive the stage's hidden features.
        """
        return {}

    def closing_rows(self, model: nn.Module, hidden: Tensor) -> Tensor | None:
        """Return a mask of the rows of the last block's output that the head reads.

        Args:
            model: The model.
            hidden: The last block's output, `[batch, positions, d]`.

        Returns:
            1 for rows that are read, 0 for others, `[batch, positions]`. None if all are.
        """
        return None


def stages_of(family: Family, model: nn.Module) -> list[list[str]]:
    """Return a family's stages of a model, checked.

    Raises:
        CalibrationError: If they are not lists of names of the model's modules.
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
    """Return names of the blocks of a model with two lists of them, in forward order.

    Args:
        model: The model.
        block: Pattern of a block's whole name.
        lists: The part of a name that identifies each list, in forward order.
        example: A class with both, for the message.

    Raises:
        CalibrationError: If the model lacks one of the two.
    """
    names = [name for name, _ in model.named_modules() if block.fullmatch(name)]
    stages = [[name for name in names if f"{part}." in name] for part in lists]
    if not all(stages):
        raise CalibrationError(
            f"{type(model).__name__} has no {lists[0]}.* and {lists[1]}.* both, as {example} has: "
            "choose another method.family (docs/tutorials/family.md)"
        )
    return stages


class _Stopped(Exception):
    """Ends a forward pass that is only needed up to a block. Caught inside this package."""


@contextmanager
def stoppable(*hooks: Any) -> Iterator[None]:
    """Context in which a hook may end a forward pass by raising `stop_forward()`.

    Args:
        *hooks: Handles of hooks, which are removed after the pass.
    """
    try:
        with suppress(_Stopped):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def stop_forward() -> Exception:
    """Return the exception that `stoppable` catches."""
    return _Stopped()


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Run a model on a batch: keyword arguments, a tuple of arguments or one tensor.

    Tensors are copied, because the same batch runs many times and a model may write into its
    inputs.
    """
    if isinstance(inputs, Mapping):
        return model(**{key: _fresh(value) for key, value in inputs.items()})
    if isinstance(inputs, tuple):
        return model(*map(_fresh, inputs))
    return model(_fresh(inputs))


def _fresh(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def hidden_output(output: Any) -> Tensor:
    """Return the hidden features of a block's output: a tensor, or the first entry of a container.

    Raises:
        TypeError: If the first entry is not a tensor.
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
    """Arguments of one block: hidden features, then the arguments common to all blocks."""

    hidden: Tensor
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class ChainFamily(Family):
    """Blocks that take the previous block's hidden output and otherwise the same arguments.

    Every position counts, in every module.

    Attributes:
        name: The family's name.
        find_stages: Finds the block names in a model.
        view: As `Family`.
    """

    name: str
    find_stages: Callable[[nn.Module], list[list[str]]]
    view: ModelView = AS_IT_IS

    def stages(self, model: nn.Module) -> list[list[str]]:
        """Return names of the blocks in forward order, one list per stage."""
        return self.find_stages(model)

    def begin(self, model: nn.Module, inputs: Any, first_block: str, *ending: Any) -> BlockCall:
        """Capture the first block's arguments from the model's forward pass."""
        return capture_call(model, inputs, first_block)

    def step(self, model: nn.Module, block: str, call: BlockCall) -> tuple[Tensor, BlockCall]:
        """Call the block on its stored arguments. It must not change them."""
        hidden = hidden_output(call_block(model, block, call))
        return hidden, replace(call, hidden=hidden)


def capture_call(model: nn.Module, inputs: Any, block: str) -> BlockCall:
    """Run a model's forward pass up to a block and return the arguments of that block.

    A cache of keys and values is removed from the arguments, since a block runs many times.

    Args:
        model: The model.
        inputs: Its inputs.
        block: The block's name.
    """
    captured: list[BlockCall] = []

    def capture(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rest = {key: without_cache(value, key) for key, value in kwargs.items()}
        hidden, *positional = args or (rest.pop(HIDDEN),)
        captured.append(BlockCall(hidden, tuple(map(without_cache, positional)), rest))
        raise stop_forward()

    hook = model.get_submodule(block).register_forward_pre_hook(capture, with_kwargs=True)
    with stoppable(hook):
        call_model(model, inputs)
    return captured[0]


def call_block(model: nn.Module, block: str, call: BlockCall) -> Any:
    """Run one block on its stored arguments and return its output."""
    return model.get_submodule(block)(call.hidden.clone(), *call.args, **call.kwargs)
