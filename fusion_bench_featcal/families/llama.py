"""Decoder-only language models like Llama: a list of `layers` after token embeddings."""

from dataclasses import dataclass

from torch import nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.families.stack import StackFamily
from fusion_bench_featcal.families.transformers_names import LLAMA_BLOCK

MODEL_TYPES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "granite",
    "olmo2",
    "phi3",
    "smollm3",
    "starcoder2",
)
"""Model types whose blocks exchange only hidden features."""


@dataclass(frozen=True)
class LlamaFamily(StackFamily):
    """A stack that needs no comparison with the model's forward pass."""

    name: str = "llama"
    compared: bool = False

    def stages(self, model: nn.Module) -> list[list[str]]:
        """Return the decoder layers in forward order, as one stage.

        Raises:
            CalibrationError: If the model has none.
        """
        blocks = [name for name, _ in model.named_modules() if LLAMA_BLOCK.fullmatch(name)]
        if not blocks:
            raise CalibrationError(
                f"{type(model).__name__} has no decoder layers (model.layers.*); choose another "
                "method.family than llama"
            )
        return [blocks]


LLAMA = LlamaFamily()
"""Grouped heads, fused or gated projections and norms need no special treatment."""
