"""Configs of a pool's models must be those of one function, which a family knows."""

from pathlib import Path
from typing import Any

import pytest
from fusion_bench import BaseModelPool
from fusion_bench.modelpool import CausalLMPool
from omegaconf import OmegaConf
from test_pool_checks import (
    NAMES,
    change_config,
    clip_pool,
    refusal,
    tower,
    towers,
)
from tiny_texts import with_data, word_tokenizer, write
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)

from fusion_bench_featcal import FeatCalSettings
from fusion_bench_featcal.fusionbench.pool_configs import check_pool_settings
from fusion_bench_featcal.fusionbench.pool_models import PoolModels


def test_expert_with_another_function_is_refused_by_its_config(tmp_path):
    models = towers(tmp_path)
    change_config(models["two"], hidden_act="relu", layer_norm_eps=0.1)
    message = refusal(clip_pool(models))
    assert "'two' is another function than the base" in message
    assert "hidden_act='relu' (there 'quick_gelu'), layer_norm_eps=0.1 (there 1e-05)" in message
    assert "method.ignore_config=[hidden_act,layer_norm_eps]" in message
    ignored = FeatCalSettings(ignore_config=["hidden_act", "layer_norm_eps"])
    check_pool_settings(PoolModels(clip_pool(models)), ignored)


def test_merged_model_with_another_function_is_refused(tmp_path):
    models = towers(tmp_path)
    merged = write(tower(7, layer_norm_eps=0.2), tmp_path / "merged")
    assert "model '_merged_' is another" in refusal(clip_pool(models | {"_merged_": merged}))


def gpt2() -> Any:
    ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=23, n_positions=16, n_embd=8, n_layer=2, n_head=2, **ends)
    return GPT2LMHeadModel(config)


def test_family_of_a_type_without_a_name_is_found_by_its_structure(tmp_path):
    models = {name: write(gpt2(), tmp_path / name) for name in NAMES}
    pool = with_data(CausalLMPool(OmegaConf.create(models), tokenizer=word_tokenizer()))
    check_pool_settings(PoolModels(pool), FeatCalSettings())
    family = {"name": "replay", "blocks": ["transformer.h.*"]}
    check_pool_settings(PoolModels(pool), FeatCalSettings(family=family))


def plain_pool(kind: Any, folder: Path) -> Any:
    """A pool whose entries name the class that loads them; no weights are ever looked at."""
    write(kind, folder)
    entry = {"_target_": "transformers.AutoModel.from_pretrained"}
    entry["pretrained_model_name_or_path"] = str(folder)
    models: Any = OmegaConf.create({"_pretrained_": entry, "one": entry})
    return BaseModelPool(models)


def test_pool_of_any_models_is_looked_at_as_its_configs_tell(tmp_path):
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    small = ViTConfig(**sizes, num_hidden_layers=2, image_size=8, patch_size=4)
    model = ViTForImageClassification(small)
    pool = plain_pool(model, tmp_path / "vit")
    check_pool_settings(PoolModels(pool), FeatCalSettings())  # the class that is loaded
    parts = ViTModel(small).named_modules()
    blocks = next(n for n, module in parts if isinstance(module, nn.ModuleList))
    family = {"name": "replay", "blocks": [f"{blocks}.*"]}
    check_pool_settings(PoolModels(pool), FeatCalSettings(family=family))


def test_class_of_models_that_a_pool_loads_by_itself_is_read_from_their_config(tmp_path):
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    small = ViTConfig(**sizes, num_hidden_layers=2, image_size=8, patch_size=4)
    folder = write(ViTForImageClassification(small), tmp_path / "vit")
    models: Any = OmegaConf.create({"_pretrained_": folder, "one": folder})
    pool = BaseModelPool(models)
    check_pool_settings(PoolModels(pool), FeatCalSettings())
    change_config(folder, architectures=["ModelOfTheirOwn"])
    check_pool_settings(PoolModels(pool), FeatCalSettings())  # the run tells


def test_unknown_model_in_memory_is_refused_with_the_repeated_blocks_to_try():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = (nn.Sequential(*map(nn.Linear, (4, 4), (4, 4))) for _ in "ab")

    pool = BaseModelPool({"_pretrained_": Net(), "one": Net()})  # type: ignore[dict-item]
    expected = r"auto does not know Net .*blocks: \[one\.\*\]\} or .*blocks: \[other\.\*\]\}"
    with pytest.raises(ValueError, match=expected):
        check_pool_settings(PoolModels(pool), FeatCalSettings())


def test_family_that_does_not_fit_is_refused_before_anything_is_loaded(tmp_path):
    pool = clip_pool(towers(tmp_path))
    assert "no decoder layers" in refusal(pool, FeatCalSettings(family="llama"))
    family = {"name": "replay", "blocks": ["no.such.*"]}
    assert "'no.such.*' matches no module" in refusal(pool, FeatCalSettings(family=family))
