"""The bundled suite in open_clip's architecture, as far as it goes without open_clip."""

from pathlib import Path

import fusion_bench_featcal.fusionbench.compat  # noqa: F401

# isort: split
import pytest
import torch
from configs import composed
from fusion_bench.utils import instantiate
from hydra.utils import get_class, get_method
from safetensors.torch import load_file
from tiny_open_clip import Tower

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.fusionbench import load_pool_model
from fusion_bench_featcal.suites import image
from fusion_bench_featcal.suites.open_clip import load_tower, tower_weights
from fusion_bench_featcal.tasks import ClipTaskPool

POOL = ("modelpool=open-clip-vit-mini_TA6", "taskpool=open-clip-vit-mini_TA6")


def test_yaml_differs_from_the_suite_it_was_converted_from_where_it_must_only():
    config = composed(*POOL)
    pool, origin = config.modelpool, composed("modelpool=clip-vit-mini_TA6").modelpool
    assert issubclass(get_class(config.taskpool._target_), ClipTaskPool)
    assert pool.default_taskpool == config.taskpool
    assert set(pool.models) == set(origin.models)
    for name, model in pool.models.items():
        assert get_method(model._target_) is load_tower
        assert origin.models[name] == image.path(model.name)
    for key in set(origin) - {"_target_", "models", "default_taskpool", "featcal"}:
        assert pool[key] == origin[key], key
    # What transformers' CLIP alone can be compared with is left out.
    assert {k: v for k, v in pool.featcal.items() if k != "compare"} == origin.featcal


def test_weights_of_the_suite_are_a_whole_tower():
    weights = tower_weights("mini_latin")
    assert set(weights) == set(Tower(depth=4).state_dict())
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    stored = load_file(Path(image.path("mini_latin"), "model.safetensors"))
    layer = "vision_model.encoder.layers.2.self_attn"
    names = [f"{layer}.{name}_proj.bias" for name in "qkv"]
    fused = weights["transformer.resblocks.2.attn.in_proj_bias"]
    assert torch.equal(fused, torch.cat([stored[name].float() for name in names]))


def test_missing_open_clip_says_what_to_install(monkeypatch):
    def refuse(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr("fusion_bench_featcal.suites.open_clip.import_module", refuse)
    pool = instantiate(composed(*POOL).modelpool, _recursive_=False)
    with pytest.raises(CalibrationError, match=r"_pretrained_.*'open_clip.*\[openclip\]"):
        load_pool_model(pool, "_pretrained_")
