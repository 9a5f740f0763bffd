"""Models of the shapes that `plan.py` compares: random weights, written to a folder."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from fusion_bench_featcal import FeatCalSettings

VOCABULARY = 2000
TARGET = 8


@dataclass(frozen=True)
class Shape:
    """One calibration.

    Attributes:
        kind: `clip`, `t5` or `llama`.
        width: Width of the hidden features.
        blocks: Number of blocks (of each half of a T5).
        tasks: Number of tasks.
        samples: Samples a task.
        tokens: Tokens a sample; for CLIP patches, the class token not counted.
        batch: Samples a batch.
        mix_alpha: The setting.
        log_drift: The setting.
        activations: The setting.
    """

    kind: str
    width: int
    blocks: int
    tasks: int
    samples: int
    tokens: int
    batch: int = 16
    mix_alpha: float = 0.3
    log_drift: bool = True
    activations: str = "device"

    @property
    def name(self) -> str:
        """What tables call it."""
        more = [] if self.mix_alpha else ["alpha 0"]
        more += [] if self.log_drift else ["no drift"]
        more += [] if self.activations == "device" else [self.activations]
        head = f"{self.kind} {self.width} x {self.blocks}, {self.tasks} tasks, "
        return ", ".join([f"{head}{self.samples} x {self.tokens}", *more])

    @property
    def settings(self) -> FeatCalSettings:
        """The run's settings."""
        return FeatCalSettings(
            samples_per_task=self.samples,
            batch_size=self.batch,
            mix_alpha=self.mix_alpha,
            log_drift=self.log_drift,
            activations=self.activations,
        )

    def dumps(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))


SHAPES = [
    Shape("clip", 384, 4, 3, 64, 49),
    Shape("clip", 640, 3, 6, 16, 81),
    Shape("clip", 1024, 2, 2, 16, 64),
    Shape("clip", 512, 4, 8, 24, 49, activations="disk"),
    Shape("t5", 512, 3, 4, 32, 48),
    Shape("t5", 640, 2, 2, 32, 96, 8),
    Shape("llama", 768, 3, 3, 32, 48),
    Shape("llama", 384, 4, 5, 32, 64, 8),
    Shape("clip", 640, 2, 4, 48, 49, mix_alpha=0.0, log_drift=False),
    Shape("llama", 640, 2, 4, 16, 96, 4, mix_alpha=0.0),
]


def make_model(shape: Shape) -> nn.Module:
    """A random model."""
    width, heads = shape.width, shape.width // 64
    if shape.kind == "clip":
        side = round(shape.tokens**0.5)
        config = CLIPVisionConfig(
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=shape.blocks,
            num_attention_heads=heads,
            image_size=16 * side,
            patch_size=16,
        )
        return CLIPVisionModel(config).eval()
    if shape.kind == "t5":
        t5 = T5Config(
            vocab_size=VOCABULARY,
            d_model=width,
            d_ff=8 * width // 3,
            d_kv=64,
            num_layers=shape.blocks,
            num_heads=heads,
            feed_forward_proj="gated-gelu",
            decoder_start_token_id=0,
        )
        return T5ForConditionalGeneration(t5).eval()
    llama = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=7 * width // 2,
        num_hidden_layers=shape.blocks,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4) if heads % max(1, heads // 4) == 0 else heads,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(llama).eval()


def batches(shape: Shape, task: int) -> Iterator[dict[str, Tensor]]:
    """Random samples of one length."""
    generator = torch.Generator().manual_seed(task)
    for start in range(0, shape.samples, shape.batch):
        size = min(shape.batch, shape.samples - start)
        if shape.kind == "clip":
            side = 16 * round(shape.tokens**0.5)
            yield {"pixel_values": torch.randn(size, 3, side, side, generator=generator)}
            continue
        ids = torch.randint(2, VOCABULARY, (size, shape.tokens), generator=generator)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if shape.kind == "t5":
            inputs["labels"] = torch.randint(2, VOCABULARY, (size, TARGET), generator=generator)
        yield inputs


def write_models(shape: Shape, folder: Path) -> None:
    """Save a base, its experts and their task arithmetic."""
    torch.manual_seed(0)
    model: Any = make_model(shape)
    model.save_pretrained(folder / "base")
    base = {name: value.clone() for name, value in model.state_dict().items()}
    merged = {name: value.clone() for name, value in base.items()}
    for task in range(shape.tasks):
        with torch.no_grad():
            for name, value in model.named_parameters():
                step = 0.01 * torch.randn_like(value)
                value.copy_(base[name] + step)
                merged[name] += 0.3 * step
        model.save_pretrained(folder / f"task_{task}")
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(merged[name])
    model.save_pretrained(folder / "merged")


def load_merged(shape: Shape, folder: Path) -> nn.Module:
    """The merged model in memory of its own: mapped files would hide what it takes."""
    model = make_model(shape)
    parameters = dict(model.named_parameters())
    stored = load_file(folder / "merged" / "model.safetensors")
    with torch.no_grad():
        for name, value in parameters.items():
            found = stored.get(name, stored.get(f"vision_model.{name}"))
            assert found is not None, name
            value.copy_(found)
    return model
