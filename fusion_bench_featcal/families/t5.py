"""T5's encoder-decoder models in transformers (FLAN-T5, mT5, UMT5)."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.families.base import Family, capture_call, hidden_output, two_stages
from fusion_bench_featcal.families.rows import (
    labelled_rows,
    mask_named,
    missing_labels,
    names_of,
)
from fusion_bench_featcal.families.transformers_names import (
    ENCODED,
    T5_BIAS,
    T5_BLOCK,
    T5_ENCODER_NORM,
    T5_KEYS_AND_VALUES,
    T5_MASK,
    t5_bias,
)

MODEL_TYPES = ("t5", "mt5", "umt5")
"""Model types with this structure. Tests run each of them."""

_DECODER_INPUTS = ("labels", "decoder_input_ids", "decoder_inputs_embeds")


@dataclass(frozen=True)
class T5Call:
    """Input of the next block.

    Attributes:
        hidden: Hidden features, `[batch, positions, d]`.
        kwargs: Arguments common to all blocks of a stage.
        bias: Position bias of the stage, `[1, heads, positions, positions]`. None before its first
            block has run, and if every block has its bias.
        adds_mask: Whether blocks expect the mask inside the bias, as in transformers 4.57. That
            bias is different for each sample and too large to keep, so it is built for each block.
    """

    hidden: Tensor
    kwargs: Mapping[str, Any]
    bias: Tensor | None = None
    adds_mask: bool = False


@dataclass(frozen=True)
class T5Family(Family):
    """The encoder's blocks, then the decoder's, which begin after the encoder is calibrated.

    The first block of T5 and mT5 computes the relative position bias of its stage, and the family
    passes it to the later ones. In UMT5 every block computes one.
    """

    name: str = "t5"
    hands_on: bool = True

    def stages(self, model: nn.Module) -> list[list[str]]:
        """Return the blocks of the encoder, then of the decoder.

        Raises:
            CalibrationError: If the model lacks one of the two.
        """
        lists = ("encoder.block", "decoder.block")
        return two_stages(model, T5_BLOCK, lists, "T5ForConditionalGeneration")

    def ending(self, model: nn.Module, call: T5Call) -> Tensor:
        """Return the encoder's output, from the output of its last block."""
        return model.get_submodule(T5_ENCODER_NORM)(call.hidden.clone())

    def begin(self, model: nn.Module, inputs: Any, first_block: str, *ending: Tensor) -> T5Call:
        """Run the model's forward pass up to a stage's first block.

        Args:
            model: The model.
            inputs: Its inputs.
            first_block: The block.
            *ending: The encoder's output. Without it the encoder runs.

        Raises:
            CalibrationError: If the inputs do not determine the decoder's inputs.
        """
        if not isinstance(inputs, Mapping) or all(inputs.get(n) is None for n in _DECODER_INPUTS):
            raise CalibrationError(
                "an encoder-decoder model needs labels, or decoder_input_ids with their "
                f"decoder_attention_mask, in its calibration inputs; they are {names_of(inputs)}"
            )
        if ending:
            from transformers.modeling_outputs import BaseModelOutput

            output: Any = ending[0]  # the class annotates this with another type
            inputs = {**inputs, ENCODED: BaseModelOutput(last_hidden_state=output)}
        call = capture_call(model, inputs, first_block)
        names = list(inspect.signature(model.get_submodule(first_block).forward).parameters)
        named = dict(zip(names[1:], call.args, strict=False))
        return T5Call(call.hidden, named | dict(call.kwargs))

    def step(self, model: nn.Module, block: str, call: T5Call) -> tuple[Tensor, T5Call]:
        """Run one block. A stage's first block passes on the position bias, if blocks share it."""
        module: Any = model.get_submodule(block)
        kwargs, bias = dict(call.kwargs), call.bias
        if bias is not None:
            kwargs[T5_BIAS] = bias + kwargs[T5_MASK] if call.adds_mask else bias
        output = module(call.hidden.clone(), **kwargs)
        hidden = hidden_output(output)
        if bias is not None or T5_BIAS not in kwargs:
            return hidden, replace(call, hidden=hidden)
        bias = output[1]
        if len(bias) == 1:
            return hidden, replace(call, hidden=hidden, bias=bias)
        return hidden, replace(call, hidden=hidden, bias=t5_bias(module, bias), adds_mask=True)

    def row_weights(self, inputs: Any, stage_index: int, decoder_rows: str) -> Tensor | None:
        """Return a mask of the stage's positions except padding, or of the decoder's targets.

        Raises:
            CalibrationError: If targets are requested without labels.
        """
        if stage_index == 0:
            return mask_named(inputs, "attention_mask")
        mask, targets = mask_named(inputs, "decoder_attention_mask"), labelled_rows(inputs)
        if decoder_rows == "targets" and targets is None:
            raise missing_labels(inputs)
        return targets if mask is None or decoder_rows == "targets" else mask

    def other_rows(self, inputs: Any, stage_index: int) -> Mapping[str, Tensor | None]:
        """Return the encoder's rows for keys and values of the decoder's cross-attention."""
        if stage_index == 0:
            return {}
        return dict.fromkeys(T5_KEYS_AND_VALUES, mask_named(inputs, "attention_mask"))


T5 = T5Family()
"""RMS norms are not calibrated, and embeddings, position biases and the head are outside the
blocks: all keep their merged weights."""
