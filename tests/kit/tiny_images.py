"""Pictures, image folders and a CLIP of a few thousand parameters, made on the spot."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import CLIPConfig, CLIPModel

from fusion_bench_featcal.suites import image

SHAPES = ("circle", "square", "star")


def picture(seed: int, size: tuple[int, int] = (28, 28)) -> Image.Image:
    """A picture of noise. `size` is width and height."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def channels_first(image) -> torch.Tensor:
    """A processor that only rescales: pixels `[3, height, width]` in 0..1."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


def write_class_folders(
    folder: Path, classes: Sequence[str] = SHAPES, per_class: int = 4, seed: int = 0
) -> Path:
    """One folder of pictures per class. They differ by class, number and seed."""
    for position, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for number in range(per_class):
            noise = picture(1000 * seed + 100 * position + number)
            noise.save(folder / name / f"{number:02d}.png")
    return folder


def write_clip(folder: Path, seed: int = 0, longest_text: int = 32) -> Path:
    """A random CLIP with the bundled suite's processor (28 px), loadable by `from_pretrained`."""
    processor = image.load_processor()
    processor.save_pretrained(folder)
    vocabulary = processor.tokenizer.get_vocab()
    size = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    ends = {"bos_token_id": len(vocabulary) - 2, "eos_token_id": len(vocabulary) - 1}
    text = {**size, **ends, "num_hidden_layers": 1, "vocab_size": len(vocabulary)}
    vision = {**size, "num_hidden_layers": 2, "image_size": 28, "patch_size": 14}
    text["max_position_embeddings"] = longest_text
    torch.manual_seed(seed)
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=12))
    for parameter in model.parameters():  # so that predictions differ from picture to picture
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder
