"""Whisper: an audio encoder and a text decoder, as two stages."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.families.base import two_stages
from fusion_bench_featcal.families.t5 import T5Call, T5Family
from fusion_bench_featcal.families.transformers_names import (
    WHISPER_BLOCK,
    WHISPER_ENCODER_NORM,
    WHISPER_KEYS_AND_VALUES,
)

MODEL_TYPES = ("whisper",)
"""Model types with this structure. Tests run each of them."""


@dataclass(frozen=True)
class WhisperFamily(T5Family):
    """The encoder's blocks, then the decoder's, which also read the encoder's output.

    Whisper attends to all positions of a recording, including silence that was padded. All of them
    count in the encoder and in the keys and values of the cross-attention.
    """

    name: str = "whisper"

    def stages(self, model: nn.Module) -> list[list[str]]:
        """Return the blocks of the encoder, then of the decoder.

        Raises:
            CalibrationError: If the model lacks one of the two.
        """
        lists = ("encoder.layers", "decoder.layers")
        return two_stages(model, WHISPER_BLOCK, lists, "WhisperForConditionalGeneration")

    def ending(self, model: nn.Module, call: T5Call) -> Tensor:
        """Return the encoder's output, from the output of its last block."""
        encoder = self.stages(model)[0][0].partition(".layers")[0]
        return model.get_submodule(f"{encoder}.{WHISPER_ENCODER_NORM}")(call.hidden.clone())

    def row_weights(self, inputs: Any, stage_index: int, decoder_rows: str) -> Tensor | None:
        """Return a mask of all encoder positions, or of the decoder's targets or all but padding.

        Raises:
            CalibrationError: If targets are requested without labels.
        """
        return super().row_weights(inputs, stage_index, decoder_rows) if stage_index else None

    def other_rows(self, inputs: Any, stage_index: int) -> Mapping[str, Tensor | None]:
        """Return all of the encoder's rows for keys and values of the cross-attention."""
        return dict.fromkeys(WHISPER_KEYS_AND_VALUES) if stage_index else {}


WHISPER = WhisperFamily()
"""The convolutions before the first block, embeddings and final norms keep merged weights."""
