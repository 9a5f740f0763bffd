"""Whisper: an encoder of sound and a decoder of text, as two stages."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.families.base import two_stages
from fusion_bench_featcal.families.t5 import T5Call, T5Family

MODEL_TYPES = ("whisper",)
"""Model types of this shape; tests run each of them."""

_BLOCK = re.compile(r"(model\.)?(encoder|decoder)\.layers\.\d+")
_FED_BY_THE_ENCODER = ("encoder_attn.k_proj", "encoder_attn.v_proj")


@dataclass(frozen=True)
class WhisperFamily(T5Family):
    """The encoder's blocks, then the decoder's, which take its output beside their own features.

    Whisper attends to all positions of a sound, of which those that were filled up with silence are
    some: all of them count in the encoder and in the keys and values of the cross-attention.
    """

    name: str = "whisper"

    def stages(self, model: nn.Module) -> list[list[str]]:
        """The encoder's blocks, then the decoder's.

        Raises:
            CalibrationError: If the model lacks one of the two.
        """
        lists = ("encoder.layers", "decoder.layers")
        return two_stages(model, _BLOCK, lists, "WhisperForConditionalGeneration")

    def ending(self, model: nn.Module, call: T5Call) -> Tensor:
        """The encoder's output, from what its last block gave."""
        encoder = self.stages(model)[0][0].partition(".layers")[0]
        return model.get_submodule(f"{encoder}.layer_norm")(call.hidden.clone())

    def row_weights(self, inputs: Any, stage_index: int, decoder_rows: str) -> Tensor | None:
        """All positions of the encoder; the decoder's without padding, or its targets.

        Raises:
            CalibrationError: If targets are asked for without labels.
        """
        return super().row_weights(inputs, stage_index, decoder_rows) if stage_index else None

    def other_rows(self, inputs: Any, stage_index: int) -> Mapping[str, Tensor | None]:
        """Keys and values of the decoder's cross-attention receive all of the encoder's rows."""
        return dict.fromkeys(_FED_BY_THE_ENCODER) if stage_index else {}


WHISPER = WhisperFamily()
"""The convolutions before the first block, embeddings and the final norms stay as merged."""
