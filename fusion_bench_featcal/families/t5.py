"""Encoder-decoder models in transformers: T5 (FLAN-T5, mT5, UMT5) and Whisper."""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.words import option
from fusion_bench_featcal.families.base import (
    Call,
    Family,
    Masks,
    captured,
    hidden_output,
    labelled_rows,
    mask_named,
    names_of,
    run_block,
)

BIAS, ATTENTION_MASK = "position_bias", "attention_mask"
"""Arguments of T5's blocks."""

_DECODER_INPUTS = ("labels", "decoder_input_ids", "decoder_inputs_embeds")


@dataclass(frozen=True)
class T5Call(Call):
    """Input of the next block.

    Attributes:
        bias: Position bias of the stage, `[1, heads, positions, positions]`. None before its first
            block has run, and if every block has its bias.
        adds_mask: Whether blocks expect the mask inside the bias, as in transformers 4.57. That
            bias is different for each sample and too large to keep, so it is built for each block.
    """

    bias: Tensor | None = None
    adds_mask: bool = False


class EncoderDecoder(Family):
    """The encoder's blocks, then the decoder's, which begin after the encoder is calibrated.

    The first block of T5 and mT5 computes the relative position bias of its stage, and the family
    passes it to the later ones. In UMT5 every block computes one, Whisper has none.
    """

    compared = False

    def __init__(
        self, name: str, block: str, norm: str, encoded: Sequence[str], mask: str | None = None
    ) -> None:
        """Set names in the model.

        Args:
            name: The family's name.
            block: Regular expression of a block's full name.
            norm: Last norm of the encoder, by its name there.
            encoded: Ends of the decoder's modules that receive the encoder's output.
            mask: Input that marks padding in the encoder, or None if all its positions count.
        """
        self.name, self.block, self.norm, self.encoded, self.mask = name, block, norm, encoded, mask

    def stages(self, model: nn.Module) -> list[list[str]]:
        """Return the blocks of the encoder, then of the decoder.

        Raises:
            CalibrationError: If the model lacks one of the two.
        """
        names = [name for name, _ in model.named_modules() if re.fullmatch(self.block, name)]
        stages = [[name for name in names if f"{part}." in name] for part in ("encoder", "decoder")]
        if not all(stages):
            raise CalibrationError(
                f"{option('family', self.name)} finds no blocks in {type(model).__name__}: it has "
                f"no modules of encoder and decoder named {self.block}. Choose another family"
            )
        return stages

    def begin(self, model: nn.Module, inputs: Any, block: str, ended: Any = None) -> T5Call:
        """Run the model's forward pass up to a stage's first block.

        Raises:
            CalibrationError: If the inputs do not determine the decoder's inputs.
        """
        if not isinstance(inputs, Mapping) or all(inputs.get(n) is None for n in _DECODER_INPUTS):
            raise CalibrationError(
                "an encoder-decoder model needs labels, or decoder_input_ids with their "
                f"decoder_attention_mask, in its calibration inputs; they are {names_of(inputs)}"
            )
        if ended is not None:
            from transformers.modeling_outputs import BaseModelOutput

            encoder = self.stages(model)[0][0].rsplit(".", 2)[0]
            norm = model.get_submodule(f"{encoder}.{self.norm}")
            inputs = {**inputs, "encoder_outputs": BaseModelOutput(norm(ended.hidden.clone()))}
        call = captured(model, inputs, block)
        names = list(inspect.signature(model.get_submodule(block).forward).parameters)
        named = dict(zip(names[1:], call.args, strict=False))
        return T5Call(call.hidden, kwargs=named | dict(call.kwargs))

    def step(self, model: nn.Module, block: str, call: T5Call) -> T5Call:
        """Run one block. A stage's first block passes on the position bias, if blocks share it."""
        kwargs, bias = dict(call.kwargs), call.bias
        if bias is not None:
            kwargs[BIAS] = bias + kwargs[ATTENTION_MASK] if call.adds_mask else bias
        output = run_block(model, block, replace(call, kwargs=kwargs))
        after = replace(call, hidden=hidden_output(output))
        if bias is not None or BIAS not in kwargs:
            return after
        bias = output[1]
        if len(bias) == 1:
            return replace(after, bias=bias)
        return replace(after, bias=t5_bias(model.get_submodule(block), bias), adds_mask=True)

    def masks(self, model: nn.Module, inputs: Any, stage: int, decoder_rows: str) -> Masks:
        """Return a mask of the stage's positions except padding, or of the decoder's targets.

        Keys and values of the decoder's cross-attention have the encoder's positions.

        Raises:
            CalibrationError: If `decoder_rows` is `targets` and there are no labels.
        """
        padding = mask_named(inputs, self.mask)
        if stage == 0:
            return {"": padding}
        mask = mask_named(inputs, "decoder_attention_mask")
        targets = labelled_rows(inputs, needed=decoder_rows == "targets")
        decoder = targets if mask is None or decoder_rows == "targets" else mask
        return {"": decoder} | dict.fromkeys(self.encoded, padding)


T5 = EncoderDecoder(
    "t5",
    r"(encoder|decoder)\.block\.\d+",
    "final_layer_norm",
    ("EncDecAttention.k", "EncDecAttention.v"),
    "attention_mask",
)
WHISPER = EncoderDecoder(  # it attends to all of a recording, including silence that was padded
    "whisper",
    r"(model\.)?(encoder|decoder)\.layers\.\d+",
    "layer_norm",
    ("encoder_attn.k_proj", "encoder_attn.v_proj"),
)
"""Embeddings, position biases, RMS norms, convolutions and heads keep their merged weights."""


def t5_bias(block: Any, bias: Tensor) -> Tensor:
    """Return the position bias of a T5 block without the mask, in the shape of `bias`."""
    attention = block.layer[0].SelfAttention
    return attention.compute_bias(*bias.shape[-2:], device=bias.device)
