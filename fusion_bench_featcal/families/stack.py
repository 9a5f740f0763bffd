"""Models whose blocks are in one list and exchange only hidden features."""

import copy
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, MutableSequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.families.base import (
    Family,
    call_model,
    hidden_output,
    stop_forward,
    stoppable,
)
from fusion_bench_featcal.families.rows import causal_rows, mask_named
from fusion_bench_featcal.families.structure import find_stack, no_stack
from fusion_bench_featcal.families.transformers_names import HIDDEN, without_cache


@dataclass(frozen=True)
class StackCall:
    """Input of the next block: hidden features, and the other arguments of every block.

    Attributes:
        hidden: `[batch, positions, d]`.
        kwargs: Block name -> keyword arguments: rotary angles, positions, and that block's mask
            (models with sliding windows alternate between two masks). They depend on the inputs
            alone, so the model's forward pass computes them once, before any block runs.
        args: Block name -> positional arguments after the hidden features.
    """

    hidden: Tensor
    kwargs: Mapping[str, Mapping[str, Any]]
    args: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class StackFamily(Family):
    """Blocks in one list, each called once, in order, on the previous block's hidden features.

    The list is found by the model's structure, not by its name. The structure does not show
    whether a block receives anything else from earlier ones, so calibration compares the steps with
    the model's forward pass on the first samples.

    Attributes:
        name: The family's name.
        causal: Whether labels of `[batch, positions]` are next tokens, so that
            `method.decoder_rows=targets` selects the positions before them.
        compared: As `Family`.
        reads_first: Whether the model's head reads only each sample's first position of the last
            block's output: a class token.
    """

    name: str = "stack"
    causal: bool = True
    compared: bool = True
    reads_first: bool = False

    def fitted(self, model: nn.Module) -> "StackFamily":
        """Return the family with the options that a model's structure determines."""
        self.stages(model)
        return replace(self, causal=_predicts_next(model))

    def stages(self, model: nn.Module) -> list[list[str]]:
        """Return the blocks in forward order, as one stage.

        Raises:
            CalibrationError: If the model has no single list of blocks.
        """
        stack = find_stack(model)
        if stack is None:
            raise no_stack(model, self.name)
        return [[f"{stack}.{name}" for name, _ in model.get_submodule(stack).named_children()]]

    def begin(self, model: nn.Module, inputs: Any, first_block: str, *ending: Any) -> StackCall:
        """Run the model's forward pass with all blocks skipped, and record their arguments.

        Caches are switched off: a block runs many times on the same positions.

        Raises:
            CalibrationError: If blocks are not called once each, in order.
        """
        (blocks,) = self.stages(model)
        call = noted_call(model, blocks, inputs)
        _refuse_other_positions(model, blocks[0], call.hidden, inputs)
        return call

    def step(self, model: nn.Module, block: str, call: StackCall) -> tuple[Tensor, StackCall]:
        """Call the block on its stored arguments, which are used again.

        If a block writes into a list or mapping among its arguments (Gemma-3n's keys and values),
        it writes into a copy, so that later blocks do not depend on it.
        """
        args = tuple(map(_shallow_copy, call.args[block]))
        kwargs = {key: _shallow_copy(value) for key, value in call.kwargs[block].items()}
        hidden = hidden_output(model.get_submodule(block)(call.hidden.clone(), *args, **kwargs))
        return hidden, replace(call, hidden=hidden)

    def row_weights(self, inputs: Any, stage_index: int, decoder_rows: str) -> Tensor | None:
        """Return a mask of all positions except padding, or of positions that predict a label."""
        if self.causal:
            return causal_rows(inputs, decoder_rows)
        return mask_named(inputs, "attention_mask")

    def closing_rows(self, model: nn.Module, hidden: Tensor) -> Tensor | None:
        """Return a mask of the class token, if the head reads nothing else."""
        if not self.reads_first:
            return None
        mask = hidden.new_zeros(hidden.shape[:-1])
        mask[:, 0] = 1
        return mask


def noted_call(model: nn.Module, blocks: list[str], inputs: Any) -> StackCall:
    """Run a model's forward pass with some blocks skipped, and return their arguments.

    Args:
        model: The model.
        blocks: Names of the blocks in forward order. The pass ends at the last one.
        inputs: The model's inputs.

    Raises:
        CalibrationError: If blocks are not called once each, in order.
    """
    if isinstance(inputs, Mapping):  # labels are for the head, which the pass does not reach
        inputs = {key: without_cache(v, key) for key, v in inputs.items() if key != "labels"}
    noted: dict[str, tuple[Any, ...]] = {}
    with _skipping(model, blocks, noted), stoppable():
        call_model(model, inputs)
    if list(noted) != blocks:
        raise CalibrationError(
            f"{type(model).__name__} runs the blocks {list(noted)}, but has {blocks}; each "
            "must run once, in this order: choose another method.family"
        )
    args = {name: args for name, (_, args, _) in noted.items()}
    kwargs = {name: kwargs for name, (*_, kwargs) in noted.items()}
    return StackCall(noted[blocks[0]][0], kwargs, args)


STACK = StackFamily()


class _Passed(Tensor):
    """Features returned by a skipped block, in any form that the model expects.

    A model takes a block's result whole, by its first or only entry, or unpacks two entries. Any
    other use is detected by the comparison with the model's forward pass.
    """

    __torch_function__: Any = torch._C._disabled_torch_function_impl  # results are plain tensors

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int):
            return self if index in (0, -1) else None
        return self.as_subclass(Tensor)[index]

    def __iter__(self) -> Any:
        return iter((self, None))

    def __len__(self) -> int:
        return 1


@contextmanager
def _skipping(
    model: nn.Module, blocks: Iterable[str], noted: dict[str, tuple[Any, ...]]
) -> Iterator[None]:
    """Context in which blocks only record their arguments. After the last block the pass ends."""
    names = list(blocks)
    modules: list[Any] = [model.get_submodule(name) for name in names]

    def note(name: str, *args: Any, **kwargs: Any) -> Tensor:
        features, *positional = args or (kwargs.pop(HIDDEN),)
        features = features.as_subclass(Tensor)
        kwargs = {key: without_cache(value, key) for key, value in kwargs.items()}
        noted[name] = features, tuple(map(without_cache, positional)), kwargs
        if name == names[-1]:
            raise stop_forward()
        return features.as_subclass(_Passed)

    replaced = [
        module.__dict__.get("forward") for module in modules
    ]  # some libraries replace it too
    try:
        for name, module in zip(names, modules, strict=True):
            module.forward = lambda *args, name=name, **kwargs: note(name, *args, **kwargs)
        yield
    finally:
        for module, forward in zip(modules, replaced, strict=True):
            del module.forward
            if forward is not None:
                module.forward = forward


def _shallow_copy(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, MutableMapping | MutableSequence) else value


def _refuse_other_positions(model: nn.Module, block: str, hidden: Tensor, inputs: Any) -> None:
    mask = mask_named(inputs, "attention_mask")
    if mask is not None and hidden.shape[:-1] != mask.shape:
        raise CalibrationError(
            f"block {block} of {type(model).__name__} receives features {tuple(hidden.shape)}, "
            f"which do not fit its attention_mask {tuple(mask.shape)}: the model may remove "
            "padding. Load it with attn_implementation=sdpa"
        )


def _predicts_next(model: nn.Module) -> bool:
    """Return whether a model's labels, one per position, are the next tokens."""
    from transformers.models.auto import modeling_auto

    kind = type(model).__name__
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    masked = modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()
    return kind in causal or not (
        kind in masked or kind.endswith(("Classification", "QuestionAnswering"))
    )
