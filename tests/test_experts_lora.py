"""LoRA experts, made whole tensor by tensor, against experts merged by hand."""

import json
from typing import Any

import pytest
import torch
from adapters import PLAIN, merged_by_hand, write_adapter
from omegaconf import OmegaConf
from safetensors.torch import save_file
from tiny_texts import t5_model, with_data, word_tokenizer, write
from torch import nn
from transformers.pytorch_utils import Conv1D

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.algorithm import FeatCalAlgorithm
from fusion_bench_featcal.experts import InMemoryExpert
from fusion_bench_featcal.experts.lora import LoraExpert
from fusion_bench_featcal.fusionbench.pool_models import PoolModel


class Mixed(nn.Module):
    """Every kind of module that PEFT adapts, and a normalization."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(11, 6)
        self.lin = nn.Linear(6, 7)
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 4)


class InputsFirst(nn.Module):
    """Modules whose weights are stored as `[inputs, outputs]`, as GPT-2 has them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.square = Conv1D(8, 6), Conv1D(6, 6)


FORMS: dict[str, tuple[type[nn.Module], dict[str, Any], int]] = {
    "embedding": (Mixed, {"target_modules": ["lin", "emb"]}, 2),
    "whole modules": (Mixed, {"target_modules": ["lin"], "modules_to_save": ["head", "norm"]}, 5),
    "dora": (Mixed, {"target_modules": ["lin", "emb", "conv"], "use_dora": True}, 3),
    "dora and all else": (
        Mixed,
        {
            "target_modules": ["lin", "conv"],
            "use_dora": True,
            "use_rslora": True,
            "modules_to_save": ["norm"],
            "rank_pattern": {"lin": 3},
            "alpha_pattern": {"conv": 5},
        },
        4,
    ),
    "biases": (Mixed, {"target_modules": ["lin"], "bias": "all"}, 5),
    "biases of its modules": (Mixed, {"target_modules": ["lin"], "bias": "lora_only"}, 2),
    "orthogonal": (Mixed, {"target_modules": ["lin"], "init_lora_weights": "orthogonal"}, 1),
    "inputs first": (InputsFirst, {"target_modules": ["wide", "square"]}, 2),
    "dora, inputs first": (
        InputsFirst,
        {"target_modules": ["wide", "square"], "use_dora": True, "bias": "lora_only"},
        4,
    ),
}


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
@pytest.mark.parametrize("form", FORMS)
def test_what_peft_saves_is_what_peft_merges(form, tmp_path):
    from peft import LoraConfig, get_peft_model

    kind, config, changes = FORMS[form]
    wrapped: Any = get_peft_model(kind(), LoraConfig(r=2, lora_alpha=3, **config))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    wrapped.save_pretrained(str(tmp_path))
    base = kind().state_dict()
    source = LoraExpert(InMemoryExpert(kind()), tmp_path)
    merged = wrapped.merge_and_unload().state_dict()
    assert source.names() == set(merged)
    for name, tensor in merged.items():
        torch.testing.assert_close(source.tensor(name), tensor, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(source.rows(name, 1, 3), tensor[1:3], rtol=1e-6, atol=1e-7)
        assert source.shape(name) == tuple(tensor.shape)
    assert sum(not torch.equal(base[name], merged[name]) for name in merged) == changes


@pytest.mark.parametrize("stored", ["lora_magnitude_vector", "lora_magnitude_vector.weight"])
def test_dora_by_its_formula(stored, tmp_path):
    """Each output's row has the adapter's norm and the direction of base + scale * B A."""
    linear = nn.Linear(5, 4)
    down, up, magnitude = torch.randn(2, 5), torch.randn(4, 2), torch.rand(4) + 1
    start = f"{START}lin."
    tensors = {f"{start}lora_A.weight": down, f"{start}lora_B.weight": up}
    save_file(tensors | {start + stored: magnitude}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(PLAIN | {"use_dora": True}))
    source = LoraExpert(InMemoryExpert(nn.ModuleDict({"lin": linear})), tmp_path)
    direction = linear.weight + 3 * (up @ down)
    expected = torch.diag(magnitude / direction.square().sum(dim=1).sqrt()) @ direction
    torch.testing.assert_close(source.tensor("lin.weight"), expected)
    assert source.nbytes("lin.weight") == 4 * (20 + 10 + 8 + 4)


def test_modules_ranks_of_their_own(tmp_path):
    base = t5_model().float()
    adapter = write_adapter(tmp_path / "a", base, 1, r=7, rank_pattern={"(q|v|wo)": 2})
    LoraExpert(InMemoryExpert(base), adapter)


PAIR = {f"base_model.model.lm_head.lora_{x}.weight": torch.zeros(2, 2) for x in "AB"}
ELSEWHERE = {name.replace("lm_head", "elsewhere"): tensor for name, tensor in PAIR.items()}
START = "base_model.model."


@pytest.mark.parametrize(
    ("changes", "tensors", "message"),
    [
        *(
            (change, None, rf"adapter_config.*{word}.*merge_and_unload")
            for change, word in (
                ({"lora_bias": True}, "lora_bias"),
                ({"trainable_token_indices": [3]}, "trainable_token_indices"),
                ({"peft_type": "LOHA"}, "LOHA"),
                ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
                ({"something_new": 1}, "something_new"),
            )
        ),
        ({}, {f"{START}lm_head.lora_embedding_A": torch.zeros(2, 2)}, "only one of its two"),
        ({}, {f"{START}lm_head.lora_B.bias": torch.zeros(2)}, "no tensor 'lm_head.lora_B.bias'"),
        ({}, {f"{START}lm_head.weight": torch.zeros(9, 8)}, r"shape \(9, 8\), the base's is \(23"),
        ({}, {f"{START}nowhere.lora_A.weight": torch.zeros(2, 2)}, "only one of its two"),
        ({}, PAIR, r"changes a weight \(2, 2\), the base's is \(23, 8"),
        ({}, ELSEWHERE, "no module 'elsewhere'"),
        ({"r": 7, "rank_pattern": {"q": 2, "v": 2}}, None, r"wo' has ranks 2 and 2, not 7"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(changes, tensors, message, tmp_path):
    base = t5_model().float()
    adapter = write_adapter(tmp_path / "a", base, 1, **changes)
    if tensors is not None:
        save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(CalibrationError, match=message):
        LoraExpert(InMemoryExpert(base), adapter)


def test_calibration_with_lora_experts_is_that_with_merged_ones(tmp_path):
    from fusion_bench.modelpool import Seq2SeqLMPool

    base = write(t5_model().float(), tmp_path / "base")
    load = "transformers.AutoModelForSeq2SeqLM.from_pretrained"
    whole: dict[str, Any] = {
        "_pretrained_": {"_target_": load, "pretrained_model_name_or_path": base}
    }
    lora = dict(whole)
    for seed, task in enumerate(("one", "two")):
        adapter = write_adapter(tmp_path / f"lora_{task}", t5_model(), seed)
        merged = merged_by_hand(t5_model().float(), adapter, 3.0)
        folder = write(merged, tmp_path / f"whole_{task}")
        whole[task] = {"_target_": load, "pretrained_model_name_or_path": folder}
        lora[task] = {
            "_target_": "fusion_bench.modelpool.seq2seq_lm.modelpool.load_lora_model",
            "base_model_path": base,
            "peft_model_path": str(adapter),
        }
    models = []
    for entries in (whole, lora):
        pool = with_data(
            Seq2SeqLMPool(OmegaConf.create(entries), tokenizer=word_tokenizer(ends=True))
        )
        pool._models["_merged_"] = whole["one"]
        assert not isinstance(PoolModel(pool, "two").source(stream_experts=True), nn.Module)
        method = FeatCalAlgorithm(samples_per_task=6, calibrate_norm=False, ridge_lambda=1e-2)
        pool.load_model = _loader(pool)
        models.append(method.run(pool).state_dict())
    for name, tensor in models[0].items():
        torch.testing.assert_close(models[1][name], tensor, rtol=1e-4, atol=1e-5)
    moved = t5_model(5).float().state_dict()
    assert any(not torch.equal(models[0][name], moved[name]) for name in moved)


def _loader(pool: Any) -> Any:
    """The pool's own way of loading, but for the merged model, and never a LoRA expert whole."""
    load = type(pool).load_model

    def load_model(name: str) -> Any:
        assert "peft_model_path" not in pool._models[name]
        return t5_model(5).float() if name == "_merged_" else load(pool, name)

    return load_model


def test_adapter_of_a_part_changes_the_bases_tensors_of_that_part(tmp_path):
    base = nn.ModuleDict({"inner": t5_model().float(), "other": nn.Linear(2, 2)})
    inner: Any = base["inner"]
    adapter = write_adapter(tmp_path / "adapter", inner, seed=3)
    source = LoraExpert(InMemoryExpert(base), adapter, "inner.")
    found = {name: source.tensor(name).clone() for name in base.state_dict()}
    merged_by_hand(inner, adapter, 3.0)
    for name, expected in base.state_dict().items():
        torch.testing.assert_close(found[name], expected)
    with pytest.raises(CalibrationError, match="the base has no module"):
        LoraExpert(InMemoryExpert(base), adapter)
