"""Interface of model families, and functions that run a model up to a block, or one block."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.words import option

HIDDEN = "hidden_states"
"""Input features of a block of transformers that receives them by name."""

NO_TARGET = -100
"""Label of a position without a target (ignored by the losses of transformers)."""

SOUNDS = ("input_features", "input_values")
"""Names of a model's inputs of sounds."""
_MEDIA = ("pixel_values", *SOUNDS)

Masks = Mapping[str, Tensor | None]
"""End of a module's name -> mask `[batch, positions]`: 1 for positions that count, 0 for others.
None means that all positions count. The name "" stands for the features of the stage and for all
modules without a mask of their own."""


@dataclass(frozen=True)
class Call:
    """Input of one block.

    Attributes:
        hidden: Output of the previous block, or the features that the model gives to the first one.
        args: The block's other positional arguments.
        kwargs: Its keyword arguments.
    """

    hidden: Tensor
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


class Family(ABC):
    """Base of all families: how models of one architecture are cut into blocks and run.

    A family of your own needs `stages`, `begin` and `step`.

    Attributes:
        name: The family's name in settings and logs, by default that of the class.
        compared: Whether the calibration first runs the blocks one by one on two samples and
            compares the result with the model's forward pass.
        tail: Modules after the last block that are also calibrated, each as its own final stage.
            They ignore the base model, because its head may differ.
    """

    name: str
    compared: bool = True
    tail: Sequence[str] = ()

    def __init_subclass__(cls) -> None:
        """Name the class."""
        cls.name = vars(cls).get("name", cls.__name__)

    @abstractmethod
    def stages(self, model: nn.Module) -> list[list[str]]:
        """Return names of the blocks in forward order, one list per stage.

        A stage, such as an encoder, begins after all earlier stages are calibrated.
        """

    @abstractmethod
    def begin(self, model: nn.Module, inputs: Any, block: str, ended: Any = None) -> Any:
        """Run the model up to a stage's first block.

        Args:
            model: The model. Blocks of this and of earlier stages have no weights.
            inputs: A batch of its inputs.
            block: The block.
            ended: The call after the previous stage (`hidden` is the output of its last block), or
                None in the first stage.

        Returns:
            The block's input: a `Call`, or another dataclass with an attribute `hidden`.
        """

    @abstractmethod
    def step(self, model: nn.Module, block: str, call: Any) -> Any:
        """Run one block and return the input of the next block, whose `hidden` is the output."""

    def masks(self, model: nn.Module, inputs: Any, stage: int, decoder_rows: str) -> Masks:
        """Return masks of the positions that count in a stage, or {} if all positions count.

        Args:
            model: The model.
            inputs: A batch of its inputs.
            stage: The stage, as an index into `stages`.
            decoder_rows: The setting: `all` or `targets`. Only decoders distinguish them.
        """
        return {}

    def reads_first(self, model: nn.Module, inputs: Any) -> bool:
        """Return whether the head reads only the first position of the last block's output."""
        return False

    def __repr__(self) -> str:
        """Return the class with its options, which a resumed run compares."""
        return f"{type(self).__name__}({vars(self)})"


def stages_of(family: Family, model: nn.Module) -> list[list[str]]:
    """Return a family's stages of a model, checked.

    Raises:
        CalibrationError: If they are not lists of names of the model's modules.
    """
    stages = family.stages(model)
    if not stages or not all(isinstance(stage, list | tuple) and stage for stage in stages):
        raise CalibrationError(
            f"{option('family', family.name)}: stages returned {stages!r}, but must return one "
            "list of names for each stage, [[block, ...], ...]"
        )
    modules = [name for name, _ in model.named_modules()]
    for block in (block for stage in stages for block in stage):
        if block not in modules:
            raise CalibrationError(
                f"{option('family', family.name)}: {type(model).__name__} has no block {block!r}, "
                "or it is named twice"
            )
        modules.remove(block)
    return stages


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context in which a model is in evaluation mode. Its modules' modes are restored."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


class ForwardStopped(Exception):
    """Ends a forward pass that is only needed up to a block. `stoppable` catches it."""


@contextmanager
def stoppable(*hooks: Any) -> Iterator[None]:
    """Context in which a hook may end a forward pass by raising `ForwardStopped`.

    Args:
        *hooks: Handles of hooks, which are removed after the pass.
    """
    try:
        with suppress(ForwardStopped):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Run a model on a batch: keyword arguments, a tuple of arguments or one tensor.

    Tensors are copied, because the same batch runs many times and a model may write into its
    inputs. Images and sounds get the dtype of the model's parameters, since processors return
    float32 and not every model casts them. They are passed by position to a model that has another
    name for them, such as open_clip's.
    """
    if isinstance(inputs, Mapping) and (media := [name for name in _MEDIA if name in inputs]):
        dtype = next(model.parameters()).dtype
        inputs = {**inputs, **{name: inputs[name].to(dtype) for name in media}}
        parameters = inspect.signature(model.forward).parameters.values()
        is_named = any(p.name in media or p.kind is p.VAR_KEYWORD for p in parameters)
        inputs = inputs if is_named else inputs[media[0]]
    if isinstance(inputs, Mapping):
        return model(**{name: _copied(value) for name, value in inputs.items()})
    return model(*map(_copied, inputs if isinstance(inputs, tuple) else (inputs,)))


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def captured(model: nn.Module, inputs: Any, block: str) -> Call:
    """Run a model's forward pass up to a block and return the block's input.

    A cache of keys and values is removed from the arguments, since a block runs many times.
    """
    calls: list[Call] = []

    def capture(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(call_of(args, kwargs))
        raise ForwardStopped

    hook = model.get_submodule(block).register_forward_pre_hook(capture, with_kwargs=True)
    with stoppable(hook):
        call_model(model, inputs)
    return calls[0]


def call_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """Return the arguments of a block, without caches."""
    kwargs = {key: without_cache(value, key) for key, value in kwargs.items()}
    hidden, *arguments = args or (kwargs.pop(HIDDEN),)
    return Call(hidden, tuple(map(without_cache, arguments)), kwargs)


def without_cache(value: Any, name: str = "") -> Any:
    """Return an argument of a model or block, or a replacement that switches caches off.

    A cache is identified by the name of its type, because releases have named it `cache`,
    `past_key_values`, `past_key_value` and `layer_past`, and not all types are `Cache`s (LFM2).
    """
    if name == "use_cache":
        return False
    return None if type(value).__name__.endswith("Cache") else value


def run_block(model: nn.Module, block: str, call: Call) -> Any:
    """Run one block and return its output. Its input is copied, as some blocks write into it."""
    return model.get_submodule(block)(call.hidden.clone(), *call.args, **call.kwargs)


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
        raise TypeError(f"a block returned {type(output).__name__} instead of hidden features")
    return output


def mask_named(inputs: Any, name: str | None) -> Tensor | None:
    """Return a mask by its name in a model's inputs, `[batch, positions]`, or None if missing.

    Raises:
        CalibrationError: If it exists but does not identify padding position by position.
    """
    mask = inputs.get(name) if isinstance(inputs, Mapping) else None
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise CalibrationError(
            f"the input {name!r} is {shape}, but a padding mask must have the shape [batch, "
            "positions]"
        )
    return mask


def labelled_rows(inputs: Any, *, needed: bool) -> Tensor | None:
    """Return a mask of the positions with a label, `[batch, positions]`, or None without labels.

    Raises:
        CalibrationError: If they are missing and needed, for `decoder_rows=targets`.
    """
    labels = mask_named(inputs, "labels")
    if labels is None and needed:
        raise CalibrationError(
            f"{option('decoder_rows', 'targets')} needs labels, but the inputs are "
            f"{names_of(inputs)}. Give labels, or use {option('decoder_rows', 'all')}"
        )
    return None if labels is None else (labels != NO_TARGET).long()


def names_of(inputs: Any) -> Any:
    """Return the names in a model's inputs, for messages."""
    return sorted(inputs) if isinstance(inputs, Mapping) else type(inputs).__name__
