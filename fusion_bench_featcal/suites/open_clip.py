"""The bundled image suite as OpenCLIP models: the same weights in open_clip's architecture."""

import json
import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, cat, nn

import fusion_bench_featcal.fusionbench.compat  # noqa: F401

# isort: split
from fusion_bench.utils import instantiate

from fusion_bench_featcal.errors.words import install_advice
from fusion_bench_featcal.fusionbench.pool_models import ProcessorPool
from fusion_bench_featcal.suites import image

WEIGHTS_FILE = "open_clip_model.safetensors"

_STEM = {
    "embeddings.class_embedding": "class_embedding",
    "embeddings.patch_embedding.weight": "conv1.weight",
    "embeddings.position_embedding.weight": "positional_embedding",
    "pre_layrnorm.weight": "ln_pre.weight",
    "pre_layrnorm.bias": "ln_pre.bias",
    "post_layernorm.weight": "ln_post.weight",
    "post_layernorm.bias": "ln_post.bias",
}
_BLOCK = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}


class OpenClipPool(ProcessorPool):
    """A pool of open_clip models with the processor for their images.

    FusionBench's OpenCLIP pool needs Python 3.12 and reads pickles. Models are modules, or
    configurations whose `_target_` returns one.
    """

    def load_processor(self) -> Any:
        """Return the processor."""
        is_config = isinstance(self._processor, Mapping)
        return instantiate(self._processor) if is_config else self._processor

    def save_model(  # type: ignore[override]
        self, model: nn.Module, path: str | os.PathLike[str], **unused: object
    ) -> None:
        """Save a model's weights in a folder, under open_clip's file name."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def load_tower(name: str) -> nn.Module:
    """Load a model of the suite (`pretrained` or a task) as open_clip's vision transformer.

    It maps images `[batch, 3, 28, 28]` to the transformers model's projected features, `[batch,
    64]`, float32.

    Raises:
        ImportError: If open_clip cannot be imported.
    """
    try:
        transformer: Any = import_module("open_clip.transformer")
    except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision does not fit torch
        advice = install_advice("'.[openclip]'")
        raise ImportError(
            "the OpenCLIP suite needs open_clip, which cannot be imported "
            f"({str(error).splitlines()[0]}): {advice}"
        ) from error
    config = json.loads(Path(image.path(), "config.json").read_text(encoding="utf-8"))
    vision = config["vision_config"]
    tower = transformer.VisionTransformer(
        image_size=vision["image_size"],
        patch_size=vision["patch_size"],
        width=vision["hidden_size"],
        layers=vision["num_hidden_layers"],
        heads=vision["num_attention_heads"],
        mlp_ratio=vision["intermediate_size"] / vision["hidden_size"],
        output_dim=config["projection_dim"],
        act_layer=transformer.QuickGELU,
    )
    tower.load_state_dict(tower_weights(name))
    return tower.eval()


def tower_weights(name: str) -> dict[str, Tensor]:
    """Return the weights of a model of the suite in open_clip's layout, float32.

    Experts have the base's projection: only vision towers were trained.
    """
    projection = load_file(Path(image.path(), "model.safetensors"))["visual_projection.weight"]
    stored = load_file(Path(image.path(name), "model.safetensors"))
    vision = {
        key.removeprefix("vision_model."): tensor.float()
        for key, tensor in stored.items()
        if key.startswith("vision_model.")
    }
    return {**to_open_clip(vision), "proj": projection.float().T.contiguous()}


def to_open_clip(vision: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights of transformers' CLIP vision model, and fuse q, k and v.

    Args:
        vision: The weights, without the prefix `vision_model.`.

    Returns:
        open_clip's weights without the projection `proj`.

    Raises:
        KeyError: If a tensor does not belong to a CLIP vision model.
    """
    converted = {_STEM[key]: tensor for key, tensor in vision.items() if key in _STEM}
    for key, tensor in vision.items():
        if key in _STEM or key.startswith("embeddings.position_ids"):
            continue
        layer, _, inner = key.removeprefix("encoder.layers.").partition(".")
        module, _, leaf = inner.rpartition(".")
        block = f"transformer.resblocks.{layer}"
        if module in ("self_attn.k_proj", "self_attn.v_proj"):
            continue  # fused with q below
        if module == "self_attn.q_proj":
            fused = [vision[key.replace("q_proj", name)] for name in ("q_proj", "k_proj", "v_proj")]
            converted[f"{block}.attn.in_proj_{leaf}"] = cat(fused)
        else:
            converted[f"{block}.{_BLOCK[module]}.{leaf}"] = tensor
    return converted
