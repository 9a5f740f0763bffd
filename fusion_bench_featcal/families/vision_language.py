"""Language models that read images (Qwen2-VL): blocks of the vision tower, then the decoder."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.families.base import two_stages
from fusion_bench_featcal.families.rows import causal_rows, names_of
from fusion_bench_featcal.families.stack import StackCall, StackFamily, noted_call
from fusion_bench_featcal.families.transformers_names import VISION_LANGUAGE_BLOCK
from fusion_bench_featcal.settings import CalibrationError

MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl")
"""Model types with this structure. Tests run each of them."""


@dataclass(frozen=True)
class VisionLanguageFamily(StackFamily):
    """Two stacks. The second one begins after the vision tower is calibrated.

    Patches of all images of a batch are in one list without padding, so all of them count.
    """

    name: str = "vision_language"
    same_calls: bool = True
    compared: bool = False
    has_tables: bool = False

    def stages(self, model: nn.Module) -> list[list[str]]:
        """Return the blocks of the vision tower, then of the language model.

        Raises:
            CalibrationError: If the model lacks one of the two.
        """
        lists = ("visual.blocks", "language_model.layers")
        return two_stages(model, VISION_LANGUAGE_BLOCK, lists, "Qwen2VLForConditionalGeneration")

    def begin(self, model: nn.Module, inputs: Any, first_block: str, *ending: Any) -> StackCall:
        """Run the model's forward pass up to a stage, with its blocks skipped.

        Raises:
            CalibrationError: If there are no images, or their sizes contradict the inputs.
        """
        _check_images(inputs)
        (blocks,) = (stage for stage in self.stages(model) if first_block in stage)
        return noted_call(model, blocks, inputs)

    def row_weights(self, inputs: Any, stage_index: int, decoder_rows: str) -> Tensor | None:
        """Return a mask of all patches, or of the text's positions (with images) except padding.

        Raises:
            CalibrationError: If targets are requested without labels.
        """
        return causal_rows(inputs, decoder_rows) if stage_index else None


def _check_images(inputs: Any) -> None:
    named = inputs if isinstance(inputs, Mapping) else {}
    pixels, grids = named.get("pixel_values"), named.get("image_grid_thw")
    if pixels is None or grids is None:
        raise CalibrationError(
            "a vision-language model needs pixel_values and image_grid_thw in its calibration "
            f"inputs; they are {names_of(inputs)}"
        )
    if not grids.is_meta and len(pixels) != int(grids.prod(1).sum()):
        raise CalibrationError(
            f"pixel_values has {len(pixels)} patches, image_grid_thw {int(grids.prod(1).sum())}: a "
            "batch with several samples cannot be cut. Give one sample a batch, or set "
            "method.samples_per_task to a number of whole batches"
        )


VISION_LANGUAGE = VisionLanguageFamily()
"""Patch embedding and the layers between tower and decoder keep their merged weights."""
