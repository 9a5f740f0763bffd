"""Models whose blocks are in one list and exchange only hidden features."""

import copy
import re
from collections.abc import Collection, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.words import option
from fusion_bench_featcal.families.base import (
    Call,
    Family,
    Masks,
    call_model,
    hidden_output,
    labelled_rows,
    mask_named,
    stop_forward,
    stoppable,
    without_cache,
)
from fusion_bench_featcal.families.skipping import Passed, skipping

_CLEARLY = 10
"""Size ratio to all other lists above which a list counts as the model's blocks."""


@dataclass(frozen=True)
class StackCall:
    """Input of the next block, with the other arguments of every block.

    These are rotary angles, positions and masks (two in models with sliding windows). They depend
    on the inputs alone, so the model's forward pass computes them once, before any block runs.

    Attributes:
        hidden: Hidden features, `[batch, positions, d]`.
        args: Block -> its positional arguments after the hidden features.
        kwargs: Block -> its keyword arguments.
    """

    hidden: Tensor
    args: Mapping[str, tuple[Any, ...]]
    kwargs: Mapping[str, Mapping[str, Any]]


class Stack(Family):
    """Blocks in one list, each called once, in order, on the previous block's hidden features."""

    name = "stack"

    def __init__(
        self,
        pattern: str | Sequence[str] | None = None,
        *,
        name: str | None = None,
        compared: bool = True,
    ) -> None:
        """Set how the blocks are found.

        Args:
            pattern: Regular expression of a block's full name, or all names in forward order. None
                finds the outermost list of modules of one class that is ten times as large as all
                others.
            name: As `Family`.
            compared: As `Family`.
        """
        self.pattern, self.name, self.compared = pattern, name or self.name, compared

    def stages(self, model: nn.Module) -> list[list[str]]:
        """Return the blocks in forward order, as one stage.

        Raises:
            CalibrationError: If there are none.
        """
        pattern, lacks = self.pattern, f"module named {self.pattern}"
        if pattern is None:
            lacks = "list of modules of one class that clearly holds them"
            blocks = find_stack(model)
        elif isinstance(pattern, str):
            blocks = [name for name, _ in model.named_modules() if re.fullmatch(pattern, name)]
        else:
            blocks = [*pattern]
        if not blocks:
            raise CalibrationError(
                f"{option('family', self.name)} finds no blocks in {type(model).__name__}: it has "
                f"no {lacks}. Choose another family, or write one (docs/models.md)"
            )
        return [blocks]

    def begin(self, model: nn.Module, inputs: Any, block: str, ended: Any = None) -> StackCall:
        """Run the model's forward pass with all blocks skipped, and record their arguments.

        Caches are switched off: a block runs many times on the same positions.

        Raises:
            CalibrationError: If blocks are not called once each, in order, or without padding.
        """
        (blocks,) = self.stages(model)
        if isinstance(inputs, Mapping):  # labels are for the head, which the pass does not reach
            inputs = {key: without_cache(v, key) for key, v in inputs.items() if key != "labels"}
        calls: dict[str, Call] = {}

        def note(name: str, call: Call) -> Tensor:
            calls[name] = call
            if name == blocks[-1]:
                raise stop_forward()
            return call.hidden.as_subclass(Passed)

        with skipping(model, blocks, note), stoppable():
            call_model(model, inputs)
        if list(calls) != blocks:
            raise CalibrationError(
                f"{option('family', self.name)}: {type(model).__name__} runs {list(calls)}, not "
                f"each of {blocks} once, in this order: name blocks that run, or another family"
            )
        hidden, mask = calls[block].hidden, mask_named(inputs, "attention_mask")
        if mask is not None and hidden.shape[:-1] != mask.shape:
            raise CalibrationError(
                f"block {block} of {type(model).__name__} receives features {tuple(hidden.shape)}, "
                f"which do not fit its attention_mask {tuple(mask.shape)}: "
                f"{_cause_of_positions(hidden, mask)}"
            )
        args = {name: call.args for name, call in calls.items()}
        return StackCall(hidden, args, {name: call.kwargs for name, call in calls.items()})

    def step(self, model: nn.Module, block: str, call: StackCall) -> StackCall:
        """Call the block on its stored arguments, which are used again.

        If a block writes into a list or mapping among its arguments (Gemma-3n's keys and values),
        it writes into a copy, so that later blocks do not depend on it.
        """
        args = tuple(map(_shallow_copy, call.args[block]))
        kwargs = {key: _shallow_copy(value) for key, value in call.kwargs[block].items()}
        output = model.get_submodule(block)(call.hidden.clone(), *args, **kwargs)
        return replace(call, hidden=hidden_output(output))

    def masks(self, model: nn.Module, inputs: Any, stage: int, decoder_rows: str) -> Masks:
        """Return a mask of all positions but padding, or of the positions before each label.

        Only a model whose labels are next tokens has the second.

        Raises:
            CalibrationError: If `decoder_rows` is `targets` and there are no labels.
        """
        mask = mask_named(inputs, "attention_mask")
        if decoder_rows != "targets" or not predicts_next(model):
            return {"": mask}
        labelled: Any = labelled_rows(inputs, needed=True)
        ids = inputs.get("input_ids")
        if isinstance(ids, Tensor) and ids.shape != labelled.shape:
            raise CalibrationError(
                f"labels have the shape {tuple(labelled.shape)}, and input_ids {tuple(ids.shape)}: "
                "give a label for each token, -100 where there is none"
            )
        predicts = torch.zeros_like(labelled)
        predicts[:, :-1] = labelled[:, 1:]
        return {"": predicts if mask is None else predicts * (mask > 0)}

    def reads_first(self, model: nn.Module, inputs: Any) -> bool:
        """Return whether the output stays the same if all other positions change their signs.

        The output is the logits, or the pooled output of images without a head. Texts have pooled
        outputs too, but often other embeddings.
        """
        if type(model).__name__ in _classes("CAUSAL_LM"):
            return False  # known without running a model that may be large

        def change(_: nn.Module, __: Any, output: Any) -> Any:
            hidden = hidden_output(output).clone()
            hidden[:, 1:] *= -1
            return hidden if isinstance(output, Tensor) else (hidden, *output[1:])

        is_image = False
        if isinstance(inputs, Mapping):
            inputs = {name: value for name, value in inputs.items() if name != "labels"}
            is_image = "pixel_values" in inputs

        def scored() -> Any:
            output = call_model(model, inputs)
            pooled = getattr(output, "pooler_output", None) if is_image else None
            return getattr(output, "logits", pooled)

        result, last = scored(), model.get_submodule(self.stages(model)[0][-1])
        with stoppable(last.register_forward_hook(change)):
            changed = scored()
        return isinstance(result, Tensor) and torch.equal(result, changed)


class ImageTower(Stack):
    """A stack without padding. With a class token, the head reads nothing else."""

    def masks(self, model: nn.Module, inputs: Any, stage: int, decoder_rows: str) -> Masks:
        """Return no mask, because all positions count."""
        return {}

    def reads_first(self, model: nn.Module, inputs: Any) -> bool:
        """Return whether the model has a class token."""
        return any(name.endswith("class_embedding") for name, _ in model.named_parameters())


class EveryPosition(Stack):
    """A stack whose head, outside of the model, reads more than the first position."""

    def reads_first(self, model: nn.Module, inputs: Any) -> bool:
        """Return False: all positions of the last block's output count."""
        return False


STACK = Stack()
# Up to transformers 5.5 the tower of a CLIPVisionModel has a prefix. A causal model has one too.
CLIP = ImageTower(r"(vision_model\.)*encoder\.layers\.\d+", name="clip", compared=False)
LLAMA = Stack(r"(model\.)?layers\.\d+", name="llama", compared=False)


def find_stack(model: nn.Module) -> list[str]:
    """Return names of a model's blocks, or nothing if no list of modules clearly dominates.

    This is the outermost list of several modules of one class, if it has ten times the parameters
    of all other such lists together. Two towers, or an encoder and a decoder, have no such list.

    Args:
        model: The model. It may be on the meta device.
    """
    sizes: dict[str, int] = {}
    for name, module in model.named_modules():
        kinds = [type(child) for child in module.children()]
        inside = any(name.startswith(f"{outer}.") for outer in sizes)
        alike = len(kinds) > 1 and len(set(kinds)) == 1 and kinds[0] is not nn.ModuleList
        if isinstance(module, nn.ModuleList | nn.Sequential) and name and alike and not inside:
            sizes[name] = sum(p.numel() for p in module.parameters())
    largest = max(sizes, key=lambda name: sizes[name], default="")
    if not sizes.get(largest) or _CLEARLY * (sum(sizes.values()) - sizes[largest]) > sizes[largest]:
        return []
    return [f"{largest}.{name}" for name, _ in model.get_submodule(largest).named_children()]


def predicts_next(model: nn.Module) -> bool:
    """Return whether a model's labels, one per position, are the next tokens."""
    kind = type(model).__name__
    classifies = kind.endswith(("Classification", "QuestionAnswering"))
    return kind in _classes("CAUSAL_LM") or not (classifies or kind in _classes("MASKED_LM"))


def _classes(purpose: str) -> Collection[str]:
    """Return names of the classes of transformers for a purpose."""
    from transformers.models.auto import modeling_auto

    return getattr(modeling_auto, f"MODEL_FOR_{purpose}_MAPPING_NAMES").values()


def _shallow_copy(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, MutableMapping | MutableSequence) else value


def _cause_of_positions(hidden: Tensor, mask: Tensor) -> str:
    """Return why features have other positions than a mask, and what helps."""
    if hidden.ndim == 2 or len(hidden) == 1 < len(mask):
        return "the model may remove padding. Load it with attn_implementation=sdpa"
    return (
        "it pads or shortens texts, or exchanges dimensions, so that padding is not known there. "
        "Such a model cannot be calibrated"
    )
