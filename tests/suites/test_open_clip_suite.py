"""The bundled suite in open_clip's architecture, as far as it goes without open_clip."""

import json
from pathlib import Path

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
import pytest
import torch
from configs import composed
from fusion_bench.utils import instantiate
from hydra.utils import get_class, get_method
from safetensors.torch import load_file
from tiny_open_clip import Tower, clip_twin, converted
from torch import nn
from transformers import CLIPModel

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.fusionbench.pool_models import load_pool_model
from fusion_bench_featcal.suites import image
from fusion_bench_featcal.suites.open_clip import (
    WEIGHTS_FILE,
    OpenClipPool,
    load_tower,
    to_open_clip,
    tower_weights,
)
from fusion_bench_featcal.tasks.open_clip import OpenClipTaskPool

POOL = "modelpool=open-clip-vit-mini_TA6"


def test_yaml_differs_from_the_suite_it_was_converted_from_where_it_must_only():
    ours = composed(POOL, "taskpool=open-clip-vit-mini_TA6")
    theirs = composed("modelpool=clip-vit-mini_TA6").modelpool
    assert get_class(ours.modelpool._target_) is OpenClipPool
    assert get_class(ours.taskpool._target_) is OpenClipTaskPool
    assert ours.modelpool.default_taskpool == ours.taskpool
    for name, model in ours.modelpool.models.items():
        assert get_method(model._target_) is load_tower
        assert theirs.models[name] == image.path(model.name)
    for key in set(theirs) - {"_target_", "models", "default_taskpool", "featcal"}:
        assert ours.modelpool[key] == theirs[key], key
    # What transformers' CLIP alone can be compared with is left out.
    assert {k: v for k, v in ours.modelpool.featcal.items() if k != "compare"} == theirs.featcal
    assert set(ours.modelpool.models) == set(theirs.models)


def test_converted_model_is_the_same_function():
    twin = clip_twin(seed=3)
    tower = converted(twin)
    pixels = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        wanted = twin(pixel_values=pixels).pooler_output @ tower.get_parameter("proj")
        torch.testing.assert_close(tower(pixels), wanted)


def test_weights_of_the_suite_are_a_whole_tower():
    weights = tower_weights("mini_latin")
    like = Tower(depth=4).state_dict()
    assert set(weights) == set(like)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert weights["transformer.resblocks.3.attn.in_proj_weight"].shape == (576, 192)
    stored = load_file(Path(image.path("mini_latin"), "model.safetensors"))
    layer = "vision_model.encoder.layers.2.self_attn"
    parts = weights["transformer.resblocks.2.attn.in_proj_bias"].chunk(3)
    for part, name in zip(parts, ("q_proj", "k_proj", "v_proj"), strict=True):
        assert torch.equal(part, stored[f"{layer}.{name}.bias"].float())


def test_tensor_of_another_model_is_not_dropped():
    with pytest.raises(KeyError, match=r"self_attn\.q_norm"):
        to_open_clip({"encoder.layers.0.self_attn.q_norm.weight": torch.ones(2)})


@pytest.mark.parametrize("error", [None, RuntimeError("operator torchvision::nms does not exist")])
def test_missing_open_clip_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, error: RuntimeError | None
):
    def refuse(name: str) -> None:
        raise error or ImportError(f"No module named {name!r}")

    monkeypatch.setattr("fusion_bench_featcal.suites.open_clip.import_module", refuse)
    pool = instantiate(composed(POOL).modelpool, _recursive_=False)
    reason = "torchvision::nms" if error else "No module named 'open_clip"
    with pytest.raises(CalibrationError, match=rf"_pretrained_.*{reason}.*\[openclip\]"):
        load_pool_model(pool, "_pretrained_")


def test_pool_saves_weights_and_loads_its_processor(tmp_path: Path):
    pool = instantiate(composed(POOL).modelpool, _recursive_=False)
    model = Tower()
    pool.save_model(model, tmp_path / "saved")
    stored = load_file(tmp_path / "saved" / WEIGHTS_FILE)
    assert set(stored) == set(model.state_dict())
    assert all(torch.equal(stored[name], t) for name, t in model.state_dict().items())
    assert type(pool.load_processor()).__name__ == "CLIPProcessor"
    own = OpenClipPool({"a": model}, processor=len)
    assert own.load_processor() is len


def evaluated(model: nn.Module) -> dict:
    pool = instantiate(composed(POOL).modelpool.default_taskpool, _recursive_=False)
    pool.setup()
    wanted = "mini_greek"
    pool.test_dataloaders = {wanted: pool.test_dataloaders[wanted]}
    return pool.evaluate(model)


class Projected(nn.Module):
    """The suite's own vision model with its projection, which makes features as open_clip does."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.clip = CLIPModel.from_pretrained(image.path())
        weights = load_file(Path(image.path(name), "model.safetensors"))
        vision = {n: t.float() for n, t in weights.items() if n.startswith("vision_model.")}
        assert not self.clip.load_state_dict(vision, strict=False).unexpected_keys

    def encode_image(self, image: torch.Tensor) -> torch.Tensor:
        return self.clip.visual_projection(self.clip.vision_model(image).pooler_output)


def test_task_pool_compares_projected_features_with_the_heads():
    rows = json.loads(Path(image.path("MEASURED.json")).read_text(encoding="utf-8"))["accuracies"]
    items = len(image.load_split("mini_greek", "test"))
    found = evaluated(Projected("mini_greek"))["mini_greek"]["accuracy"]
    assert abs(found - rows["TA6"]["experts"]["mini_greek"]) * items < 1.5


def test_features_of_another_width_are_refused():
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.flatten(1)[:, :5] * self.scale

    with pytest.raises(CalibrationError, match=r"5 channels.*taskpool\.clip_model 64"):
        evaluated(Narrow())
