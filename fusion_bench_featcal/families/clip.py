"""CLIP's vision tower in transformers, and other towers with `encoder.layers`."""

from dataclasses import dataclass

from torch import Tensor, nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.families.base import ChainFamily
from fusion_bench_featcal.families.transformers_names import CLIP_BLOCK


def clip_stages(model: nn.Module) -> list[list[str]]:
    """Return the encoder layers of a CLIP vision model in forward order.

    Raises:
        CalibrationError: If the model has none, or also has a text tower.
    """
    names = [name for name, _ in model.named_modules()]
    if any(name.split(".")[0] == "text_model" for name in names):
        raise CalibrationError(
            f"{type(model).__name__} has a text tower: calibrate its vision_model "
            "(a CLIPVisionModel)"
        )
    blocks = [name for name in names if CLIP_BLOCK.fullmatch(name)]
    if not blocks:
        raise CalibrationError(
            f"{type(model).__name__} has no vision encoder layers; choose another method.family "
            "than clip"
        )
    return [blocks]


@dataclass(frozen=True)
class ClipFamily(ChainFamily):
    """A chain of blocks. For models with a class token the head reads nothing else."""

    def closing_rows(self, model: nn.Module, hidden: Tensor) -> Tensor | None:
        """Return a mask of the class token, if the model has one."""
        if not any(name.endswith("class_embedding") for name, _ in model.named_parameters()):
            return None
        mask = hidden.new_zeros(hidden.shape[:-1])
        mask[:, 0] = 1
        return mask


CLIP = ClipFamily(name="clip", find_stages=clip_stages)
"""Every position of every image counts: there is no padding."""
