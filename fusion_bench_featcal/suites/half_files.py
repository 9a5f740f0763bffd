"""Checkpoints stored in float16 that load as float32, and the folder a build goes to."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig


def save_half(
    tensors: "dict[str, Tensor]",
    config: "PretrainedConfig",
    architecture: str,
    folder: Path,
    **spelled_out: object,
) -> None:
    """Save in float16 what loads as float32.

    transformers 5 loads in the dtype its config names, 4.57 always in float32: so the config names
    float32, and both agree.

    Args:
        tensors: the model's tensors by name.
        config: the model's configuration.
        architecture: the class the configuration names.
        folder: where they go; made if need be.
        **spelled_out: entries that the configuration has to name although they are defaults,
            because versions differ in them.
    """
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    half = {name: tensor.half().contiguous() for name, tensor in tensors.items()}
    save_file(half, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    path = folder / "config.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    for part in (written, written.get("text_config"), written.get("vision_config")):
        if part is not None:
            part.pop("torch_dtype", None)
            part["dtype"] = "float32"
    written |= {"architectures": [architecture], **spelled_out}
    path.write_text(json.dumps(written, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def empty_folder(folder: Path) -> Path:
    """Make the folder a build goes to; FileExistsError when it holds anything."""
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; give `featcal suite build` a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
