"""Tiny convolutional networks: no parameter and no statistic is zero or one."""

from typing import Any

import torch
from tiny_models import Suite, listed, samples_by_task, suite_of
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageClassification

from fusion_bench_featcal.families import resolve_family


class Unit(nn.Module):
    """Convolutions of many forms in one block, with a GroupNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(4, 8, 3, padding=1, padding_mode="reflect")
        self.norm = nn.GroupNorm(2, 8)
        self.deep = nn.Conv2d(8, 8, 3, dilation=2, padding="same", groups=8)
        self.few = nn.Conv2d(8, 8, (1, 3), padding=(0, 1), groups=2, bias=False)
        self.narrow = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.few(torch.tanh(self.deep(self.norm(self.wide(x)))))
        return x + self.narrow(torch.relu(hidden))


def unit_suite(seed: int = 1) -> Suite:
    """Two such blocks behind a convolution."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv2d(3, 4, 1), Unit(), Unit(), nn.Flatten(2))
    images: Any = samples_by_task(2, (5, 3), 3, 6, 6, seed=seed)
    return listed(net, images, ["1", "2"], seed)


# Two stages of one and two blocks, on few channels.
_RESNET = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 2], "layer_type": "basic"}
_CONVNEXT = {"hidden_sizes": [4, 6], "depths": [1, 2], "num_stages": 2, "patch_size": 2,
             "layer_scale_init_value": 0.5}  # fmt: skip
_SEGFORMER = {
    "num_encoder_blocks": 2, "depths": [1, 2], "sr_ratios": [2, 1], "hidden_sizes": [4, 6],
    "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
    "decoder_hidden_size": 8,
}  # fmt: skip
NUMBERS: dict[str, Any] = {"resnet": _RESNET, "convnext": _CONVNEXT, "segformer": _SEGFORMER}


def tower_suite(make: str, *, seed: int = 1) -> Suite:
    """A classifier of transformers, cut into blocks by its family."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(make, num_labels=3, **NUMBERS[make])
    model = AutoModelForImageClassification.from_config(config)
    (blocks,) = resolve_family("auto", model).stages(model)
    images = samples_by_task(2, (4, 3), 3, 16, 16, seed=seed)
    inputs: Any = {task: [{"pixel_values": b} for b in batches] for task, batches in images.items()}
    return with_statistics(suite_of(model, inputs, blocks, seed), seed)


def with_statistics(suite: Suite, seed: int) -> Suite:
    """The suite with statistics in every BatchNorm, of which the merged model has the means."""
    generator = torch.Generator().manual_seed(seed)
    models = [suite.base, *suite.experts.values()]
    for name, buffer in suite.merged.named_buffers():
        if buffer.is_floating_point():
            low = 0.5 if name.endswith("var") else -0.5
            values = torch.rand(3, *buffer.shape, generator=generator, dtype=buffer.dtype) + low
            for model, value in zip(models, values, strict=True):
                model.get_buffer(name).copy_(value)
            buffer.copy_(values.mean(0))
    return suite
