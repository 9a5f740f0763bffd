"""Models with random weights for the speed benchmarks, their inputs, settings and FLOPs."""

import argparse
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
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
from fusion_bench_featcal.families import resolve_family

BATCH = 16
VOCABULARY = 1000
"""Small, because embeddings and heads are outside the blocks, which are measured."""

IMAGE_SIZE = 224

PRESETS: dict[str, dict[str, Any]] = {
    "vit-b-32": {"kind": "clip", "width": 768, "inner": 3072, "heads": 12, "patch": 32},
    "vit-l-14": {"kind": "clip", "width": 1024, "inner": 4096, "heads": 16, "patch": 14},
    "t5-base": {"kind": "t5", "width": 768, "inner": 2048, "heads": 12, "length": 128, "target": 8},
    "llama-1b": {"kind": "llama", "width": 2048, "inner": 8192, "heads": 32, "length": 128},
    "llama-8b": {"kind": "llama", "width": 4096, "inner": 14336, "heads": 32, "length": 512},
}
"""Widths of the models that the shapes are named after. Depth, tasks and samples are options."""


@dataclass(frozen=True)
class Shape:
    """Size of a problem. The defaults are two blocks of ViT-B/32, eight tasks, 32 images each."""

    kind: str = "clip"
    width: int = 768
    inner: int = 3072
    heads: int = 12
    patch: int = 32
    length: int = 128
    target: int = 8
    layers: int = 2
    tasks: int = 8
    samples: int = 32

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Give a parser `--model` and one option for each field that differs from its preset."""
        parser.add_argument("--model", choices=PRESETS, default="vit-b-32")
        for field in dataclasses.fields(cls):
            parser.add_argument(f"--{field.name}", type=type(field.default))

    @classmethod
    def from_arguments(cls, parser: argparse.ArgumentParser) -> "Shape":
        """Parse the command line into a shape."""
        cls.add_arguments(parser)
        return cls.of(parser.parse_args())

    @classmethod
    def of(cls, options: argparse.Namespace) -> "Shape":
        """Return the shape in parsed options."""
        fields = {f.name: getattr(options, f.name) for f in dataclasses.fields(cls)}
        changes = {name: value for name, value in fields.items() if value is not None}
        return cls(**(PRESETS[options.model] | changes))

    def arguments(self) -> list[str]:
        """Return the options of this shape."""
        return [f"--{name}={value}" for name, value in dataclasses.asdict(self).items()]

    @property
    def tokens(self) -> int:
        """Rows of a sample in the first stage's blocks (an image's class token among them)."""
        return (IMAGE_SIZE // self.patch) ** 2 + 1 if self.kind == "clip" else self.length

    def settings(self, **changes: Any) -> FeatCalSettings:
        """Return the paper's settings for images, with norms if they are updated."""
        values: dict[str, Any] = {
            "samples_per_task": self.samples,
            "batch_size": BATCH,
            "calibrate_norm": self.kind == "clip",
        }
        return FeatCalSettings(**(values | changes))

    def batches(self, task: str) -> "Batches":
        """A task's inputs, created on every access."""
        return Batches(self, task)

    def plain_flops(self) -> float:
        """FLOPs of the straightforward implementation's products and solves (LU: 2/3 d^3)."""
        with torch.device("meta"):
            model = build(self)
        total = self._stem_flops()
        stages = resolve_family("auto", model).stages(model)
        for stage, tokens in zip(stages, (self.tokens, self.target), strict=False):
            for block in stage:
                total += self._block_flops(model.get_submodule(block), tokens)
        return total

    def _stem_flops(self) -> float:
        """Return FLOPs of the patch embeddings of merged model and expert, for images."""
        if self.kind != "clip":
            return 0.0
        rows = self.tasks * self.samples * (self.tokens - 1)
        return 2 * 2 * rows * 3 * self.patch**2 * self.width

    def _block_flops(self, block: nn.Module, tokens: int) -> float:
        total, rows = 0.0, self.tasks * self.samples
        for name, module in block.named_modules():
            if isinstance(module, nn.Linear):
                from_encoder = name.endswith(("EncDecAttention.k", "EncDecAttention.v"))
                n = rows * (self.tokens if from_encoder else tokens)
                m, d = module.weight.shape
                total += 3 * 2 * n * m * d + 2 * 2 * n * d * d  # three passes, gram and cross
                total += (self.tasks + 1) * 2 * m * d * d + 2 / 3 * d**3  # W_i C_i and the solve
        keys = tokens + (self.tokens if tokens != self.tokens else 0)  # a T5 decoder has both
        return total + 3 * 4 * rows * tokens * keys * self.width


@dataclass(frozen=True)
class Batches:
    """A task's inputs: noise without padding, seeded by the task's number."""

    shape: Shape
    task: str

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield the inputs, batch by batch."""
        shape = self.shape
        generator = torch.Generator().manual_seed(int(self.task.removeprefix("task_")) + 1)
        for start in range(0, shape.samples, BATCH):
            size = min(BATCH, shape.samples - start)
            if shape.kind == "clip":
                pixels = (size, 3, IMAGE_SIZE, IMAGE_SIZE)
                yield {"pixel_values": torch.randn(pixels, generator=generator)}
                continue
            ids = torch.randint(VOCABULARY, (size, shape.length), generator=generator)
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            if shape.kind == "t5":
                labels = (size, shape.target)
                batch["labels"] = torch.randint(VOCABULARY, labels, generator=generator)
            yield batch


def build(shape: Shape) -> Any:
    """A model of the shape, with the random weights of its constructor."""
    if shape.kind == "clip":
        return CLIPVisionModel(
            CLIPVisionConfig(
                hidden_size=shape.width,
                intermediate_size=shape.inner,
                num_hidden_layers=shape.layers,
                num_attention_heads=shape.heads,
                image_size=IMAGE_SIZE,
                patch_size=shape.patch,
            )
        ).eval()
    if shape.kind == "t5":
        return T5ForConditionalGeneration(
            T5Config(
                vocab_size=VOCABULARY,
                d_model=shape.width,
                d_ff=shape.inner,
                d_kv=shape.width // shape.heads,
                num_layers=shape.layers,
                num_heads=shape.heads,
                feed_forward_proj="gated-gelu",
                decoder_start_token_id=0,
            )
        ).eval()
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=shape.width,
            intermediate_size=shape.inner,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.heads // 4,
            max_position_embeddings=shape.length,
            tie_word_embeddings=True,
        )
    ).eval()


def load(shape: Shape, path: Path) -> Any:
    """Return a stored model, read into allocated memory."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = build(shape)
    model.to_empty(device="cpu").tie_weights()
    state = load_file(path / "model.safetensors")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in state:
            tensor.data.copy_(state[name])
    for name, buffer in model.named_buffers():  # position ids and rotary angles are not stored
        if name not in state:
            buffer.copy_(_buffers(shape)[name])
    return model


@cache
def _buffers(shape: Shape) -> dict[str, Tensor]:
    return dict(build(dataclasses.replace(shape, layers=1)).named_buffers())


def write_models(shape: Shape, folder: Path) -> list[str]:
    """Write merged model, base and experts as safetensors, and return the experts' names.

    Experts are the base plus noise of a tenth of each parameter's spread. The merged model is Task
    Arithmetic of them with scale 0.3.
    """
    torch.manual_seed(0)
    model = build(shape)
    base = {name: p.detach().clone() for name, p in model.named_parameters()}
    merged = {name: value.clone() for name, value in base.items()}
    experts = [f"task_{index}" for index in range(shape.tasks)]
    for name in experts:
        expert = {}
        for key, value in base.items():
            spread = value.std() if value.numel() > 1 and value.std() > 0 else torch.tensor(0.1)
            expert[key] = value + 0.1 * spread * torch.randn_like(value)
            merged[key] += 0.3 * (expert[key] - value)
        _write(expert, folder / name)
    _write(base, folder / "base")
    _write(merged, folder / "merged")
    return ["merged", "base", *experts]


def _write(state: dict[str, Tensor], folder: Path) -> None:
    folder.mkdir(parents=True)
    save_file(state, folder / "model.safetensors")
