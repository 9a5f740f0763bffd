"""Image networks of several stages: ResNet, ConvNeXt, SegFormer.

Stem, downsampling and patch embeddings have weights and are blocks like the layers, so that
calibration starts at the image. Pools and heads after the last layer are not calibrated.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.families.base import (
    BlockCall,
    Family,
    call_block,
    capture_call,
    hidden_output,
)

MODEL_TYPES = ("resnet", "convnext", "convnextv2", "segformer")
_TORCHVISION = ("conv1", "bn1", "relu", "maxpool", "layer1")


@dataclass(frozen=True)
class StagesFamily(Family):
    """Blocks that take the previous block's features, which are rearranged between stages."""

    name: str = "stages"

    def stages(self, model: nn.Module) -> list[list[str]]:
        """Return names of the blocks in forward order, all in one stage.

        Raises:
            ValueError: If the structure is not one that the family supports.
        """
        if torchvision := find_torchvision_blocks(model):
            return [torchvision]
        for prefix, tower in _towers(model):
            names = list(_blocks(tower))
            if names:
                return [[f"{prefix}{name}" for name in names]]
        raise ValueError(
            f"method.family=stages does not fit {type(model).__name__}, which is not built like a "
            "ResNet, ConvNeXt or SegFormer. Write a family (docs/tutorials/family.md)"
        )

    def begin(self, model: nn.Module, inputs: Any, first_block: str, *ending: Any) -> BlockCall:
        """Capture the stem's arguments from the model's forward pass."""
        return capture_call(model, inputs, first_block)

    def step(self, model: nn.Module, block: str, call: BlockCall) -> tuple[Tensor, BlockCall]:
        """Run a block, and the operations without weights between it and the next block."""
        part = block.split(".")
        if "layer_norm" in part[-2:]:  # SegFormer turns rows back into an image after a stage
            height, width = call.args
            hidden = hidden_output(call_block(model, block, BlockCall(call.hidden, (), {})))
            image = hidden.reshape(len(hidden), height, width, -1).permute(0, 3, 1, 2)
            return hidden, BlockCall(image.contiguous(), (), {})
        output = call_block(model, block, call)
        hidden, args = hidden_output(output), call.args
        if "patch_embeddings" in part[-2:]:  # their output includes the size of the image
            args = tuple(output[1:])
        following = hidden
        if block == "bn1":  # torchvision's ResNet overwrites its output in place
            following = model.get_submodule("maxpool")(model.get_submodule("relu")(hidden.clone()))
        return hidden, BlockCall(following, args, {})


STAGES = StagesFamily()


def _towers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the model and its submodels, with the prefixes of their tensors' names."""
    yield "", model
    for name, part in model.named_children():
        yield f"{name}.", part


def _blocks(tower: Any) -> Iterator[str]:
    """Yield names of the blocks of a tower of transformers, or nothing for other modules."""
    encoder: Any = getattr(tower, "encoder", None)
    if isinstance(getattr(encoder, "patch_embeddings", None), nn.ModuleList):
        for stage, layers in enumerate(encoder.block):  # SegFormer before transformers 5
            yield f"encoder.patch_embeddings.{stage}"
            yield from (f"encoder.block.{stage}.{layer}" for layer in range(len(layers)))
            yield f"encoder.layer_norm.{stage}"
    elif hasattr(next(iter(getattr(tower, "stages", ())), None), "patch_embeddings"):
        for number, stage in enumerate(tower.stages):
            yield f"stages.{number}.patch_embeddings"
            yield from (f"stages.{number}.blocks.{block}" for block in range(len(stage.blocks)))
            yield f"stages.{number}.layer_norm"
    elif hasattr(encoder, "stages"):
        yield "embedder" if hasattr(tower, "embedder") else "embeddings"
        for number, stage in enumerate(encoder.stages):
            for part in ("downsampling_layer", "layers"):
                count = len(getattr(stage, part, ()))
                yield from (f"encoder.stages.{number}.{part}.{index}" for index in range(count))


def find_torchvision_blocks(model: nn.Module) -> list[str]:
    """Return names of the blocks of torchvision's ResNets, none for other models."""
    if not all(hasattr(model, name) for name in _TORCHVISION):
        return []
    stages = [(n, part) for n, part in model.named_children() if n.removeprefix("layer").isdigit()]
    layers = [f"{name}.{number}" for name, part in stages for number, _ in part.named_children()]
    return ["conv1", "bn1", *layers]
