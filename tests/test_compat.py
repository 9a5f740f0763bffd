"""With compat, FusionBench's CLIP task pool works under every supported transformers."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from lightning import Fabric
from PIL import Image
from transformers import CLIPConfig, CLIPModel

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
from fusion_bench.taskpool import CLIPVisionModelTaskPool
from fusion_bench.tasks.clip_classification import get_classnames_and_templates

END = 98


def tokens(text: list[str], return_tensors="pt", padding=True) -> dict[str, torch.Tensor]:
    """Stands in for a CLIPProcessor, which cannot be built without a vocabulary."""
    rows = [[1, *(2 + ord(letter) % 90 for letter in line), END] for line in text]
    width = max(map(len, rows))
    return {"input_ids": torch.tensor([row + [END] * (width - len(row)) for row in rows])}


def pixels(image: Image.Image) -> torch.Tensor:
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(1, 8, 8) / 255


@pytest.fixture
def clip():
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    size["num_attention_heads"] = 2
    text = {**size, "vocab_size": END + 1, "bos_token_id": 1, "eos_token_id": END}
    vision = {**size, "image_size": 8, "patch_size": 4, "num_channels": 1}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).eval()


@torch.no_grad()
def classes(clip: CLIPModel, images: list[Image.Image], task: str) -> list[int]:
    """Zero-shot classes by transformers' own forward."""
    batch = torch.stack([pixels(image) for image in images])
    names, templates = get_classnames_and_templates(task)
    text = [tokens([template(name) for template in templates]) for name in names]
    outputs = [clip(pixel_values=batch, **prompts) for prompts in text]
    heads = torch.stack([output.text_embeds.mean(dim=0) for output in outputs])
    heads = torch.nn.functional.normalize(heads, dim=1)
    return (outputs[0].image_embeds @ heads.T).argmax(dim=1).tolist()


def test_task_pool_agrees_with_transformers(clip):
    noise = torch.randint(0, 256, (10, 64), generator=torch.Generator().manual_seed(1))
    images = [Image.frombytes("L", (8, 8), bytes(row.tolist())) for row in noise]
    labels = classes(clip, images, "mnist")
    labels[:3] = [(label + 1) % 10 for label in labels[:3]]
    stand_ins: dict[str, Any] = {
        "test_datasets": {
            "mnist": [{"image": i, "label": y} for i, y in zip(images, labels, strict=True)]
        },
        "processor": tokens,
        "data_processor": pixels,
        "clip_model": clip,
        "dataloader_kwargs": {"batch_size": 5},
    }
    pool = CLIPVisionModelTaskPool(**stand_ins, fast_dev_run=False)
    pool.fabric = Fabric(accelerator="cpu", devices=1)
    report = pool.evaluate(deepcopy(clip.vision_model))
    assert report["mnist"]["accuracy"] == pytest.approx(0.7)
