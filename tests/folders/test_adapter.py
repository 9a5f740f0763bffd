"""The calibrated model as an adapter, loaded by PEFT itself."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from tiny_models import scatter
from tiny_texts import llama_model, t5_model
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from fusion_bench_featcal.experts import InMemoryExpert
from fusion_bench_featcal.experts.lora import LoraExpert
from fusion_bench_featcal.folders.adapter import Adapter, factors

RANK = 4


def gpt2() -> nn.Module:
    """Weights as `[inputs, outputs]`, tied embeddings, biases."""
    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=30))


def bert() -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
    return BertForSequenceClassification(BertConfig(num_hidden_layers=2, vocab_size=30, **sizes))


def qwen() -> nn.Module:
    """Biases in some linear modules only, tied embeddings."""
    config = Qwen2Config(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=30)
    config.update({"num_key_value_heads": 1, "intermediate_size": 24, "tie_word_embeddings": True})
    return Qwen2ForCausalLM(config)


TIED = {"llama": [], "t5": ["shared"], "bert": [], "gpt2": ["transformer.wte", "lm_head"],
        "qwen": ["model.embed_tokens", "lm_head"]}  # fmt: skip
MAKERS: dict[str, Any] = {
    "llama": llama_model, "t5": t5_model, "gpt2": gpt2, "bert": bert, "qwen": qwen
}  # fmt: skip
KINDS = {"t5": "seq2seq", "bert": "text classifier"}


def write(adapter: Adapter, folder: Path, name: str) -> str:
    adapter.write(folder / "adapter", KINDS.get(name, "causal"), "base")
    return str(folder / "adapter")


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")
@pytest.mark.parametrize("name", MAKERS)
def test_peft_loads_the_adapter_over_the_base(name, tmp_path):
    torch.manual_seed(0)
    base: Any = MAKERS[name]().float().eval()
    calibrated, approximate = scatter(base, 3, 0.05), copy.deepcopy(base)
    adapter = Adapter.of(approximate, calibrated, RANK)
    folder = write(adapter, tmp_path, name)
    loaded: Any = PeftModel.from_pretrained(copy.deepcopy(base), folder)
    merged = loaded.merge_and_unload().state_dict()
    own = LoraExpert(InMemoryExpert(base), folder)
    for key, value in approximate.state_dict().items():
        torch.testing.assert_close(merged[key], value, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(own.tensor(key), value, rtol=1e-6, atol=1e-7)
    copies = {"encoder.embed_tokens", "decoder.embed_tokens"}  # modules of their own in release 5
    assert set(TIED[name]) <= set(adapter.left_out) <= {*TIED[name], *copies}
    tied = ("encoder.embed", "decoder.embed", *TIED[name])
    for key, value in calibrated.state_dict().items():
        if key.endswith("bias") or "norm" in key.lower():
            torch.testing.assert_close(merged[key], value)
        elif not key.startswith(tied):
            assert not torch.equal(merged[key], base.state_dict()[key])


def test_a_change_of_that_rank_is_kept_whole(tmp_path):
    base = llama_model().float()
    calibrated = copy.deepcopy(base)
    module: Any = calibrated.get_submodule("model.layers.1.mlp.up_proj")
    with torch.no_grad():
        module.weight += torch.randn(module.out_features, 2) @ torch.randn(2, module.in_features)
    adapter = Adapter.of(copy.deepcopy(base), calibrated, 2)
    assert adapter.factored == ["model.layers.1.mlp.up_proj"] and adapter.saved == []
    assert adapter.lost < 1e-10 * adapter.energy
    assert "rank 2: 0.0 % of the change's energy is lost" in adapter.note()


@pytest.mark.parametrize("shape", [(9, 7), (700, 600)])
@pytest.mark.parametrize("rank", [1, 3, 8])
def test_factors_are_the_best(shape, rank):
    """The energy that is lost is that of the singular values beyond the rank."""
    torch.manual_seed(0)
    change = torch.randn(shape) @ torch.diag(0.7 ** torch.arange(shape[1]))
    down, up = factors(change, rank)
    assert down.shape == (rank, shape[1]) and up.shape == (shape[0], rank)
    lost = torch.linalg.svdvals(change)[rank:].square().sum()
    torch.testing.assert_close((change - up @ down).square().sum(), lost, rtol=1e-3, atol=1e-6)
