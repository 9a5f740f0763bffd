"""Models whose blocks are in lists and exchange only hidden features."""

import copy
import re
from collections.abc import Collection, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.words import option
from fusion_bench_featcal.families.base import (
    Call,
    Family,
    ForwardStopped,
    Masks,
    call_model,
    hidden_output,
    labelled_rows,
    mask_named,
    stoppable,
    without_cache,
)
from fusion_bench_featcal.families.lists import find_stages
from fusion_bench_featcal.families.skipping import as_skipped_output, skipping


@dataclass(frozen=True)
class StackCall:
    """Input of the next block, with the other arguments of every block of its stage.

    The other arguments are rotary angles, positions and masks (two masks in models with sliding
    windows). They depend only on the inputs and on earlier stages, so one forward pass computes
    them before any block runs.

    Attributes:
        hidden: Hidden features, `[batch, positions, d]`.
        args: Block -> its positional arguments after the hidden features.
        kwargs: Block -> its keyword arguments.
        added: Block -> what the model adds to its hidden features (Qwen3-VL: those of images).
        outputs: Last block of each earlier stage -> its output, for the stages that follow.
    """

    hidden: Tensor
    args: Mapping[str, tuple[Any, ...]]
    kwargs: Mapping[str, Mapping[str, Any]]
    added: Mapping[str, Tensor] = field(default_factory=dict)
    outputs: Mapping[str, Tensor] = field(default_factory=dict)


class Stack(Family):
    """Blocks in lists, each called once, in order, on the previous block's hidden features.

    Each list is a stage. It begins with a run of the model in which the blocks of earlier stages
    return what they have computed, and its own are skipped while their arguments are noted.

    Attributes:
        entries: Number of entries of a block's output, where the model unpacks it.
        optional: Number of first stages that some inputs do not run.
    """

    name, entries, optional = "stack", 2, 0

    def __init__(
        self,
        pattern: str | Sequence[str] | None = None,
        *,
        name: str | None = None,
        compared: bool = True,
        tail: Sequence[str] = (),
    ) -> None:
        """Set how the blocks are found.

        Args:
            pattern: Regular expression of a block's full name, or all names in forward order. None
                finds them (`lists.find_stages`).
            name: As `Family`.
            compared: As `Family`.
            tail: As `Family`. Each of these modules is a stage, because other weights may lie
                between them, such as those of a norm. They may be anywhere in the model.
        """
        self.pattern, self.name, self.compared = pattern, name or self.name, compared
        self.tail = [*tail]

    def stages(self, model: nn.Module) -> list[list[str]]:
        """Return the blocks in forward order, and a stage for each module after them.

        Raises:
            CalibrationError: If there are no blocks.
        """
        pattern, lacks = self.pattern, f"module named {self.pattern}"
        if pattern is None:
            lacks = "list of modules that clearly holds them"
            stages = find_stages(model)
        elif isinstance(pattern, str):
            stages = [[name for name, _ in model.named_modules() if re.fullmatch(pattern, name)]]
        else:
            stages = [[*pattern]]
        if not stages or not all(stages):
            raise CalibrationError(
                f"{option('family', self.name)} finds no blocks in {type(model).__name__}: it has "
                f"no {lacks}. Choose another family, or write one (docs/howto/own-family.md)"
            )
        return [*stages, *([name] for name in self.tail)]

    def begin(self, model: nn.Module, inputs: Any, block: str, ended: Any = None) -> Any:
        """Run the model's forward pass without its blocks, and record the arguments of a stage.

        Caches are switched off, because a block runs many times on the same positions. The result
        is None if the inputs skip an optional stage.

        Raises:
            CalibrationError: If blocks are not called once each, in order, or without padding.
        """
        stages = self.stages(model)
        index = next(number for number, stage in enumerate(stages) if block in stage)
        outputs = {} if ended is None else {**ended.outputs, [*ended.args][-1]: ended.hidden}
        calls, added = self._calls(model, self.model_inputs(inputs), stages, index, outputs)
        if not calls and index < self.optional:
            return None
        if list(calls) != stages[index]:
            raise CalibrationError(
                f"{option('family', self.name)}: {type(model).__name__} runs {list(calls)}, not "
                f"each of {stages[index]} once, in this order. Name blocks that run, or choose "
                "another family"
            )
        hidden, mask = calls[block].hidden, self.masks(model, inputs, index, "all").get("")
        if mask is not None and hidden.shape[:-1] != mask.shape:
            raise CalibrationError(
                f"block {block} of {type(model).__name__} receives features {tuple(hidden.shape)}, "
                f"which do not fit its padding mask {tuple(mask.shape)}: "
                f"{_cause_of_positions(hidden, mask)}"
            )
        args = {name: call.args for name, call in calls.items()}
        kwargs = {name: call.kwargs for name, call in calls.items()}
        return StackCall(hidden, args, kwargs, added, {} if stages[index + 1 :] == [] else outputs)

    def _calls(
        self,
        model: nn.Module,
        inputs: Any,
        stages: Sequence[Sequence[str]],
        index: int,
        outputs: Mapping[str, Tensor],
    ) -> tuple[dict[str, Call], dict[str, Tensor]]:
        """Return the calls of a stage's blocks, and what the model adds to the features of each.

        No block runs. Blocks of earlier stages return their stored outputs, or their inputs.
        """
        before, blocks = [name for stage in stages[:index] for name in stage], stages[index]
        after = [stage[0] for stage in stages[index + 1 :]] if index < self.optional else []
        calls, added, hidden = dict[str, Call](), dict[str, Tensor](), None

        def output(name: str, call: Call) -> Tensor:
            nonlocal hidden
            if name in before:
                features = outputs.get(name, call.hidden).clone()
                is_leaf = not list(model.get_submodule(name).children())
                return features if is_leaf else as_skipped_output(features, self.entries)
            if name in after:  # the inputs do not run the stage
                raise ForwardStopped
            if hidden is not None and _differ(call.hidden, hidden):
                added[name] = call.hidden - hidden
            calls[name], hidden = call, call.hidden
            if name == blocks[-1]:
                raise ForwardStopped
            return as_skipped_output(call.hidden, self.entries)

        with skipping(model, [*before, *blocks, *after], output), stoppable():
            call_model(model, inputs)
        return calls, added

    def model_inputs(self, inputs: Any) -> Any:
        """Return the inputs of the pass without caches, and without labels (no head runs)."""
        if not isinstance(inputs, Mapping):
            return inputs
        return {key: without_cache(v, key) for key, v in inputs.items() if key != "labels"}

    def step(self, model: nn.Module, block: str, call: StackCall) -> StackCall:
        """Call the block on its stored arguments, which are used again."""
        return replace(call, hidden=hidden_output(self.output_of(model, block, call)))

    def output_of(self, model: nn.Module, block: str, call: StackCall, **more: Any) -> Any:
        """Return all that a block returns, given further keyword arguments.

        If a block writes into a list or mapping among its arguments (Gemma-3n's keys and values),
        it writes into a copy, so that later blocks do not depend on it.
        """
        args = tuple(map(_shallow_copy, call.args[block]))
        kwargs = {key: _shallow_copy(value) for key, value in call.kwargs[block].items()}
        added = call.added.get(block)
        hidden = call.hidden.clone() if added is None else call.hidden + added
        return model.get_submodule(block)(hidden, *args, **kwargs | more)

    def masks(self, model: nn.Module, inputs: Any, stage: int, decoder_rows: str) -> Masks:
        """Return a mask of all positions except padding, or of the positions before each label.

        The second mask exists only for models whose labels are the next tokens.

        Raises:
            CalibrationError: If `decoder_rows` is `targets` and there are no labels.
        """
        is_text = isinstance(inputs, Mapping) and "input_ids" in inputs
        mask = mask_named(inputs, "attention_mask")
        if mask is None and not is_text:  # images of unequal size, as patches (SigLIP 2)
            mask = mask_named(inputs, "pixel_attention_mask")
        if decoder_rows != "targets" or not predicts_next(model):
            return {"": mask}
        labelled: Any = labelled_rows(inputs, needed=True)
        ids = inputs.get("input_ids")
        if isinstance(ids, Tensor) and ids.shape != labelled.shape:
            raise CalibrationError(
                f"labels have the shape {tuple(labelled.shape)}, but input_ids {tuple(ids.shape)}: "
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

        inputs = self.model_inputs(inputs)
        is_image = isinstance(inputs, Mapping) and "pixel_values" in inputs

        def scored() -> Any:
            output = call_model(model, inputs)
            pooled = getattr(output, "pooler_output", None) if is_image else None
            return getattr(output, "logits", pooled)

        last_block = self.stages(model)[-1 - len(self.tail)][-1]
        result, last = scored(), model.get_submodule(last_block)
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
    """A stack whose head, in or outside of the model, reads more than the first position."""

    def reads_first(self, model: nn.Module, inputs: Any) -> bool:
        """Return False: all positions of the last block's output count."""
        return False


STACK = Stack()
# Up to transformers 5.5 the tower of a CLIPVisionModel has a prefix. A causal model has one too.
CLIP = ImageTower(r"(vision_model\.)*encoder\.layers\.\d+", name="clip", compared=False)
LLAMA = Stack(r"(model\.)?layers\.\d+", name="llama", compared=False)


def predicts_next(model: nn.Module) -> bool:
    """Return whether a model's labels, one per position, are the next tokens."""
    kind = type(model).__name__
    classifies = kind.endswith(("Classification", "QuestionAnswering"))
    return kind in _classes("CAUSAL_LM") or not (classifies or kind in _classes("MASKED_LM"))


def _classes(purpose: str) -> Collection[str]:
    """Return names of the classes of transformers for a purpose."""
    from transformers.models.auto import modeling_auto

    return getattr(modeling_auto, f"MODEL_FOR_{purpose}_MAPPING_NAMES").values()


def _differ(new: Tensor, old: Tensor) -> bool:
    """Return whether features of equal shape differ in value. A view never differs."""
    return new.data_ptr() != old.data_ptr() and new.shape == old.shape and not torch.equal(new, old)


def _shallow_copy(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, MutableMapping | MutableSequence) else value


def _cause_of_positions(hidden: Tensor, mask: Tensor) -> str:
    """Return the reason why features and mask have different positions, with advice."""
    if hidden.ndim == 2 or len(hidden) == 1 < len(mask):
        return "the model may remove padding. Load it with attn_implementation=sdpa"
    return (
        "it pads or shortens texts, or swaps dimensions, so that its padded positions are unknown. "
        "Such a model cannot be calibrated"
    )
