"""Encoder-decoder models of transformers, for texts, images and sounds."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.families.base import (
    Masks,
    labelled_rows,
    mask_named,
    names_of,
    without_cache,
)
from fusion_bench_featcal.families.stack import EveryPosition, StackCall

_DECODER_INPUTS = ("labels", "decoder_input_ids", "decoder_inputs_embeds")
ENCODED = (
    "EncDecAttention.[kv]", "encoder_attn.[kv]_proj", "cross_attn.[kv]_proj",
    "cross_attention.[kv]_proj", "crossattention.self.key", "crossattention.self.value",
)  # fmt: skip
"""Modules of decoders' blocks that receive the encoder's output."""


class EncoderDecoder(EveryPosition):
    """The encoder's blocks, then the decoder's, which begin after the encoder is calibrated."""

    name = "encoder_decoder"

    def begin(self, model: nn.Module, inputs: Any, block: str, ended: Any = None) -> StackCall:
        """Run the model up to a stage, as `Stack`.

        Raises:
            CalibrationError: If the inputs do not determine the decoder's inputs.
        """
        if not isinstance(inputs, Mapping) or all(inputs.get(n) is None for n in _DECODER_INPUTS):
            raise CalibrationError(
                "an encoder-decoder model needs labels, or decoder_input_ids with their "
                f"decoder_attention_mask, in its calibration inputs; they are {names_of(inputs)}"
            )
        return super().begin(model, inputs, block, ended)

    def model_inputs(self, inputs: Any) -> Any:
        """Return the inputs without caches. The decoder's may be computed from labels."""
        return {key: without_cache(value, key) for key, value in inputs.items()}

    def masks(self, model: nn.Module, inputs: Any, stage: int, decoder_rows: str) -> Masks:
        """Return a mask of the stage's positions except padding, or of the decoder's targets.

        Keys and values of the decoder's cross-attention have the encoder's positions.

        Raises:
            CalibrationError: If `decoder_rows` is `targets` and there are no labels, or sounds have
                padding.
        """
        padding = self.encoder_mask(model, inputs)
        if stage == 0:
            return {"": padding}
        mask = mask_named(inputs, "decoder_attention_mask")
        targets = labelled_rows(inputs, needed=decoder_rows == "targets")
        decoder = targets if mask is None or decoder_rows == "targets" else mask
        return {"": decoder} | dict.fromkeys(ENCODED, padding)

    def encoder_mask(self, model: Any, inputs: Any) -> Tensor | None:
        """Return a mask of the encoder's positions except padding, or None if all count.

        Raises:
            CalibrationError: If sounds have padding, which the mask marks by their samples.
        """
        mask = mask_named(inputs, "attention_mask")
        if model.main_input_name == "input_ids" or mask is None:
            return mask
        if not torch.all(mask > 0):
            raise CalibrationError(
                f"the {model.main_input_name} of {type(model).__name__} are padded, but its blocks "
                "have other positions: give batches of one length or of one sample"
            )
        return None


class Whisper(EncoderDecoder):
    """Whisper attends to all of a recording, including silence that was padded."""

    def encoder_mask(self, model: Any, inputs: Any) -> Tensor | None:
        """Return None."""
        return None


ENCODER_DECODER = EncoderDecoder()
WHISPER = Whisper(name="whisper", compared=False)
