"""Networks of several stages, run block by block, are their own forward passes."""

from typing import Any

import pytest
import torch
from test_families import assert_untouched, stepped
from tiny_convs import MAKES, tower_suite
from tiny_models import normal
from torch import Tensor, nn
from transformers import ConvNextV2Config, ConvNextV2ForImageClassification

from fusion_bench_featcal.families import STAGES, resolve_family

IMAGES = normal(0, 2, 3, 16, 16)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn1(self.conv1(x))
        out += x
        return self.relu(out)


class LikeTorchvision(nn.Module):
    """Attributes and forward pass of torchvision's ResNets."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 7, stride=2, padding=3), nn.BatchNorm2d(4)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layer1, self.layer2 = nn.Sequential(Layer(), Layer()), nn.Sequential(Layer())
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(self.avgpool(self.layer2(self.layer1(x))).flatten(1))


def convnext_v2() -> nn.Module:
    config = ConvNextV2Config(hidden_sizes=[4, 6], depths=[1, 1], num_stages=2, patch_size=2)
    return ConvNextV2ForImageClassification(config)


@pytest.mark.parametrize("make", [*MAKES, "torchvision", "convnext v2"])
def test_blocks_are_those_of_the_models_own_pass(make: str):
    own = {"torchvision": LikeTorchvision, "convnext v2": convnext_v2}
    model = (own[make]().double().eval()) if make in own else tower_suite(make).merged
    inputs: Any = IMAGES if make == "torchvision" else {"pixel_values": IMAGES}
    assert resolve_family("auto", model) is resolve_family("stages", model) is STAGES
    (blocks,) = STAGES.stages(model)
    family = {"blocks": [[block] for block in blocks], "mask": [None] * len(blocks)}
    found, wanted = (
        stepped(f, model, inputs)
        for f in (STAGES, resolve_family({"name": "replay"} | family, model))
    )
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))
    assert_untouched(model)


def test_another_model_is_refused_with_what_to_set():
    with pytest.raises(ValueError, match=r"stages does not fit Linear.*method\.family to \{name"):
        STAGES.stages(nn.Linear(2, 2))
