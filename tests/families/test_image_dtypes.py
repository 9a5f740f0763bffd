"""Images in float32, as processors return them, and models in half precision."""

import torch
from tiny_convs import tower

from fusion_bench_featcal.families.base import captured


def test_images_get_the_dtype_of_the_model() -> None:
    model = tower("resnet").half()
    images = torch.rand(2, 3, 32, 32)
    hidden = captured(model, {"pixel_values": images}, "resnet.embedder").hidden
    assert hidden.dtype == torch.float16
    assert torch.equal(hidden, images.half())
