"""Tiny models with everything that can go wrong in them: no parameter is zero, one or shared."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CLIPVisionConfig, CLIPVisionModel, GPT2Config, GPT2Model


@dataclass
class Suite:
    """What one calibration takes: a base, experts scattered about it, their merger, and inputs."""

    merged: nn.Module
    base: nn.Module
    experts: dict[str, nn.Module]
    inputs: dict[str, list]
    blocks: list[str]
    family: Any = "auto"

    def to(self, dtype: torch.dtype) -> "Suite":
        """Copies of the models in another dtype; inputs stay."""
        models = {
            name: copy.deepcopy(model).to(dtype)
            for name, model in {"merged": self.merged, "base": self.base, **self.experts}.items()
        }
        merged, base = models.pop("merged"), models.pop("base")
        return replace(self, merged=merged, base=base, experts=models)


def scatter(model: nn.Module, seed: int, size: float) -> nn.Module:
    """Copy of a model with noise on every parameter."""
    generator = torch.Generator().manual_seed(seed)
    model = copy.deepcopy(model).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(size * noise.to(parameter.dtype))
    return model


def add_up(base: nn.Module, experts: Mapping[str, nn.Module], scale: float) -> nn.Module:
    """Task arithmetic."""
    merged = copy.deepcopy(base)
    theirs = [dict(expert.named_parameters()) for expert in experts.values()]
    with torch.no_grad():
        for name, parameter in merged.named_parameters():
            parameter.add_(scale * sum(their[name] - parameter for their in theirs))
    return merged


def suite_of(
    model: nn.Module, inputs: dict[str, list], blocks: list[str], seed: int, family: Any = "auto"
) -> Suite:
    """Base, experts and merger of one architecture, for the tasks that have inputs."""
    base = scatter(model.double(), seed, 0.15)
    experts = {t: scatter(base, 1000 * seed + i, 0.1) for i, t in enumerate(inputs, start=1)}
    return Suite(add_up(base, experts, 0.4), base, experts, inputs, blocks, family)


def replayed(model: nn.Module, inputs: dict[str, list], blocks: list[str], seed: int) -> Suite:
    """The same for a model that no family knows."""
    return suite_of(model, inputs, blocks, seed, {"name": "replay", "blocks": blocks})


def normal(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def batched(samples: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Cut samples into batches of the given sizes."""
    return list(samples.split(list(sizes)))


def blocks_of(model: nn.Module, class_name: str) -> list[str]:
    """Names of the blocks; transformers moved CLIP's between releases."""
    return [name for name, m in model.named_modules() if type(m).__name__ == class_name]


def modules_of(model: nn.Module, blocks: list[str]) -> dict[str, list[str]]:
    """Full names of the linear modules, and the LayerNorms with gain and shift, of each block."""
    found = {}
    for block in blocks:
        found[block] = []
        for name, module in model.get_submodule(block).named_modules(prefix=block):
            kind = type(module).__name__
            affine = kind == "LayerNorm" and module.weight is not None and module.bias is not None
            if affine or kind in ("Linear", "Conv1D"):
                found[block].append(name)
    return found


def clip_model(
    *, width: int = 12, heads: int = 3, depth: int = 2, hidden: int = 20, seed: int = 0
) -> nn.Module:
    """CLIP's image tower on images of 8 x 8 pixels in patches of 4 x 4: five tokens."""
    torch.manual_seed(seed)
    config = CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        image_size=8,
        patch_size=4,
        projection_dim=width,
    )
    return CLIPVisionModel(config).eval()


def clip_suite(
    *,
    width: int = 12,
    heads: int = 3,
    depth: int = 2,
    hidden: int = 20,
    tasks: int = 3,
    sizes: Sequence[int] = (4, 3),
    seed: int = 0,
) -> Suite:
    """Tiny CLIP suite in float64; each task's images are cut into batches of `sizes`."""
    model = clip_model(width=width, heads=heads, depth=depth, hidden=hidden, seed=seed)
    inputs = {}
    for index in range(tasks):
        images = normal(seed + 10 * index, sum(sizes), 3, 8, 8) * (index + 1) / tasks
        inputs[f"task_{index}"] = [{"pixel_values": part} for part in batched(images, sizes)]
    return suite_of(model, inputs, blocks_of(model, "CLIPEncoderLayer"), seed)


class ResidualBlock(nn.Module):
    """Pre-norm residual block; the second linear has no bias, the norm after it no parameters."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.rescale = nn.LayerNorm(width, elementwise_affine=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.rescale(self.down(torch.tanh(self.up(self.norm(hidden)))))


class ResidualNet(nn.Module):
    """Residual blocks between two linear maps that are not calibrated."""

    def __init__(self, width: int = 6, hidden: int = 9, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.layers = nn.ModuleList(ResidualBlock(width, hidden) for _ in range(depth))
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def residual_suite(*, tasks: int = 2, sizes: Sequence[int] = (9, 6), seed: int = 0) -> Suite:
    """Residual network on plain `[samples, features]` tensors: a row is a sample."""
    torch.manual_seed(seed)
    model = ResidualNet()
    inputs: dict[str, list] = {
        f"task_{index}": batched((index + 1) * normal(seed + index, sum(sizes), 4) + index, sizes)
        for index in range(tasks)
    }
    return replayed(model, inputs, [f"layers.{i}" for i in range(3)], seed)


def text_inputs(lengths: Sequence[int], padded: int, seed: int) -> dict[str, Tensor]:
    """Token ids of sentences of given lengths, filled up on the right, with their mask."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(len(lengths), padded, dtype=torch.long)
    mask = torch.zeros(len(lengths), padded, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(1, 30, (length,), generator=generator)
        mask[row, :length] = 1
    return {"input_ids": ids, "attention_mask": mask}


def gpt2_suite(*, padded: int = 6, tasks: int = 2, seed: int = 0) -> Suite:
    """GPT-2, whose linear modules are Conv1D, on sentences filled up to `padded` tokens."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=30, n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = GPT2Model(config).eval()
    inputs: dict[str, list] = {}
    for index in range(tasks):
        lengths = [[2, 5, 3], [4, 1, 5, 2]]
        inputs[f"task_{index}"] = [
            text_inputs(part, padded, seed + 10 * index + i) for i, part in enumerate(lengths)
        ]
    return replayed(model, inputs, ["h.0", "h.1"], seed)
