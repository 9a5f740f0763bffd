"""Tiny convolutional networks of every form: no parameter and no statistic is zero or one."""

from collections.abc import Sequence
from typing import Any

import torch
from tiny_models import Suite, listed, samples_by_task, suite_of
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageClassification

from fusion_bench_featcal.families import resolve_family


class Unit(nn.Module):
    """A few convolutions in one block, with a sum behind the last one."""

    def __init__(self, width: int = 4, norm: bool = True) -> None:
        super().__init__()
        self.wide = nn.Conv2d(width, 2 * width, 3, padding=1, padding_mode="reflect")
        self.norm = nn.GroupNorm(2, 2 * width) if norm else nn.Identity()
        self.deep = nn.Conv2d(2 * width, 2 * width, 3, dilation=2, padding="same", groups=8)
        self.few = nn.Conv2d(2 * width, 2 * width, (1, 3), padding=(0, 1), groups=2, bias=False)
        self.narrow = nn.Conv2d(2 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.few(torch.tanh(self.deep(self.norm(self.wide(x)))))
        return x + self.narrow(torch.relu(hidden))


class Net(nn.Module):
    """Blocks between a stem and a head."""

    def __init__(self, blocks: Sequence[nn.Module], stem: nn.Module) -> None:
        super().__init__()
        self.stem, self.layers = stem, nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return x.flatten(2).mean(2)


def images(*, sizes: Sequence[int] = (5, 3), side: int = 6, seed: int = 0) -> Any:
    """Images of two tasks."""
    return samples_by_task(2, sizes, 3, side, side, seed=seed)


def with_statistics(suite: Suite, seed: int = 0) -> Suite:
    """The suite with statistics in every BatchNorm, of which the merged model has the means."""
    generator = torch.Generator().manual_seed(seed)
    models = [suite.base, *suite.experts.values()]
    for model in models:
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point():
                noise = torch.rand(buffer.shape, generator=generator, dtype=buffer.dtype)
                buffer.copy_(noise + 0.5 if name.endswith("var") else noise - 0.5)
    for name, buffer in suite.merged.named_buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.stack([model.get_buffer(name) for model in models]).mean(0))
    return suite


def pixel_values(**shape: Any) -> dict[str, list]:
    """Images by task as keyword arguments."""
    return {t: [{"pixel_values": b} for b in batches] for t, batches in images(**shape).items()}


def net_suite(*, seed: int = 1, **shape: Any) -> Suite:
    """Convolutions of many forms with GroupNorm."""
    torch.manual_seed(seed)
    net = Net([Unit() for _ in range(2)], nn.Conv2d(3, 4, 1))
    return listed(net, images(seed=seed, **shape), ["layers.0", "layers.1"], seed)


class Batched(nn.Module):
    """Convolution and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.conv(x)))


def batched_suite() -> Suite:
    torch.manual_seed(7)
    net = Net([Batched() for _ in range(2)], nn.Identity())
    return with_statistics(listed(net, images(seed=7), ["layers.0", "layers.1"], 7))


# Two stages of one and two blocks, on few channels.
_RESNET: dict[str, Any] = {"embedding_size": 4, "hidden_sizes": [8, 16], "depths": [1, 2]}
_CONVNEXT = {"hidden_sizes": [4, 6], "depths": [1, 2], "num_stages": 2, "patch_size": 2,
             "layer_scale_init_value": 0.5}  # fmt: skip
_SEGFORMER = {
    "num_encoder_blocks": 2, "depths": [1, 2], "sr_ratios": [2, 1], "hidden_sizes": [4, 6],
    "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
    "decoder_hidden_size": 8,
}  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet": ("resnet", _RESNET | {"layer_type": "basic", "hidden_sizes": [4, 8]}),
    "resnet, bottleneck": ("resnet", _RESNET | {"layer_type": "bottleneck"}),
    "convnext": ("convnext", _CONVNEXT),
    "segformer": ("segformer", _SEGFORMER),
}


def tower(name: str) -> nn.Module:
    """Random convolutional classifier of transformers."""
    model_type, numbers = CONFIGS[name]
    config = AutoConfig.for_model(model_type, num_labels=3, **numbers)
    return AutoModelForImageClassification.from_config(config)


def tower_suite(make: str, *, seed: int = 1, **shape: Any) -> Suite:
    """A model of transformers, cut into blocks by its family."""
    torch.manual_seed(seed)
    model = tower(make)
    (blocks,) = resolve_family("auto", model).stages(model)
    inputs = pixel_values(seed=seed, side=16, **shape)
    return with_statistics(suite_of(model, inputs, blocks, seed), seed)
