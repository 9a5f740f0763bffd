"""LoRA experts, made whole tensor by tensor, against experts merged by PEFT or by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import merged_by_hand, write_adapter
from fusion_bench.modelpool import Seq2SeqLMPool
from omegaconf import OmegaConf
from safetensors.torch import save_file
from tiny_texts import load_t5, t5_model, with_data, word_tokenizer, write
from torch import nn
from transformers.pytorch_utils import Conv1D

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.algorithm import FeatCalAlgorithm
from fusion_bench_featcal.experts import InMemoryExpert
from fusion_bench_featcal.experts.lora import LoraExpert
from fusion_bench_featcal.fusionbench.pool_models import PoolModel


def mixed() -> nn.Module:
    """Every kind of module that PEFT adapts, two whose weights are `[inputs, outputs]`, a norm."""
    torch.manual_seed(0)
    return nn.ModuleDict(
        {"emb": nn.Embedding(11, 6), "lin": nn.Linear(6, 7), "conv": nn.Conv2d(3, 4, 3),
         "norm": nn.LayerNorm(7), "head": nn.Linear(7, 4), "wide": Conv1D(8, 6),
         "square": Conv1D(6, 6)}
    )  # fmt: skip


FORMS: dict[str, tuple[list[str], dict[str, Any], int]] = {  # the last: changed tensors
    "embedding": (["lin", "emb"], {}, 2),
    "whole modules": (["lin"], {"modules_to_save": ["head", "norm"]}, 5),
    "dora": (["lin", "emb", "conv"], {"use_dora": True}, 3),
    "dora and all else": (
        ["lin", "conv"],
        {"use_dora": True, "use_rslora": True, "modules_to_save": ["norm"],
         "rank_pattern": {"lin": 3}, "alpha_pattern": {"conv": 5}}, 4),
    "biases": (["lin"], {"bias": "all"}, 7),
    "biases of its modules": (["lin"], {"bias": "lora_only"}, 2),
    "orthogonal": (["lin"], {"init_lora_weights": "orthogonal"}, 1),
    "inputs first": (["wide", "square"], {}, 2),
    "dora, inputs first": (["wide", "square"], {"use_dora": True, "bias": "lora_only"}, 4),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
@pytest.mark.parametrize("form", FORMS)
def test_tensors_are_those_that_peft_merges(form: str, tmp_path: Path):
    from peft import LoraConfig, get_peft_model

    targets, config, changes = FORMS[form]
    settings = LoraConfig(r=2, lora_alpha=3, target_modules=targets, **config)
    wrapped: Any = get_peft_model(mixed(), settings)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    wrapped.save_pretrained(str(tmp_path))
    base, source = mixed().state_dict(), LoraExpert(InMemoryExpert(mixed()), tmp_path)
    merged = wrapped.merge_and_unload().state_dict()
    assert source.names() == set(merged)
    for name, tensor in merged.items():
        torch.testing.assert_close(source.tensor(name), tensor, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(source.rows(name, 1, 3), tensor[1:3], rtol=1e-6, atol=1e-7)
        assert source.shape(name) == tuple(tensor.shape)
    assert sum(not torch.equal(base[name], merged[name]) for name in merged) == changes


START = "base_model.model."


def pair(name: str) -> dict[str, torch.Tensor]:
    return {f"{START}{name}.lora_{x}.weight": torch.zeros(2, 2) for x in "AB"}


ZEROS = torch.zeros(2, 2)
REFUSED: list[tuple[dict[str, Any], dict[str, torch.Tensor] | None, str]] = [
    *((change, None, rf"adapter_config.*{word}.*merge_and_unload") for change, word in (
        ({"lora_bias": True}, "lora_bias"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"peft_type": "LOHA"}, "LOHA"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
        ({"something_new": 1}, "something_new"))),
    ({}, {f"{START}lm_head.lora_embedding_A": ZEROS}, "only one of its two"),
    ({}, {f"{START}nowhere.lora_A.weight": ZEROS}, "only one of its two"),
    ({}, {f"{START}lm_head.lora_B.bias": torch.zeros(2)}, "no tensor 'lm_head.lora_B.bias'"),
    ({}, {f"{START}lm_head.weight": torch.zeros(9, 8)}, r"shape \(9, 8\), the base's is \(23"),
    ({}, pair("lm_head"), r"changes a weight \(2, 2\), the base's is \(23, 8"),
    ({}, pair("elsewhere"), "no module 'elsewhere'"),
    ({"r": 7, "rank_pattern": {"q": 2, "v": 2}}, None, r"wo' has ranks 2 and 2, not 7"),
]  # fmt: skip


def test_adapters_that_do_not_fit_are_refused(tmp_path: Path):
    base = t5_model().float()
    for changes, tensors, message in REFUSED:
        adapter = write_adapter(tmp_path, base, 1, **changes)
        if tensors is not None:
            save_file(tensors, adapter / "adapter_model.safetensors")
        with pytest.raises(CalibrationError, match=message):
            LoraExpert(InMemoryExpert(base), adapter)
    adapter = write_adapter(tmp_path, base, 1, r=7, rank_pattern={"(q|v|wo)": 2})
    LoraExpert(InMemoryExpert(base), adapter)  # modules may have ranks of their own


def test_calibration_with_lora_experts_is_that_with_merged_ones(tmp_path: Path):
    paths, lora = {"_pretrained_": write(t5_model().float(), tmp_path / "base")}, {}
    for seed, task in enumerate(("one", "two")):
        adapter = write_adapter(tmp_path / f"lora_{task}", t5_model(), seed)
        merged = merged_by_hand(t5_model().float(), adapter, 3.0)
        paths[task] = write(merged, tmp_path / f"whole_{task}")
        lora[task] = {
            "_target_": "fusion_bench.modelpool.seq2seq_lm.modelpool.load_lora_model",
            "base_model_path": paths["_pretrained_"], "peft_model_path": str(adapter),
        }  # fmt: skip
    models, start = [], t5_model(5).float()
    for entries in ({}, lora):
        config: Any = OmegaConf.create(load_t5(paths) | entries)
        pool: Any = with_data(Seq2SeqLMPool(config, tokenizer=word_tokenizer(ends=True)))
        pool._models["_merged_"] = load_t5(paths)["one"]
        assert not isinstance(PoolModel(pool, "two").source(stream_experts=True), nn.Module)

        def load(name: str, pool: Any = pool) -> Any:
            assert "peft_model_path" not in pool._models[name]  # never whole
            return start if name == "_merged_" else Seq2SeqLMPool.load_model(pool, name)

        pool.load_model = load
        method = FeatCalAlgorithm(samples_per_task=6, calibrate_norm=False, ridge_lambda=1e-2)
        models.append(method.run(pool).state_dict())
    for name, tensor in models[0].items():
        torch.testing.assert_close(models[1][name], tensor, rtol=1e-4, atol=1e-5)
    assert any(not torch.equal(models[0][name], t) for name, t in start.state_dict().items())


def test_adapter_of_a_part_changes_the_bases_tensors_of_that_part(tmp_path: Path):
    base = nn.ModuleDict({"inner": t5_model().float(), "other": nn.Linear(2, 2)})
    adapter = write_adapter(tmp_path, base["inner"], seed=3)
    source = LoraExpert(InMemoryExpert(base), adapter, "inner.")
    tensors = {name: source.tensor(name).clone() for name in base.state_dict()}
    merged_by_hand(base["inner"], adapter, 3.0)
    for name, expected in base.state_dict().items():
        torch.testing.assert_close(tensors[name], expected)
    with pytest.raises(CalibrationError, match="the base has no module"):
        LoraExpert(InMemoryExpert(base), adapter)
