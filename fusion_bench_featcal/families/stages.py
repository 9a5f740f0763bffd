"""Image networks of several stages: ResNet, ConvNeXt, SegFormer.

Stem, downsampling and patch embeddings have weights and are blocks like the layers, so that
calibration starts at the image. Pools and heads after the last layer are not calibrated.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.words import option
from fusion_bench_featcal.families.base import Call, Family, captured, hidden_output, run_block


class Stages(Family):
    """Blocks that take the previous block's features, which are rearranged between stages."""

    name, compared = "stages", False

    def stages(self, model: nn.Module) -> list[list[str]]:
        """Return names of the blocks in forward order, all in one stage.

        Raises:
            CalibrationError: If the structure is not one that the family supports.
        """
        if torchvision := find_torchvision_blocks(model):
            return [torchvision]
        towers = {"": model} | {f"{name}.": child for name, child in model.named_children()}
        for prefix, tower in towers.items():
            if names := [f"{prefix}{name}" for name in _blocks(tower)]:
                return [names]
        raise CalibrationError(
            f"{option('family', 'stages')} does not fit {type(model).__name__}, which is not "
            "built like a ResNet, ConvNeXt or SegFormer. Write a family (docs/howto/own-family.md)"
        )

    def begin(self, model: nn.Module, inputs: Any, block: str, ended: Any = None) -> Call:
        """Capture the stem's arguments from the model's forward pass."""
        return captured(model, inputs, block)

    def step(self, model: nn.Module, block: str, call: Call) -> Call:
        """Run the operations without weights before a block, and the block.

        SegFormer's patch embeddings also return the image's height and width, which its layers
        take. A stage ends with a norm of positions, and the next one begins with an image.
        """
        kinds, hidden, size = block.split(".")[-2:], call.hidden, call.args
        if "patch_embeddings" in kinds and hidden.ndim == 3:
            hidden = hidden.unflatten(1, size).permute(0, 3, 1, 2).contiguous()
        if block == "layer1.0":  # torchvision's ReLU overwrites its input
            hidden = model.get_submodule("maxpool")(model.get_submodule("relu")(hidden.clone()))
        args = () if {"patch_embeddings", "layer_norm"} & {*kinds} else size
        output = run_block(model, block, Call(hidden, args, call.kwargs))
        return Call(hidden_output(output), output[1:] if "patch_embeddings" in kinds else size)


STAGES = Stages()


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
    if not all(hasattr(model, name) for name in ("conv1", "bn1", "relu", "maxpool", "layer1")):
        return []
    stages = [(n, part) for n, part in model.named_children() if n.removeprefix("layer").isdigit()]
    layers = [f"{name}.{number}" for name, part in stages for number, _ in part.named_children()]
    return ["conv1", "bn1", *layers]
